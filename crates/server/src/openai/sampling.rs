//! The sampling fields of a request, read by the table of options in the crate `sampling`, and the parameters they
//! stand for.
//!
//! A field that is not given has the value of the server's flags, else the one that the model recommends. A model that
//! recommends nothing has OpenAI's defaults: temperature 1, everything else neutral. A preset replaces all of these;
//! fields given beside it win. Beam search does not sample, so it takes no defaults.

use pellucid_generate::LoadedModel;
use pellucid_sampling::{
    Fallback, GivenOptions, OPTIONS, OptionKind, Preset, SamplingOption, SamplingParams, StepKind,
    Value as OptionValue, ValueRef, random_seed,
};
use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;

/// Maximum bytes of a step's or preset's name.
const MAX_NAME_LEN: usize = 64;

/// Fields that say how tokens are sampled. All are optional; null means absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SamplingFields {
    pub(crate) given: GivenOptions,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) preset: Option<String>,
    /// `given` with the defaults below it; `None` if none apply.
    resolved: Option<GivenOptions>,
}

impl SamplingFields {
    pub(crate) fn read(fields: &mut Fields) -> Result<SamplingFields, ApiError> {
        let mut given = GivenOptions::default();
        for option in OPTIONS {
            if let Some(value) = read_option(fields, option)? {
                given.insert(option, value);
            }
        }
        Ok(SamplingFields {
            given,
            ignore_eos: fields.boolean("ignore_eos")?,
            preset: fields.string("preset", MAX_NAME_LEN)?,
            resolved: None,
        })
    }

    /// Returns these fields with the model's defaults below those that are given.
    pub(crate) fn with_defaults(self, model: &LoadedModel) -> SamplingFields {
        let resolve = || model.sampling.resolve(&self.given, Fallback::OpenAi);
        SamplingFields { resolved: self.preset.is_none().then(resolve), ..self }
    }

    /// Returns the options in effect over the preset or the neutral values.
    fn options(&self) -> &GivenOptions {
        self.resolved.as_ref().unwrap_or(&self.given)
    }

    /// Whether no field was given.
    pub(crate) fn is_empty(&self) -> bool {
        *self == SamplingFields::default()
    }

    pub(crate) fn seed(&self) -> Option<u64> {
        self.given.seed()
    }

    pub(crate) fn min_tokens(&self) -> Option<u32> {
        self.given.min_tokens()
    }

    /// Returns the parameters that the fields stand for with this model.
    pub(crate) fn params(&self, model: &LoadedModel) -> Result<SamplingParams, ApiError> {
        let start = match &self.preset {
            Some(name) => name.parse::<Preset>()?.params(),
            None => SamplingParams::default(),
        };
        let end_ids = if self.ignore_eos == Some(true) { Vec::new() } else { model.tokenizer.end_ids().to_vec() };
        let start = SamplingParams { seed: self.options().seed().unwrap_or_else(random_seed), end_ids, ..start };
        let params = self.options().apply(start, |text| model.tokenizer.encode_within(text));
        params.check()?;
        params.check_effect()?;
        Ok(params)
    }

    /// Returns these fields with those of `changes` in place of the ones that both have.
    pub(crate) fn changed(self, changes: SamplingFields) -> SamplingFields {
        SamplingFields {
            given: self.given.changed(changes.given),
            ignore_eos: changes.ignore_eos.or(self.ignore_eos),
            preset: changes.preset.or(self.preset),
            resolved: None,
        }
    }
}

/// Reads the field of one option.
fn read_option(fields: &mut Fields, option: &SamplingOption) -> Result<Option<OptionValue>, ApiError> {
    let name = option.json_name();
    let value = match option.kind() {
        OptionKind::Number { low, json_high, .. } => fields.number(name, low..=json_high)?.map(OptionValue::Number),
        OptionKind::Count { low } => fields.whole(name, i64::from(low)..=i64::from(u32::MAX))?.map(OptionValue::Count),
        OptionKind::Seed => read_seed(fields, name)?.map(OptionValue::Seed),
        OptionKind::TokenBias { low, high, max_len } => {
            read_bias(fields, name, low..=high, max_len)?.map(OptionValue::TokenBias)
        }
        OptionKind::Tokens { max_len, .. } => fields.ids(name, max_len)?.map(OptionValue::Tokens),
        OptionKind::Texts { max_len, max_bytes, .. } => {
            read_texts(fields, name, max_len, max_bytes)?.map(OptionValue::Texts)
        }
        OptionKind::Steps => read_steps(fields, name)?.map(OptionValue::Steps),
    };
    Ok(value)
}

/// Takes a seed. `None` is a random one, for which -1 stands as in llama.cpp.
fn read_seed(fields: &mut Fields, name: &str) -> Result<Option<u64>, ApiError> {
    let seed = fields.integer(name, -1..=i64::MAX)?;
    Ok(seed.and_then(|seed| u64::try_from(seed).ok()))
}

