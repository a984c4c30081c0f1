//! The object `options`: Ollama's names for what `/v1/chat/completions` has as fields.

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::models::KeepAlive;
use crate::models::lease::{Lease, Served};
use crate::translation::{ChatBody, llama_options};

/// Options of how a model is loaded and computed, which the server's operator decides. Replies do not depend on them.
const LOADING: [&str; 11] = [
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "use_mmap",
    "use_mlock",
    "f16_kv",
    "vocab_only",
];

/// Reads `options` into the fields of a chat or a completion. `max_tokens` is the name for the length of the reply.
/// Returns `num_ctx`, the maximum tokens of prompt and reply together.
pub(super) fn read(fields: &mut Fields, max_tokens: &str, body: &mut ChatBody) -> Result<Option<usize>, ApiError> {
    let Some(value) = fields.take("options") else { return Ok(None) };
    let mut options = Fields::within("options".into(), value)?;
    llama_options::read(&mut options, body)?;
    // -1 is no limit, -2 the rest of the context: both are what a request without a limit gets.
    if let Some(count) = options.integer("num_predict", -2..=i64::from(i32::MAX))?
        && count >= 0
    {
        body.set(max_tokens, Some(Json::Integer(count.into())), "options.num_predict");
    }
    let num_ctx = options.whole("num_ctx", 1..=i64::from(i32::MAX))?;
    for name in LOADING {
        options.take(name);
    }
    let is_one = |value: &Json| matches!(value, Json::Integer(1)) || *value == Json::Float(1.0);
    options.refuse("tfs_z", is_one, "tail-free sampling is not implemented")?;
    options.refuse(
        "penalize_newline",
        |value| *value == Json::Bool(true),
        "line ends are penalized like all tokens",
    )?;
    options.finish()?;
    Ok(num_ctx)
}

/// Reads `keep_alive`, a duration such as `5m` or a number of seconds; a negative one is for ever.
pub(super) fn read_keep_alive(fields: &mut Fields) -> Result<Option<KeepAlive>, ApiError> {
    let path = "keep_alive";
    let expected = || ApiError::field(path, format!("{path}: expected a duration such as 5m, or seconds"));
    let seconds = match fields.take(path) {
        None => return Ok(None),
        Some(Json::Integer(seconds)) => seconds as f64,
        Some(Json::Float(seconds)) => seconds,
        Some(Json::String(text)) => return text.parse().map(Some).map_err(|_| expected()),
        Some(other) => return Err(fields::wrong_type(path, "a duration or a number of seconds", &other)),
    };
    KeepAlive::from_seconds(seconds).map(Some).ok_or_else(expected)
}

/// Refuses to unload a model that is loaded as long as the server runs.
pub(super) fn check_unload<M: Served>(keep_alive: Option<KeepAlive>, model: &Lease<M>) -> Result<(), ApiError> {
    if keep_alive == Some(KeepAlive::UNLOAD) && model.is_fixed() {
        let message = "keep_alive: this server keeps its model loaded until it is stopped";
        return Err(ApiError::field("keep_alive", message).code("unsupported_value"));
    }
    Ok(())
}
