//! Lists and descriptions of the served model in the form of Ollama.

use pellucid_generate::{LoadedModel, ModelDetails, utc_at};
use serde_json::{Value, json};

use super::reply::models_time;
use super::request::{can_think, known_name};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::openai::shared_fields::check_model;

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

fn entry(name: &str, model: &LoadedModel) -> Value {
    json!({ "name": name, "model": name, "size": model.details.num_bytes, "digest": model.fingerprint,
        "details": details(&model.details) })
}

/// Returns the reply of `/api/tags`: every name of the model.
pub(super) fn tags(model: &LoadedModel) -> Value {
    let one = |name| {
        let mut entry = entry(name, model);
        entry["modified_at"] = models_time(utc_at(model.created)).into();
        entry
    };
    json!({ "models": model.names().map(one).collect::<Vec<_>>() })
}

/// Returns the reply of `/api/ps`: what is loaded. `is_on_gpu` says where the weights are.
pub(super) fn running(model: &LoadedModel, is_on_gpu: bool) -> Value {
    let mut entry = entry(&model.id, model);
    entry["expires_at"] = models_time(utc_at(NEVER_S)).into();
    entry["size_vram"] = if is_on_gpu { model.details.num_bytes } else { 0 }.into();
    entry["context_length"] = model.context_len.into();
    json!({ "models": [entry] })
}

/// Reads a request of `/api/show` and returns its reply.
pub(super) fn show(value: Json, model: &LoadedModel) -> Result<Value, ApiError> {
    let mut fields = Fields::of(value)?;
    let name = match fields.take("name") {
        Some(name) if !fields.has("model") => name,
        Some(_) => return Err(ApiError::field("name", "name is the older form of model: give one of them")),
        None => fields.required("model")?,
    };
    let name = fields::string("model", name, MAX_WORD_LEN)?;
    fields.boolean("verbose")?;
    fields.finish()?;
    check_model(&known_name(name, model), model)?;
    let mut capabilities = vec!["completion"];
    if model.template.is_some() {
        capabilities.push("tools");
    }
    if can_think(model) {
        capabilities.push("thinking");
    }
    let family = &model.details.family;
    Ok(json!({
        "template": model.template.as_ref().map_or("", |template| template.source()),
        "parameters": "",
        "details": details(&model.details),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.details.num_parameters,
            format!("{family}.context_length"): model.context_len,
            format!("{family}.vocab_size"): model.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": models_time(utc_at(model.created)),
    }))
}
