//! A model that the server loads when a request needs it, and everything that was decided about it at start.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use pellucid::{Builder, FileAccess, LoadEvent, Overcommit, Pooling, Speculation};
use pellucid_generate::{Guards, LoadedEmbedder, LoadedModel};
use pellucid_server::{LoadModel, OpenModel, Purpose, SharedTenants};
use tracing::info;

use super::fingerprint;
use super::model_settings::{ModelSettings, SettingsFile};
use crate::flags::compute::ComputeArgs;

/// Settings that all models of a server share.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) compute: ComputeArgs,
    /// Settings of single models.
    pub(super) own: SettingsFile,
    pub(super) max_sequences: usize,
    pub(super) max_waiting: usize,
    pub(super) overcommit: Overcommit,
    pub(super) shared_system: Option<String>,
    pub(super) guards: Guards,
    /// Identifies the settings that decide what guards block.
    pub(super) guard_fingerprint: String,
    pub(super) file_access: FileAccess,
    pub(super) pooling: Option<Pooling>,
    pub(super) tenants: SharedTenants,
}

/// A model to load.
#[derive(Debug)]
pub(super) struct OnDemand {
    pub(super) settings: Arc<Settings>,
    pub(super) id: String,
    pub(super) aliases: Vec<String>,
    pub(super) path: PathBuf,
    /// Settings of this model.
    pub(super) own: ModelSettings,
    pub(super) purpose: Purpose,
    pub(super) is_encoder: bool,
    /// Maximum tokens of prompt and reply, if it is less than that of the model.
    pub(super) context_len: Option<usize>,
    /// Drafters of this model.
    pub(super) speculation: Speculation,
    /// Bytes of keys and values, which the plan contains.
    pub(super) kv_bytes: u64,
}

impl OnDemand {
    /// Returns the options of the model, without those that only loading needs.
    pub(super) fn builder(&self) -> Builder {
        let settings = &*self.settings;
        let access = settings.file_access.clone();
        let builder = settings.compute.builder_for(&self.path, access, self.context_len, self.is_encoder);
        let builder = builder.max_waiting(settings.max_waiting);
        match (self.purpose, settings.pooling) {
            (Purpose::Text, _) => builder
                .max_sequences(settings.max_sequences)
                .overcommit(settings.overcommit)
                .speculate(self.speculation.clone()),
            (Purpose::Vectors, Some(pooling)) => builder.pooling(pooling),
            (Purpose::Vectors, None) => builder,
        }
    }

    fn load_text(&self, builder: Builder) -> Result<OpenModel> {
        let settings = &*self.settings;
        let mut builder = builder.kv_memory(self.kv_bytes);
        if let Some(template) = &self.own.template {
            builder = builder.chat_template(template);
        }
        for (tenant, num_tokens) in settings.tenants.kv_quotas() {
            builder = builder.quota(tenant, num_tokens as usize);
        }
        if let Some(text) = &settings.shared_system {
            builder = builder.shared_system(text);
        }
        let loaded = builder.load().map_err(|error| settings.compute.in_flags(error))?;
        let info = &loaded.info;
        let guards = Some(settings.guard_fingerprint.as_str()).filter(|text| !text.is_empty());
        let fingerprint = fingerprint::fingerprint(
            &self.path,
            &info.files,
            loaded.model.context_len,
            &info.device,
            &settings.compute,
            [self.own.template.as_deref(), guards],
        )?;
        let sampling = self.own.sampling.for_server(&loaded.model.tokenizer, loaded.model.sampling.model.clone())?;
        let (id, aliases, guards) = (self.id.clone(), self.aliases.clone(), settings.guards.clone());
        let model = LoadedModel { id, aliases, fingerprint, sampling, guards, ..loaded.model };
        super::log_generator(&model, &loaded.info, settings.max_sequences, settings.max_waiting);
        Ok(OpenModel::Text(Arc::new(model)))
    }

    fn load_vectors(&self, builder: Builder) -> Result<OpenModel> {
        let compute = &self.settings.compute;
        let loaded = builder.load_embeddings().map_err(|error| compute.in_flags(error))?;
        let context_len = loaded.model.info().context_len;
        let fingerprint =
            fingerprint::fingerprint(&self.path, &loaded.files, context_len, &loaded.device, compute, [None; 2])?;
        let (id, aliases) = (self.id.clone(), self.aliases.clone());
        let model = LoadedEmbedder { id, aliases, fingerprint, ..loaded.model };
        super::embeddings::log(&model, &loaded.device, loaded.weight_bytes);
        Ok(OpenModel::Vectors(Arc::new(model)))
    }
}

impl LoadModel for OnDemand {
    fn load(&self, mut on_progress: Box<dyn FnMut(f32) + Send>) -> Result<OpenModel, String> {
        let id = self.id.clone();
        let builder = self.builder().on_event(move |event| match event {
            LoadEvent::Weights { loaded, total } => on_progress(loaded as f32 / total.max(1) as f32),
            LoadEvent::Note(note) => info!(model = id, "{note}"),
            _ => {}
        });
        let opened = match self.purpose {
            Purpose::Text => self.load_text(builder),
            Purpose::Vectors => self.load_vectors(builder),
        };
        opened.map_err(|error| format!("{error:#}"))
    }
}
