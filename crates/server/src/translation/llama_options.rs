//! Sampling options under the names of llama.cpp, which Ollama's API has too.

use super::ChatBody;
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::http::json::Json;

/// Options with a field of the same meaning.
const SAMPLING: [(&str, &str); 7] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
    ("seed", "seed"),
    ("stop", "stop"),
];
const PENALTIES: [(&str, &str); 3] = [
    ("repeat_penalty", "repetition_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
];
/// Default for the target surprise of Mirostat.
const MIROSTAT_TAU: f64 = 5.0;

/// Reads the options into the fields of a request.
pub(crate) fn read(options: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let has_penalty = PENALTIES.iter().any(|(name, _)| options.has(name));
    for (name, target) in SAMPLING.iter().chain(&PENALTIES) {
        let path = options.path(name);
        body.set(target, options.take(name), &path);
    }
    read_window(options, has_penalty, body)?;
    read_mirostat(options, body)
}

/// Reads `repeat_last_n`, the tokens that penalties count: -1 is all, 0 switches penalties off.
fn read_window(options: &mut Fields, has_penalty: bool, body: &mut ChatBody) -> Result<(), ApiError> {
    let path = options.path("repeat_last_n");
    match options.integer("repeat_last_n", -1..=i64::from(i32::MAX))? {
        Some(0) if has_penalty => {
            Err(ApiError::field(&path, format!("{path}: 0 switches penalties off, but a penalty is given")))
        }
        Some(count) if count > 0 && has_penalty => {
            body.set("penalty_window", Some(Json::Integer(count.into())), &path);
            Ok(())
        }
        // Without a penalty there is nothing to count.
        _ => Ok(()),
    }
}

fn read_mirostat(options: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let version = options.integer("mirostat", 0..=2)?.unwrap_or(0);
    let (tau, eta) = (options.take("mirostat_tau"), options.take("mirostat_eta"));
    match version {
        // The other two have no effect then.
        0 => Ok(()),
        2 => {
            let tau = tau.unwrap_or(Json::Float(MIROSTAT_TAU));
            body.set("mirostat_tau", Some(tau), &options.path("mirostat_tau"));
            body.set("mirostat_eta", eta, &options.path("mirostat_eta"));
            Ok(())
        }
        _ => {
            let path = options.path("mirostat");
            Err(ApiError::field(&path, format!("{path}: expected 0 or 2; version 1 is not implemented")))
        }
    }
}
