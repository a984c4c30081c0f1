//! Control messages: what a client may send while its reply is generated.

use pellucid_engine::Control;
use pellucid_generate::LoadedModel;
use pellucid_sampling::SamplingParams;

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::openai::sampling::SamplingFields;
use crate::reply::Sampling;

/// A control message that was read and checked.
#[derive(Debug)]
pub(super) enum ControlMessage {
    Cancel,
    Pause,
    Resume,
    /// Sampling from the next token on.
    Update(Box<Sampling>),
}

impl ControlMessage {
    /// Reads a control message for a reply with the given sampling.
    pub(super) fn read(value: Json, sampling: &Sampling, model: &LoadedModel) -> Result<ControlMessage, ApiError> {
        let mut fields = Fields::of(value)?;
        let kind = fields::string("type", fields.required("type")?, 64)?;
        let message = match kind.as_str() {
            "cancel" => ControlMessage::Cancel,
            "pause" => ControlMessage::Pause,
            "resume" => ControlMessage::Resume,
            "update" => {
                // Before the sampling fields are read, which take a seed of -1 for an absent one.
                if fields.take("seed").is_some() {
                    return Err(fixed("seed"));
                }
                let changes = SamplingFields::read(&mut fields)?;
                if let Some(name) = FIXED.into_iter().find(|name| fields.take(name).is_some()) {
                    return Err(fixed(name));
                }
                fields.finish()?;
                return Ok(ControlMessage::Update(Box::new(updated(sampling, changes, model)?)));
            }
            _ => {
                let message = format!("type: expected cancel, pause, resume or update, found {}", shown(&kind));
                return Err(ApiError::field("type", message));
            }
        };
        fields.finish()?;
        Ok(message)
    }

    /// Whether a message cancels the reply, and is valid.
    pub(super) fn is_cancel(message: &[u8]) -> bool {
        let Some(mut fields) = Json::parse(message).ok().and_then(|value| Fields::of(value).ok()) else { return false };
        matches!(fields.take("type"), Some(Json::String(kind)) if kind == "cancel") && fields.finish().is_ok()
    }

    /// Returns the message for the engine, with the `type` of its acknowledgement; `None` cancels the reply.
    pub(super) fn for_engine(&self) -> Option<(&'static str, Control)> {
        match self {
            ControlMessage::Cancel => None,
            ControlMessage::Pause => Some(("paused", Control::Pause)),
            ControlMessage::Resume => Some(("resumed", Control::Resume)),
            ControlMessage::Update(sampling) => Some(("updated", Control::Update(Box::new(sampling.params.clone())))),
        }
    }
}

/// Returns the sampling with `changes` over the fields given before.
fn updated(sampling: &Sampling, changes: SamplingFields, model: &LoadedModel) -> Result<Sampling, ApiError> {
    if sampling.is_beam_search {
        return Err(ApiError::invalid("update: beam search does not sample, so sampling fields have no effect on it"));
    }
    if changes.is_empty() {
        return Err(ApiError::invalid("update: expected at least one sampling field, found none"));
    }
    for (name, given) in [("preset", changes.preset.is_some()), ("ignore_eos", changes.ignore_eos.is_some())] {
        if given {
            return Err(fixed(name));
        }
    }
    let fields = sampling.fields.clone().changed(changes).with_defaults(model);
    // Defaults are derived again from all given fields, as if the request had contained the changes.
    let SamplingParams { seed, logprobs, .. } = sampling.params;
    let params = SamplingParams { seed, logprobs, ..fields.params(model)? };
    model.engine.check_sampling(&params)?;
    let Sampling { has_grammar, not_enforced, explains_cache, .. } = sampling.clone();
    Ok(Sampling { fields, params, is_beam_search: false, has_grammar, not_enforced, explains_cache })
}

/// Request fields that are known but cannot be changed in flight.
const FIXED: [&str; 21] = [
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "stream_options",
    "beam_width",
    "priority",
    "cache_salt",
    "loop_guard",
    "trace",
    "probe",
    "explain_cache",
    "return_token_ids",
    "timeout_ms",
    "chat_template_kwargs",
    "speculate",
    "prediction",
];

fn fixed(name: &str) -> ApiError {
    ApiError::field(name, format!("{name} cannot be changed while the reply is generated"))
}
