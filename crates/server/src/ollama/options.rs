//! The object `options`: Ollama's names for what `/v1/chat/completions` has as fields.

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
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

/// Reads `keep_alive`, a duration such as `5m` or a number of seconds. Returns whether it asks to unload the model.
pub(super) fn read_keep_alive(fields: &mut Fields) -> Result<bool, ApiError> {
    let path = "keep_alive";
    match fields.take(path) {
        None => Ok(false),
        Some(Json::Integer(seconds)) => Ok(seconds == 0),
        Some(Json::Float(seconds)) => Ok(seconds == 0.0),
        Some(Json::String(text)) => match duration_is_zero(&text) {
            Some(is_zero) => Ok(is_zero),
            None => Err(ApiError::field(path, format!("{path}: expected a duration such as 5m, or seconds"))),
        },
        Some(other) => Err(fields::wrong_type(path, "a duration or a number of seconds", &other)),
    }
}

/// Whether a duration such as `1h30m` is zero; `None` if the text is none.
fn duration_is_zero(text: &str) -> Option<bool> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if unsigned.parse::<f64>().is_ok() {
        return Some(unsigned.parse() == Ok(0.0));
    }
    let (mut rest, mut is_zero) = (unsigned, true);
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let count: f64 = rest[..end].parse().ok()?;
        is_zero &= count == 0.0;
        rest = &rest[end..];
        let unit = ["ns", "us", "µs", "ms", "s", "m", "h"].into_iter().find(|unit| {
            rest.strip_prefix(unit)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(|c: char| c.is_ascii_digit()))
        })?;
        rest = &rest[unit.len()..];
    }
    Some(is_zero)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, expected) in [
            ("5m", Some(false)),
            ("1h30m", Some(false)),
            ("-1m", Some(false)),
            ("0s", Some(true)),
            ("0", Some(true)),
            ("300", Some(false)),
            ("10ms", Some(false)),
            ("1.5h", Some(false)),
            ("", None),
            ("m", None),
            ("5 m", None),
            ("5x", None),
        ] {
            assert_eq!(duration_is_zero(text), expected, "{text:?}");
        }
    }
}
