//! The requests of `/completion` and `/infill`, read into requests of OpenAI's API to continue a text.

use pellucid_generate::LoadedModel;

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::limits::tenants::Tenant;
use crate::reply::Spec;
use crate::state::Limits;
use crate::translation::{ChatBody, llama_options};

/// Fields whose name and meaning are those of `/v1/completions`.
const SAME: [&str; 10] = [
    "stream",
    "ignore_eos",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_sequence_breakers",
    "top_n_sigma",
    "speculate",
];
/// Fields with another name there.
const RENAMED: [(&str, &str); 4] = [
    ("dynatemp_range", "dynamic_temperature_range"),
    ("dynatemp_exponent", "dynamic_temperature_exponent"),
    ("t_max_predict_ms", "timeout_ms"),
    ("dry_penalty_last_n", "dry_range"),
];
/// Fields about slots and caches, on which no reply depends here.
const WITHOUT_EFFECT: [&str; 7] =
    ["id_slot", "slot_id", "cache_prompt", "n_keep", "n_cache_reuse", "timings_per_token", "n_discard"];

/// Reads a request of `/completion`.
pub(super) fn completion(value: Json, model: &LoadedModel, limits: &Limits, tenant: &Tenant) -> Result<Spec, ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    body.set("prompt", Some(fields.required("prompt")?), "prompt");
    read(fields, body, model, limits, tenant)
}

/// Reads a request of `/infill`: the text before the gap, the text after it, and other files before both.
pub(super) fn infill(value: Json, model: &LoadedModel, limits: &Limits, tenant: &Tenant) -> Result<Spec, ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    let mut text = |name: &str| fields.string(name, usize::MAX).map(Option::unwrap_or_default);
    let (before, after, typed) = (text("input_prefix")?, text("input_suffix")?, text("prompt")?);
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    fields.refuse("input_extra", is_empty, "put other files before input_prefix")?;
    if after.is_empty() {
        return Err(ApiError::field("input_suffix", "input_suffix: expected the text after the gap, found none"));
    }
    body.set("prompt", Some(Json::String(before + &typed)), "input_prefix");
    body.set("suffix", Some(Json::String(after)), "input_suffix");
    read(fields, body, model, limits, tenant)
}

/// Reads the fields that both routes have.
fn read(
    mut fields: Fields,
    mut body: ChatBody,
    model: &LoadedModel,
    limits: &Limits,
    tenant: &Tenant,
) -> Result<Spec, ApiError> {
    let name = fields.take("model").unwrap_or_else(|| Json::String(model.id.clone()));
    body.set("model", Some(name), "model");
    llama_options::read(&mut fields, &mut body)?;
    for name in SAME {
        body.set(name, fields.take(name), name);
    }
    for (name, target) in RENAMED {
        // 0 and -1 stand for no limit.
        let value = fields.take(name).filter(|value| !matches!(value, Json::Integer(-1 | 0)));
        body.set(target, value, name);
    }
    read_grammar(&mut fields, &mut body)?;
    read_bias(&mut fields, &mut body)?;
    let limit = fields.integer("n_predict", -1..=i64::from(i32::MAX))?.filter(|&count| count >= 0);
    // A placeholder: OpenAI's route has a default of 16 tokens, this one has none.
    body.set("max_tokens", Some(Json::Integer(limit.unwrap_or(1).into())), "n_predict");
    for name in WITHOUT_EFFECT {
        fields.take(name);
    }
    refuse(&mut fields)?;
    fields.finish()?;
    let (request, paths) = body.read_completion(model)?;
    let mut spec = paths.translate_spec(request.spec(model, limits, tenant))?;
    if limit.is_none() {
        spec.prompts.iter_mut().for_each(|prompt| prompt.request.max_tokens = None);
    }
    Ok(spec)
}

/// Reads `grammar`, in the notation of llama.cpp, and `json_schema`.
fn read_grammar(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let is_empty = |value: &Json| matches!(value, Json::String(text) if text.is_empty());
    let grammar = fields.take("grammar").filter(|value| !is_empty(value));
    let schema = fields.take("json_schema");
    let (kind, value, source) = match (grammar, schema) {
        (None, None) => return Ok(()),
        (Some(grammar), None) => ("grammar", grammar, "grammar"),
        (None, Some(schema)) => ("json", schema, "json_schema"),
        (Some(_), Some(_)) => {
            return Err(ApiError::field(
                "json_schema",
                "json_schema cannot be combined with grammar: give one of them",
            ));
        }
    };
    body.set("structured_outputs", Some(Json::Object(vec![(kind.into(), value)])), source);
    body.rename(&format!("structured_outputs.{kind}"), source);
    Ok(())
}

/// Reads `logit_bias`: an object as in OpenAI's API, or a list of pairs of an id and a bias.
fn read_bias(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let path = "logit_bias";
    let pairs = match fields.take(path) {
        Some(Json::Array(pairs)) => pairs,
        value => {
            body.set(path, value, path);
            return Ok(());
        }
    };
    let (mut entries, mut banned) = (Vec::new(), Vec::new());
    for (i, pair) in pairs.into_iter().enumerate() {
        let place = format!("{path}[{i}]");
        let pair = fields::array(&place, pair, 2)?;
        let Ok([id, bias]) = <[Json; 2]>::try_from(pair) else {
            return Err(ApiError::field(&place, format!("{place}: expected a pair of an id and a bias")));
        };
        let id = fields::integer(&place, id, 0..=i64::from(u32::MAX))?;
        match bias {
            // False stands for never.
            Json::Bool(false) => banned.push(Json::Integer(id.into())),
            bias => entries.push((id.to_string(), bias)),
        }
    }
    body.set(path, (!entries.is_empty()).then_some(Json::Object(entries)), path);
    body.set("banned_token_ids", (!banned.is_empty()).then_some(Json::Array(banned)), path);
    Ok(())
}

/// Refuses fields of llama.cpp that are not supported, unless their value asks for the default behaviour.
fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    let is_off = |value: &Json| {
        matches!(value, Json::Bool(false) | Json::Integer(0 | -1))
            || matches!(value, Json::Array(values) if values.is_empty())
    };
    for (name, why) in [
        ("n_probs", "use logprobs of /v1/completions"),
        ("post_sampling_probs", "use trace of /v1/completions, which shows every step"),
        ("return_tokens", "use /tokenize"),
        ("return_progress", "progress is not reported"),
        ("response_fields", "all fields are returned"),
        ("min_keep", "steps of the sampler keep at least one token"),
        ("samplers", "use samplers of /v1/completions, whose names of steps differ"),
        ("lora", "adapters are not supported"),
        ("n_indent", "indentation is not enforced"),
        ("image_data", "this model reads text only"),
        ("n_cmpl", "use n of /v1/completions"),
    ] {
        fields.refuse(name, is_off, why)?;
    }
    Ok(())
}
