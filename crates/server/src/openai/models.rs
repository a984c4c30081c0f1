//! `/v1/models`: lists the served models.

use pellucid_generate::{LoadedEmbedder, LoadedModel, ShorterVectors};
use serde::Serialize;
use utoipa::ToSchema;

use super::openapi::schemas;
use super::sampling::default_parameters;
use super::shared_fields::unknown_model;
use crate::http::error::ApiError;
use crate::limits::tenants::Tenant;
use crate::models::registry::Models;
use crate::models::status::ModelStatus;
use crate::models::{OpenModel, Purpose};
use crate::state::App;

/// A served model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard {
    id: String,
    /// The name that replies have. Differs from `id` for an alias.
    root: String,
    /// `model`.
    object: &'static str,
    /// Time of loading, in seconds since 1970; of the server's start while the model is not loaded.
    created: u64,
    owned_by: &'static str,
    /// Maximum tokens of prompt and reply together, or of a text whose vector is computed.
    max_model_len: usize,
    /// Identifies model, build and instruction set. Absent while the model is not loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<String>,
    /// Purposes of the model: `chat` and `completions`, or `embeddings` and `rerank`.
    capabilities: Vec<&'static str>,
    /// Format in which the model calls tools, by its name in the documentation; `generic` if its chat template has
    /// none. Absent for models that do not chat, and while the model is not loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_format: Option<&'static str>,
    /// Sampling parameters of a request that gives none: for each field its `value`, and its `source`, which is
    /// `server` (a flag of the server), `model` (the model's files recommend it) or `openai` (OpenAI's default). Absent
    /// for models that compute vectors, and while the model is not loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    sampling_defaults: Option<serde_json::Value>,
    /// A block of keys and values. Absent for models that compute vectors, and while the model is not loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_block: Option<KvBlockCard>,
    /// The vectors of a model that computes them. Absent while the model is not loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<EmbeddingCard>,
    /// Whether the model is loaded, and what it takes.
    pellucid: ModelStatus,
}

/// A block of the memory of keys and values. The prefix cache reuses whole blocks.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct KvBlockCard {
    /// Positions of a block, one for each token.
    positions: usize,
    /// Bytes of a block.
    bytes: usize,
}

/// The vectors of a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingCard {
    /// Values of a vector.
    dimensions: usize,
    /// Values that `dimensions` of a request may ask for instead: a list, `any` number up to `dimensions`, or `none`.
    #[schema(schema_with = schemas::shorter_vectors)]
    shorter: serde_json::Value,
    /// How the rows of a text become its vector: `mean`, `cls` or `last`.
    pooling: &'static str,
}

/// All names of the served models, each as a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelCard>,
}

impl ModelCard {
    /// Returns the card of a model under one of its names.
    fn new(name: &str, index: usize, models: &Models, sees_activity: bool) -> ModelCard {
        let entry = &models.entries()[index];
        let mut card = ModelCard {
            id: name.to_owned(),
            root: entry.id.clone(),
            object: "model",
            created: models.started(),
            owned_by: "pellucid",
            max_model_len: entry.context_len,
            system_fingerprint: None,
            capabilities: match (entry.purpose, entry.has_template) {
                (Purpose::Text, true) => vec!["chat", "completions"],
                (Purpose::Text, false) => vec!["completions"],
                (Purpose::Vectors, _) => vec!["embeddings", "rerank"],
            },
            tool_format: None,
            sampling_defaults: None,
            kv_block: None,
            embedding: None,
            pellucid: models.status(index, sees_activity),
        };
        models.for_each_ready(|ready, open| match open {
            OpenModel::Text(model) if ready == index => card.add_generator(model),
            OpenModel::Vectors(model) if ready == index => card.add_embedder(model),
            _ => {}
        });
        card
    }

    /// Adds what is known of a loaded model that generates text.
    fn add_generator(&mut self, model: &LoadedModel) {
        self.created = model.created;
        self.max_model_len = model.context_len;
        self.system_fingerprint = Some(model.fingerprint.clone());
        self.capabilities = match model.template {
            Some(_) => vec!["chat", "completions"],
            None => vec!["completions"],
        };
        self.tool_format = model.template.as_ref().map(|_| model.calling().format().name);
        self.sampling_defaults = Some(default_parameters(model));
        let engine = &model.engine;
        self.kv_block = Some(KvBlockCard { positions: engine.block_len(), bytes: engine.bytes_per_block() });
    }

    /// Adds what is known of a loaded model that computes vectors.
    fn add_embedder(&mut self, model: &LoadedEmbedder) {
        let info = model.info();
        self.created = model.created;
        self.max_model_len = info.context_len;
        self.system_fingerprint = Some(model.fingerprint.clone());
        self.capabilities = if info.scores_pairs { vec!["rerank"] } else { vec!["embeddings", "rerank"] };
        self.embedding = (!info.scores_pairs).then(|| EmbeddingCard {
            dimensions: info.num_dimensions,
            shorter: match &model.shorter {
                ShorterVectors::None => "none".into(),
                ShorterVectors::Any => "any".into(),
                ShorterVectors::Listed(lengths) => lengths.clone().into(),
            },
            pooling: info.pooling.name(),
        });
    }

    pub(crate) fn find(name: &str, app: &App, tenant: &Tenant) -> Result<ModelCard, ApiError> {
        let mut visible = app.models.visible(tenant);
        match visible.find(|(_, entry)| entry.names().any(|own| own == name)) {
            Some((index, _)) => Ok(ModelCard::new(name, index, &app.models, app.sees_activity(tenant))),
            None => Err(unknown_model(name, app.models.visible(tenant).flat_map(|(_, entry)| entry.names()))),
        }
    }
}

impl ModelList {
    pub(crate) fn new(app: &App, tenant: &Tenant) -> ModelList {
        let sees_activity = app.sees_activity(tenant);
        let card = |index| move |name| ModelCard::new(name, index, &app.models, sees_activity);
        let cards = app.models.visible(tenant).flat_map(|(index, entry)| entry.names().map(card(index)));
        ModelList { object: "list", data: cards.collect() }
    }
}
