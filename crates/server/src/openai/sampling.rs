//! How tokens are chosen: the fields of a request, and the parameters of the sampler that they mean.
//!
//! Defaults are OpenAI's (temperature 1, everything else neutral); a preset lays its own under them.

use std::collections::BTreeMap;

use pellucid_generate::LoadedModel;
use pellucid_sampling::{
    DRY_BREAKERS, MAX_DRY_BREAKERS, MAX_LISTED_TOKENS, MAX_VOCAB_SIZE, Mirostat, Preset, SamplingParams, StepKind,
};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::fields::{self, Fields};
use crate::json::Json;
use crate::{random, schemas};

/// Bytes of a text that a repeat does not reach across.
const MAX_BREAKER_LEN: usize = 64;
const MAX_COUNT: i64 = u32::MAX as i64;

/// Fields that say how tokens are chosen. All are optional; null means absent.
#[derive(Debug, Clone, Default, PartialEq, ToSchema)]
pub(crate) struct SamplingFields {
    /// Divides the logits; 0 takes the most probable token.
    #[schema(minimum = 0, maximum = 2, default = 1.0)]
    pub(crate) temperature: Option<f32>,
    /// Keeps the most probable tokens that together reach this probability.
    #[schema(minimum = 0, maximum = 1, default = 1.0)]
    pub(crate) top_p: Option<f32>,
    /// Keys the random draw: the same seed gives the same bytes. Reply i to a prompt draws with the seed plus i.
    #[schema(minimum = 0, maximum = 9223372036854775807i64)]
    pub(crate) seed: Option<u64>,
    /// Subtracted from a token's logit for each time that it is in the output.
    #[schema(minimum = -2, maximum = 2, default = 0.0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Subtracted from a token's logit when it is in the output at all.
    #[schema(minimum = -2, maximum = 2, default = 0.0)]
    pub(crate) presence_penalty: Option<f32>,
    /// Token ids, as strings, to what is added to their logits: -100 to 100.
    #[schema(schema_with = schemas::logit_bias)]
    pub(crate) logit_bias: Option<BTreeMap<String, f32>>,

    /// Keeps the k most probable tokens; 0 keeps all.
    #[schema(minimum = 0, maximum = 4294967295i64)]
    pub(crate) top_k: Option<u32>,
    /// Keeps tokens at least this fraction as probable as the most probable one.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) min_p: Option<f32>,
    /// Keeps the tokens closest to the expected surprise that together reach this probability.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) typical_p: Option<f32>,
    /// Keeps logits within so many standard deviations of the highest; 0 keeps all.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) top_n_sigma: Option<f32>,
    /// Lets the temperature move by so much with the model's uncertainty.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) dynamic_temperature_range: Option<f32>,
    /// How that movement bends.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) dynamic_temperature_exponent: Option<f32>,
    /// How often the top choices are excluded.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) xtc_probability: Option<f32>,
    /// How probable a token must be to count as a top choice.
    #[schema(minimum = 0, maximum = 0.5)]
    pub(crate) xtc_threshold: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens of the prompt and the output.
    #[schema(minimum = 0.01, maximum = 100)]
    pub(crate) repetition_penalty: Option<f32>,
    /// The penalties look at so many last tokens.
    #[schema(minimum = 1, maximum = 4294967295i64)]
    pub(crate) penalty_window: Option<u32>,
    /// Penalises continued repeats of phrases by so many logits.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) dry_multiplier: Option<f32>,
    /// Growth of that penalty with each repeated token.
    #[schema(minimum = 1, maximum = 100)]
    pub(crate) dry_base: Option<f32>,
    /// Repeats up to so many tokens are free.
    #[schema(minimum = 1, maximum = 4294967295i64)]
    pub(crate) dry_allowed_length: Option<u32>,
    /// Tokens looked back over.
    #[schema(minimum = 1, maximum = 4294967295i64)]
    pub(crate) dry_range: Option<u32>,
    /// Texts that a repeat does not reach across.
    #[schema(schema_with = schemas::breakers)]
    pub(crate) dry_sequence_breakers: Option<Vec<String>>,
    /// Holds the surprise at so many bits a token, in place of the steps that keep some tokens.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) mirostat_tau: Option<f32>,
    /// How fast that is corrected; needs `mirostat_tau`.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) mirostat_eta: Option<f32>,
    /// Never chosen.
    #[schema(schema_with = schemas::ids)]
    pub(crate) banned_token_ids: Option<Vec<u32>>,
    /// Only these are chosen.
    #[schema(schema_with = schemas::some_ids)]
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    /// The reply ends at these.
    #[schema(schema_with = schemas::few_ids)]
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    /// The reply does not end before so many tokens.
    #[schema(minimum = 0, maximum = 4294967295i64)]
    pub(crate) min_tokens: Option<u32>,
    /// The reply does not end where the model says that it is done.
    pub(crate) ignore_eos: Option<bool>,
    /// The order of the steps; a step that is set must be listed.
    #[schema(schema_with = schemas::samplers)]
    pub(crate) samplers: Option<Vec<String>>,
    /// Parameters by use: code, factual, chat, creative or brainstorm.
    #[schema(schema_with = schemas::preset)]
    pub(crate) preset: Option<String>,
}

