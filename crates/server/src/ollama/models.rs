//! Lists and descriptions of the served model in the form of Ollama.

use std::collections::HashMap;

use pellucid_generate::{LoadedEmbedder, LoadedModel, ModelDetails, utc_at};
use serde_json::{Value, json};

use super::reply::models_time;
use super::request::can_think;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::limits::tenants::Tenant;
use crate::models::registry::Models;
use crate::models::{OpenModel, ServedModel};

/// Version of Ollama whose API this is; clients compare it with the one that they need.
pub(super) const API_VERSION: &str = "0.12.0";
/// The year 2200: the model stays loaded as long as the server runs.
const NEVER_S: u64 = 7_258_118_400;
const MAX_WORD_LEN: usize = 512;

fn details(details: &ModelDetails) -> Value {
    json!({ "parent_model": "", "format": details.format, "family": details.family, "families": [details.family],
        "parameter_size": size_text(details.num_parameters), "quantization_level": details.quantization })
}

/// Returns a count such as `1.5B`.
fn size_text(count: u64) -> String {
    match count as f64 {
        count if count >= 1e9 => format!("{:.1}B", count / 1e9),
        count if count >= 1e6 => format!("{:.0}M", count / 1e6),
        count => format!("{:.0}K", count / 1e3),
    }
}

fn entry(name: &str, model: &ServedModel, fingerprint: &str) -> Value {
    json!({ "name": name, "model": name, "size": model.details.num_bytes, "digest": fingerprint,
        "details": details(&model.details) })
}

/// Returns fingerprint and time of loading of the loaded models, by index.
fn loaded(models: &Models) -> HashMap<usize, (String, u64)> {
    let mut loaded = HashMap::new();
    models.for_each_ready(|index, open| {
        let facts = match open {
            OpenModel::Text(model) => (model.fingerprint.clone(), model.created),
            OpenModel::Vectors(model) => (model.fingerprint.clone(), model.created),
        };
        loaded.insert(index, facts);
    });
    loaded
}

/// Returns the reply of `/api/tags`: every name of every model.
pub(super) fn tags(models: &Models, tenant: &Tenant) -> Value {
    let loaded = loaded(models);
    let mut tags = Vec::new();
    for (index, model) in models.visible(tenant) {
        let (fingerprint, created) = loaded.get(&index).cloned().unwrap_or((String::new(), models.started()));
        for name in model.names() {
            let mut entry = entry(name, model, &fingerprint);
            entry["modified_at"] = models_time(utc_at(created)).into();
            tags.push(entry);
        }
    }
    json!({ "models": tags })
}

/// Returns the reply of `/api/ps`: what is loaded. `is_on_gpu` says where the weights are.
pub(super) fn running(models: &Models, tenant: &Tenant, is_on_gpu: bool) -> Value {
    let loaded = loaded(models);
    let mut running = Vec::new();
    for (index, model) in models.visible(tenant) {
        let Some((fingerprint, _)) = loaded.get(&index) else { continue };
        let mut entry = entry(&model.id, model, fingerprint);
        let expires = models.status(index, false).expires_at.unwrap_or(NEVER_S);
        entry["expires_at"] = models_time(utc_at(expires)).into();
        entry["size_vram"] = if is_on_gpu { model.details.num_bytes } else { 0 }.into();
        entry["context_length"] = model.context_len.into();
        running.push(entry);
    }
    json!({ "models": running })
}

/// Reads a request of `/api/show` and returns the name in it.
pub(super) fn read_show(value: Json) -> Result<String, ApiError> {
    let mut fields = Fields::of(value)?;
    let name = match fields.take("name") {
        Some(name) if !fields.has("model") => name,
        Some(_) => return Err(ApiError::field("name", "name is the older form of model: give one of them")),
        None => fields.required("model")?,
    };
    let name = fields::string("model", name, MAX_WORD_LEN)?;
    fields.boolean("verbose")?;
    fields.finish()?;
    Ok(name)
}

/// Describes a model that generates text, for `/api/show`.
pub(super) fn show_text(model: &LoadedModel) -> Value {
    let mut capabilities = vec!["completion"];
    if model.template.is_some() {
        capabilities.push("tools");
    }
    if can_think(model) {
        capabilities.push("thinking");
    }
    let template = model.template.as_ref().map_or("", |template| template.source());
    let mut shown = description(&model.details, model.context_len, model.vocab_size, model.created);
    shown["template"] = template.into();
    shown["capabilities"] = json!(capabilities);
    shown
}

/// Describes a model that computes vectors, for `/api/show`. `facts` are those of its files.
pub(super) fn show_vectors(model: &LoadedEmbedder, facts: &ModelDetails) -> Value {
    let info = model.info();
    let mut facts = facts.clone();
    if facts.family.is_empty() {
        facts.family.clone_from(&info.architecture);
    }
    let mut shown = description(&facts, info.context_len, info.vocab_size, model.created);
    if !info.scores_pairs {
        shown["model_info"][format!("{}.embedding_length", facts.family)] = info.num_dimensions.into();
    }
    shown["capabilities"] = json!([if info.scores_pairs { "rerank" } else { "embedding" }]);
    shown
}

/// Returns the members of a description that every kind of model has.
fn description(facts: &ModelDetails, context_len: usize, vocab_size: usize, created: u64) -> Value {
    let family = &facts.family;
    json!({
        "template": "",
        "parameters": "",
        "details": details(facts),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.num_parameters,
            format!("{family}.context_length"): context_len,
            format!("{family}.vocab_size"): vocab_size,
        },
        "modified_at": models_time(utc_at(created)),
    })
}