fn read_bias(
    fields: &mut Fields,
    name: &str,
    range: std::ops::RangeInclusive<f32>,
    max_len: usize,
) -> Result<Option<Vec<(u32, f32)>>, ApiError> {
    let path = fields.path(name);
    let entries = match fields.take(name) {
        None => return Ok(None),
        Some(Json::Object(entries)) => entries,
        Some(other) => return Err(fields::wrong_type(&path, "an object", &other)),
    };
    if entries.len() > max_len {
        let message = format!("{path}: expected at most {max_len} entries, found {}", entries.len());
        return Err(ApiError::field(path, message).code("array_above_max_length"));
    }
    let mut bias = Vec::new();
    for (id, value) in entries {
        // One spelling for each id, so that no token can be named twice.
        let is_canonical = (id.len() == 1 || !id.starts_with('0')) && !id.starts_with('+');
        let Some(token) = id.parse::<u32>().ok().filter(|_| is_canonical) else {
            let message = format!("{path}: expected token ids as names, found {}", fields::shown(&id));
            return Err(ApiError::field(path, message));
        };
        bias.push((token, fields::number(&path, value, range.clone())?));
    }
    Ok(Some(bias))
}

fn read_texts(
    fields: &mut Fields,
    name: &str,
    max_len: usize,
    max_bytes: usize,
) -> Result<Option<Vec<String>>, ApiError> {
    let path = fields.path(name);
    let Some(values) = fields.array(name, max_len)? else { return Ok(None) };
    let read = |value| match fields::string(&path, value, max_bytes)? {
        text if text.is_empty() => Err(ApiError::field(&path, format!("{path}: expected a text that is not empty"))),
        text => Ok(text),
    };
    values.into_iter().map(read).collect::<Result<_, _>>().map(Some)
}

fn read_steps(fields: &mut Fields, name: &str) -> Result<Option<Vec<StepKind>>, ApiError> {
    let path = fields.path(name);
    let Some(values) = fields.array(name, StepKind::movable().count())? else { return Ok(None) };
    let read = |value| Ok(fields::string(&path, value, MAX_NAME_LEN)?.parse::<StepKind>()?);
    values.into_iter().map(read).collect::<Result<_, ApiError>>().map(Some)
}

/// Returns every parameter in effect, as a request would give it: sent back with the seed, they sample the same tokens.
pub(crate) fn effective(fields: &SamplingFields, params: &SamplingParams) -> Value {
    let mut all = Map::new();
    for option in OPTIONS.iter().filter(|option| option.kind() != OptionKind::Seed) {
        let value = match option.kind() {
            // As texts, because tokens are not what a request gives.
            OptionKind::Texts { .. } => json!(fields.options().texts(option, params)),
            _ => option.effective(params).map_or(Value::Null, json_value),
        };
        all.insert(option.json_name().to_owned(), value);
    }
    all.insert("ignore_eos".to_owned(), json!(fields.ignore_eos == Some(true)));
    Value::Object(all)
}

/// Returns one parameter in effect, by its name.
pub(crate) fn effective_one(name: &str, params: &SamplingParams) -> Value {
    let option = SamplingOption::by_param(name);
    option.and_then(|option| option.effective(params)).map_or(Value::Null, json_value)
}

/// Returns the sampling parameters of a request that gives none, by field, each with the origin of its value. Lists the
/// temperature, `top_p`, and all others that are not neutral.
pub(crate) fn default_parameters(model: &LoadedModel) -> Value {
    let options = model.sampling.resolve(&GivenOptions::default(), Fallback::OpenAi);
    let params = options.apply(SamplingParams::default(), |text| model.tokenizer.encode_within(text));
    let mut all = Map::new();
    for option in OPTIONS {
        let param = option.param();
        if !["temperature", "top_p"].contains(&param) && options.get(param).is_none() {
            continue;
        }
        let value = match option.kind() {
            OptionKind::Texts { .. } => json!(options.texts(option, &params)),
            _ => option.effective(&params).map_or(Value::Null, json_value),
        };
        let source = model.sampling.source_of(param, Fallback::OpenAi);
        all.insert(option.json_name().to_owned(), json!({ "value": value, "source": source.name() }));
    }
    Value::Object(all)
}

fn json_value(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Number(value) => number(value),
        ValueRef::Count(value) => json!(value),
        ValueRef::Seed(value) => json!(value),
        ValueRef::TokenBias(bias) => {
            Value::Object(bias.iter().map(|&(id, bias)| (id.to_string(), number(bias))).collect())
        }
        ValueRef::Tokens(ids) => json!(ids),
        ValueRef::Sequences(sequences) => json!(sequences),
        ValueRef::Steps(kinds) => json!(kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>()),
    }
}

/// Returns an f32 as it was typed: 0.7, not 0.699999988079071.
pub(crate) fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value))
}