impl SamplingFields {
    pub(crate) fn read(fields: &mut Fields) -> Result<SamplingFields, ApiError> {
        Ok(SamplingFields {
            temperature: fields.number("temperature", 0.0..=2.0)?,
            top_p: fields.number("top_p", 0.0..=1.0)?,
            seed: fields.whole("seed", 0..=i64::MAX)?,
            frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?,
            presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?,
            logit_bias: read_bias(fields)?,
            top_k: fields.whole("top_k", 0..=MAX_COUNT)?,
            min_p: fields.number("min_p", 0.0..=1.0)?,
            typical_p: fields.number("typical_p", 0.0..=1.0)?,
            top_n_sigma: fields.number("top_n_sigma", 0.0..=100.0)?,
            dynamic_temperature_range: fields.number("dynamic_temperature_range", 0.0..=100.0)?,
            dynamic_temperature_exponent: fields.number("dynamic_temperature_exponent", 0.0..=100.0)?,
            xtc_probability: fields.number("xtc_probability", 0.0..=1.0)?,
            xtc_threshold: fields.number("xtc_threshold", 0.0..=0.5)?,
            repetition_penalty: fields.number("repetition_penalty", 0.01..=100.0)?,
            penalty_window: fields.whole("penalty_window", 1..=MAX_COUNT)?,
            dry_multiplier: fields.number("dry_multiplier", 0.0..=100.0)?,
            dry_base: fields.number("dry_base", 1.0..=100.0)?,
            dry_allowed_length: fields.whole("dry_allowed_length", 1..=MAX_COUNT)?,
            dry_range: fields.whole("dry_range", 1..=MAX_COUNT)?,
            dry_sequence_breakers: read_breakers(fields)?,
            mirostat_tau: fields.number("mirostat_tau", 0.0..=100.0)?,
            mirostat_eta: fields.number("mirostat_eta", 0.0..=1.0)?,
            banned_token_ids: fields.ids("banned_token_ids", MAX_VOCAB_SIZE)?,
            allowed_token_ids: fields.ids("allowed_token_ids", MAX_VOCAB_SIZE)?,
            stop_token_ids: fields.ids("stop_token_ids", MAX_LISTED_TOKENS)?,
            min_tokens: fields.whole("min_tokens", 0..=MAX_COUNT)?,
            ignore_eos: fields.boolean("ignore_eos")?,
            samplers: read_samplers(fields)?,
            preset: fields.string("preset", 64)?,
        })
    }

    /// Whether nothing was given.
    pub(crate) fn is_empty(&self) -> bool {
        *self == SamplingFields::default()
    }

    /// The parameters that the fields mean for this model.
    pub(crate) fn params(&self, model: &LoadedModel) -> Result<SamplingParams, ApiError> {
        let start = match &self.preset {
            Some(name) => name.parse::<Preset>()?.params(),
            None => SamplingParams::default(),
        };
        let mut params = SamplingParams {
            seed: self.seed.unwrap_or_else(random_seed),
            end_ids: if self.ignore_eos == Some(true) { Vec::new() } else { model.tokenizer.end_ids().to_vec() },
            temperature: self.temperature.unwrap_or(start.temperature),
            dynamic_temperature_range: self.dynamic_temperature_range.unwrap_or(start.dynamic_temperature_range),
            dynamic_temperature_exponent: self
                .dynamic_temperature_exponent
                .unwrap_or(start.dynamic_temperature_exponent),
            top_n_sigma: self.top_n_sigma.unwrap_or(start.top_n_sigma),
            top_k: self.top_k.unwrap_or(start.top_k),
            typical_p: self.typical_p.unwrap_or(start.typical_p),
            top_p: self.top_p.unwrap_or(start.top_p),
            min_p: self.min_p.unwrap_or(start.min_p),
            xtc_probability: self.xtc_probability.unwrap_or(start.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(start.xtc_threshold),
            repetition_penalty: self.repetition_penalty.unwrap_or(start.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(start.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(start.presence_penalty),
            penalty_window: self.penalty_window.or(start.penalty_window),
            banned_tokens: self.banned_token_ids.clone().unwrap_or(start.banned_tokens),
            allowed_tokens: self.allowed_token_ids.clone().or(start.allowed_tokens),
            stop_ids: self.stop_token_ids.clone().unwrap_or(start.stop_ids),
            min_tokens: self.min_tokens.unwrap_or(start.min_tokens),
            ..start
        };
        params.dry.multiplier = self.dry_multiplier.unwrap_or(params.dry.multiplier);
        params.dry.base = self.dry_base.unwrap_or(params.dry.base);
        params.dry.allowed_length = self.dry_allowed_length.unwrap_or(params.dry.allowed_length);
        params.dry.range = self.dry_range.or(params.dry.range);
        let breakers = self.breakers(params.dry.multiplier);
        params.dry.breakers = breakers.into_iter().map(|text| model.tokenizer.encode_within(text)).collect();
        if let Some(tau) = self.mirostat_tau {
            params.mirostat = Some(Mirostat { tau, eta: self.mirostat_eta.unwrap_or(Mirostat::default().eta) });
        } else if self.mirostat_eta.is_some() {
            return Err(ApiError::field("mirostat_eta", "mirostat_eta does nothing without mirostat_tau"));
        }
        if let Some(bias) = &self.logit_bias {
            params.logit_bias = bias.iter().filter_map(|(id, bias)| Some((id.parse().ok()?, *bias))).collect();
        }
        if let Some(names) = &self.samplers {
            let kinds: Result<Vec<StepKind>, _> = names.iter().map(|name| name.parse()).collect();
            params.samplers = Some(kinds?);
        }
        params.check()?;
        params.check_effect()?;
        Ok(params)
    }

    /// The texts that a repeat does not reach across: those that were given, be they none, or the usual ones where they have an effect.
    fn breakers(&self, multiplier: f32) -> Vec<&str> {
        match &self.dry_sequence_breakers {
            Some(texts) => texts.iter().map(String::as_str).collect(),
            None if multiplier > 0.0 => DRY_BREAKERS.to_vec(),
            None => Vec::new(),
        }
    }

    /// These fields, and where `changes` has a field, that one.
    pub(crate) fn changed(self, changes: SamplingFields) -> SamplingFields {
        macro_rules! changed {
            ($($name:ident)*) => { SamplingFields { $($name: changes.$name.or(self.$name)),* } };
        }
        changed! {
            temperature top_p seed frequency_penalty presence_penalty logit_bias top_k min_p typical_p top_n_sigma
            dynamic_temperature_range dynamic_temperature_exponent xtc_probability xtc_threshold repetition_penalty
            penalty_window dry_multiplier dry_base dry_allowed_length dry_range dry_sequence_breakers mirostat_tau
            mirostat_eta banned_token_ids allowed_token_ids stop_token_ids min_tokens ignore_eos samplers preset
        }
    }
}

fn read_bias(fields: &mut Fields) -> Result<Option<BTreeMap<String, f32>>, ApiError> {
    let path = fields.path("logit_bias");
    let entries = match fields.take("logit_bias") {
        None => return Ok(None),
        Some(Json::Object(entries)) => entries,
        Some(other) => return Err(fields::wrong_type(&path, "an object", &other)),
    };
    if entries.len() > MAX_LISTED_TOKENS {
        let message = format!("{path}: expected at most {MAX_LISTED_TOKENS} entries, found {}", entries.len());
        return Err(ApiError::field(path, message).code("array_above_max_length"));
    }
    let mut bias = BTreeMap::new();
    for (id, value) in entries {
        // One spelling for each id, so that no token can be named twice.
        if id.parse::<u32>().is_err() || (id.len() > 1 && id.starts_with('0')) || id.starts_with('+') {
            let message = format!("{path}: expected token ids as names, found {}", fields::shown(&id));
            return Err(ApiError::field(path, message));
        }
        bias.insert(id, fields::number(&path, value, -100.0..=100.0)?);
    }
    Ok(Some(bias))
}

fn read_breakers(fields: &mut Fields) -> Result<Option<Vec<String>>, ApiError> {
    let path = fields.path("dry_sequence_breakers");
    let Some(values) = fields.array("dry_sequence_breakers", MAX_DRY_BREAKERS)? else { return Ok(None) };
    let each = |value| match fields::string(&path, value, MAX_BREAKER_LEN)? {
        text if text.is_empty() => Err(ApiError::field(&path, format!("{path}: an empty text breaks nothing"))),
        text => Ok(text),
    };
    values.into_iter().map(each).collect::<Result<_, _>>().map(Some)
}

fn read_samplers(fields: &mut Fields) -> Result<Option<Vec<String>>, ApiError> {
    let path = fields.path("samplers");
    let Some(values) = fields.array("samplers", StepKind::MOVABLE.len())? else { return Ok(None) };
    values.into_iter().map(|value| fields::string(&path, value, 64)).collect::<Result<_, _>>().map(Some)
}

/// Below 2^53, so that every JSON reader keeps it whole, with room for the choices after the first.
fn random_seed() -> u64 {
    random::word() >> 12
}

/// Every parameter in effect, as a request would give it: sent back with the seed, they give the same draw.
pub(crate) fn effective(given: &SamplingFields, p: &SamplingParams) -> Value {
    let number = |value: f32| value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value));
    let bias: serde_json::Map<String, Value> =
        p.logit_bias.iter().map(|&(id, bias)| (id.to_string(), number(bias))).collect();
    json!({
        "temperature": number(p.temperature),
        "top_p": number(p.top_p),
        "frequency_penalty": number(p.frequency_penalty),
        "presence_penalty": number(p.presence_penalty),
        "logit_bias": bias,
        "top_k": p.top_k,
        "min_p": number(p.min_p),
        "typical_p": number(p.typical_p),
        "top_n_sigma": number(p.top_n_sigma),
        "dynamic_temperature_range": number(p.dynamic_temperature_range),
        "dynamic_temperature_exponent": number(p.dynamic_temperature_exponent),
        "xtc_probability": number(p.xtc_probability),
        "xtc_threshold": number(p.xtc_threshold),
        "repetition_penalty": number(p.repetition_penalty),
        "penalty_window": p.penalty_window,
        "dry_multiplier": number(p.dry.multiplier),
        "dry_base": number(p.dry.base),
        "dry_allowed_length": p.dry.allowed_length,
        "dry_range": p.dry.range,
        "dry_sequence_breakers": given.breakers(p.dry.multiplier),
        "mirostat_tau": p.mirostat.map(|mirostat| number(mirostat.tau)),
        "mirostat_eta": p.mirostat.map(|mirostat| number(mirostat.eta)),
        "banned_token_ids": p.banned_tokens,
        "allowed_token_ids": p.allowed_tokens,
        "stop_token_ids": p.stop_ids,
        "min_tokens": p.min_tokens,
        "ignore_eos": given.ignore_eos == Some(true),
        "samplers": p.samplers.as_ref().map(|kinds| kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>()),
    })
}
