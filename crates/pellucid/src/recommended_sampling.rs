//! The sampling options that a model's files recommend: `generation_config.json` of a Hugging Face folder or beside a
//! GGUF file, and the keys `general.sampling.*` of a GGUF file, which llama.cpp defines.
//!
//! Files are untrusted: a value that is unknown, of a wrong type or out of range is named in a warning and not taken.

use std::path::Path;

use pellucid_checkpoint::{Checkpoint, Source, Value as GgufValue};
use pellucid_sampling::{GivenOptions, OptionKind, SamplingOption, SamplingParams, StepKind, Value};
use serde_json::Value as Json;

/// Name of the file that Hugging Face models keep their recommendation in.
const GENERATION_CONFIG: &str = "generation_config.json";
/// Maximum bytes of a `generation_config.json` beside a GGUF file; real ones have a few hundred.
const MAX_BYTES: u64 = 1 << 20;
/// Prefix of the keys of a GGUF file.
const GGUF_PREFIX: &str = "general.sampling.";

/// Names in `generation_config.json` that are options here.
const JSON_OPTIONS: [(&str, &str); 6] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
    ("repetition_penalty", "repetition_penalty"),
];
/// Names in `generation_config.json` that change the choice of tokens and are no options here, with the value at which
/// they do nothing.
const JSON_UNSUPPORTED: [(&str, f64); 8] = [
    ("num_beams", 1.0),
    ("num_beam_groups", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("penalty_alpha", 0.0),
];
/// Names after [`GGUF_PREFIX`] that are options here.
const GGUF_OPTIONS: [(&str, &str); 7] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("xtc_probability", "xtc_probability"),
    ("xtc_threshold", "xtc_threshold"),
    ("penalty_repeat", "repetition_penalty"),
];
/// Names of llama.cpp's steps in `general.sampling.sequence`. `penalties` is two steps here.
const GGUF_STEPS: [(&str, &[StepKind]); 9] = [
    ("penalties", &[StepKind::Repetition, StepKind::FrequencyPresence]),
    ("dry", &[StepKind::Dry]),
    ("top_n_sigma", &[StepKind::TopNSigma]),
    ("top_k", &[StepKind::TopK]),
    ("typ_p", &[StepKind::Typical]),
    ("top_p", &[StepKind::TopP]),
    ("min_p", &[StepKind::MinP]),
    ("xtc", &[StepKind::Xtc]),
    ("temperature", &[StepKind::Temperature]),
];
/// llama.cpp's default of `mirostat_tau`.
const MIROSTAT_TAU: f32 = 5.0;

/// Sampling options that the files of a model recommend.
#[derive(Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Recommendation {
    /// The options; none if the files recommend nothing.
    pub options: GivenOptions,
    /// One line that names the values that were not taken.
    pub warning: Option<String>,
}

/// Values that were read so far, and those that were refused.
#[derive(Default)]
struct Reading {
    options: GivenOptions,
    refused: Vec<String>,
}

/// Reads the sampling options that the files of a model recommend. The keys of a GGUF file take precedence over a file
/// beside it.
pub fn recommended_sampling(checkpoint: &Checkpoint) -> Recommendation {
    let mut reading = Reading::default();
    match checkpoint.source() {
        Source::HuggingFace(folder) => {
            if let Some(config) = &folder.generation_config {
                reading.read_json(config);
            }
        }
        Source::Gguf(metadata) => {
            let keys: Vec<(&str, &GgufValue)> =
                metadata.iter().filter_map(|(key, value)| Some((key.strip_prefix(GGUF_PREFIX)?, value))).collect();
            if keys.is_empty() {
                reading.read_file_beside(checkpoint.path());
            } else {
                reading.read_gguf(&keys);
            }
        }
    }
    reading.finish()
}

impl Reading {
    fn read_file_beside(&mut self, model: &Path) {
        let path = model.with_file_name(GENERATION_CONFIG);
        let Ok(about) = std::fs::metadata(&path) else { return };
        if !about.is_file() || about.len() > MAX_BYTES {
            self.refuse(GENERATION_CONFIG, &format!("it is no file of at most {MAX_BYTES} bytes"));
            return;
        }
        match std::fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Json>(&text).ok()) {
            Some(config) => self.read_json(&config),
            None => self.refuse(GENERATION_CONFIG, "it cannot be read as JSON"),
        }
    }

    fn read_json(&mut self, config: &Json) {
        let name = |key: &str| format!("{GENERATION_CONFIG}: {key}");
        let value_of = |key: &str| config.get(key).filter(|value| !value.is_null());
        for (key, param) in JSON_OPTIONS {
            match value_of(key) {
                None => {}
                Some(value) => match value.as_f64() {
                    Some(number) => self.take(&name(key), param, number),
                    None => self.refuse(&name(key), &format!("expected a number, found {}", shortened(value))),
                },
            }
        }
        for (key, neutral) in JSON_UNSUPPORTED {
            if let Some(value) = value_of(key).filter(|value| value.as_f64() != Some(neutral)) {
                self.refuse(&name(key), &format!("{} is not supported", shortened(value)));
            }
        }
        match value_of("do_sample") {
            Some(Json::Bool(false)) => {
                // Settings of sampling that stay in the file have no effect on greedy decoding.
                let penalty = self.options.get("repetition_penalty").cloned();
                self.options = GivenOptions::default();
                self.insert("temperature", Value::Number(0.0));
                if let Some(penalty) = penalty {
                    self.insert("repetition_penalty", penalty);
                }
            }
            Some(Json::Bool(true)) if self.options.get("temperature").is_none() => {
                self.insert("temperature", Value::Number(1.0));
            }
            Some(Json::Bool(true)) | None => {}
            Some(other) => {
                self.refuse(&name("do_sample"), &format!("expected true or false, found {}", shortened(other)));
            }
        }
    }

    fn read_gguf(&mut self, keys: &[(&str, &GgufValue)]) {
        let find = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        let name = |key: &str| format!("{GGUF_PREFIX}{key}");
        for (key, value) in keys {
            if let Some((_, param)) = GGUF_OPTIONS.iter().find(|(known, _)| known == key) {
                match number(value) {
                    // llama.cpp keeps all tokens at 0 and below.
                    Some(found) if *param == "top_k" => self.take(&name(key), param, found.max(0.0)),
                    Some(found) => self.take(&name(key), param, found),
                    None => self.refuse(&name(key), "expected a number"),
                }
            } else if !["penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "sequence"].contains(key) {
                self.refuse(&name(key), "not known");
            }
        }
        // At 0 the penalty counts no tokens; below 0 it counts all, which is the default here.
        match find("penalty_last_n").map(number) {
            Some(Some(0.0)) => self.options = without(&self.options, "repetition_penalty"),
            Some(Some(last)) if last > 0.0 && self.options.get("repetition_penalty").is_some() => {
                self.take(&name("penalty_last_n"), "penalty_window", last);
            }
            Some(None) => self.refuse(&name("penalty_last_n"), "expected a number"),
            _ => {}
        }
        match find("mirostat").map(number) {
            None | Some(Some(0.0)) => {}
            Some(Some(2.0)) => {
                let tau = find("mirostat_tau").map_or(Some(f64::from(MIROSTAT_TAU)), number).unwrap_or(f64::NAN);
                // Mirostat truncates by itself, in llama.cpp too.
                for param in ["top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"] {
                    self.options = without(&self.options, param);
                }
                self.take(&name("mirostat_tau"), "mirostat_tau", tau);
                if let Some(eta) = find("mirostat_eta") {
                    self.take(&name("mirostat_eta"), "mirostat_eta", number(eta).unwrap_or(f64::NAN));
                }
            }
            Some(other) => {
                let found = other.map_or_else(|| "no number".to_owned(), |found| found.to_string());
                self.refuse(&name("mirostat"), &format!("expected 0 or 2, found {found}"));
            }
        }
        match find("sequence") {
            None => {}
            Some(GgufValue::String(text)) => self.read_sequence(&name("sequence"), text),
            Some(_) => self.refuse(&name("sequence"), "expected a text"),
        }
    }

    /// Reads llama.cpp's order of the steps, such as `penalties;top_k;top_p;temperature`.
    fn read_sequence(&mut self, name: &str, text: &str) {
        let mut kinds: Vec<StepKind> = Vec::new();
        for word in text.split(';').map(str::trim).filter(|word| !word.is_empty()) {
            match GGUF_STEPS.iter().find(|(known, _)| *known == word) {
                Some((_, steps)) => kinds.extend(steps.iter().filter(|step| step.is_movable())),
                None => return self.refuse(name, &format!("the step {word:?} is not known")),
            }
        }
        if !kinds.is_empty() {
            self.insert("samplers", Value::Steps(kinds));
        }
    }

    /// Takes a number if it is in the range of its option.
    fn take(&mut self, name: &str, param: &str, number: f64) {
        let option = SamplingOption::by_param(param).expect("the tables name options");
        let value = match option.kind() {
            OptionKind::Number { low, high, .. } if (f64::from(low)..=f64::from(high)).contains(&number) => {
                Value::Number(number as f32)
            }
            OptionKind::Count { low }
                if number.fract() == 0.0 && (f64::from(low)..=f64::from(u32::MAX)).contains(&number) =>
            {
                Value::Count(number as u32)
            }
            OptionKind::Number { low, high, .. } => {
                return self.refuse(name, &format!("expected {low} to {high}, found {number}"));
            }
            _ => return self.refuse(name, &format!("expected a whole number, found {number}")),
        };
        self.options.insert(option, value);
    }

    fn insert(&mut self, param: &str, value: Value) {
        self.options.insert(SamplingOption::by_param(param).expect("an option"), value);
    }

    fn refuse(&mut self, name: &str, why: &str) {
        self.refused.push(format!("{name} ({why})"));
    }

    fn finish(mut self) -> Recommendation {
        let params = self.options.apply(SamplingParams::default(), |_| vec![0]);
        let checked = params.check().and_then(|()| params.check_effect());
        if let Err(error) = checked {
            self.options = GivenOptions::default();
            self.refused.push(format!("all values ({error})"));
        }
        let warning = (!self.refused.is_empty())
            .then(|| format!("warning: recommended sampling values were not taken: {}", self.refused.join(", ")));
        Recommendation { options: self.options, warning }
    }
}

/// Returns the options without one.
fn without(options: &GivenOptions, param: &str) -> GivenOptions {
    let mut rest = GivenOptions::default();
    for option in pellucid_sampling::OPTIONS.iter().filter(|option| option.param() != param) {
        if let Some(value) = options.get(option.param()) {
            rest.insert(option, value.clone());
        }
    }
    rest
}

fn number(value: &GgufValue) -> Option<f64> {
    match *value {
        GgufValue::U8(value) => Some(value.into()),
        GgufValue::I8(value) => Some(value.into()),
        GgufValue::U16(value) => Some(value.into()),
        GgufValue::I16(value) => Some(value.into()),
        GgufValue::U32(value) => Some(value.into()),
        GgufValue::I32(value) => Some(value.into()),
        GgufValue::U64(value) => Some(value as f64),
        GgufValue::I64(value) => Some(value as f64),
        // Written as it was meant: 0.7, not 0.699999988079071.
        GgufValue::F32(value) => value.to_string().parse().ok(),
        GgufValue::F64(value) => Some(value),
        _ => None,
    }
}

/// Returns a value as JSON, cut to a length that fits a line.
fn shortened(value: &Json) -> String {
    let text = value.to_string();
    if text.chars().count() <= 40 { text } else { text.chars().take(40).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use pellucid_checkpoint::Metadata;
    use serde_json::json;

    use super::*;

    fn of_json(config: &Json) -> (SamplingParams, Option<String>) {
        let mut reading = Reading::default();
        reading.read_json(config);
        applied(reading.finish())
    }

    fn of_gguf(keys: &[(&str, GgufValue)]) -> (SamplingParams, Option<String>) {
        let mut metadata = Metadata::default();
        for (key, value) in keys {
            metadata.insert(format!("{GGUF_PREFIX}{key}"), value.clone());
        }
        let checkpoint = Checkpoint::in_memory("no/such/folder/model.gguf", metadata, Vec::new()).unwrap();
        applied(recommended_sampling(&checkpoint))
    }

    fn applied(found: Recommendation) -> (SamplingParams, Option<String>) {
        (found.options.apply(SamplingParams::default(), |_| vec![0]), found.warning)
    }

    #[test]
    fn a_generation_config_is_taken() {
        let config = json!({
            "do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1,
            "eos_token_id": [1, 2], "num_beams": 1, "min_p": null, "transformers_version": "4.37.0"
        });
        let expected = SamplingParams {
            temperature: 0.7,
            top_p: 0.8,
            top_k: 20,
            repetition_penalty: 1.1,
            ..SamplingParams::default()
        };
        assert_eq!(of_json(&config), (expected, None));
        // Nothing about sampling is no recommendation, and a file that is no object neither.
        for config in [json!({"eos_token_id": 2}), json!([1]), json!(null)] {
            assert_eq!(of_json(&config), (SamplingParams::default(), None), "{config}");
        }
        let greedy = json!({"do_sample": false, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2});
        let expected = SamplingParams { temperature: 0.0, repetition_penalty: 1.2, ..SamplingParams::default() };
        assert_eq!(of_json(&greedy), (expected, None));
    }

    #[test]
    fn hostile_values_are_named_and_not_taken() {
        let config = json!({
            "temperature": -1, "top_k": 1.5, "top_p": "0.9", "min_p": 0.1, "num_beams": 4, "do_sample": "yes"
        });
        let (params, warning) = of_json(&config);
        assert_eq!(params, SamplingParams { min_p: 0.1, ..SamplingParams::default() });
        let warning = warning.expect("a warning");
        assert!(
            !warning.contains('\n') && warning.starts_with("warning: recommended sampling values were not taken: ")
        );
        for part in [
            "temperature (expected 0 to 100, found -1)",
            "top_k (expected a whole number, found 1.5)",
            "top_p (expected a number, found \"0.9\")",
            "num_beams (4 is not supported)",
            "do_sample (expected true or false, found \"yes\")",
        ] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
        for value in [json!(1e300), json!(-1e300), json!(1e-300)] {
            let (params, _) = of_json(&json!({"top_k": value, "temperature": value, "repetition_penalty": value}));
            assert!(params.check().is_ok(), "{value}");
        }
        for value in [f32::NAN, f32::INFINITY, -1.0] {
            let (params, warning) = of_gguf(&[("temp", GgufValue::F32(value)), ("top_p", GgufValue::F32(value))]);
            assert_eq!(params, SamplingParams::default());
            assert!(warning.is_some_and(|warning| warning.contains("general.sampling.temp (expected 0 to 100")));
        }
    }

    #[test]
    fn the_keys_of_a_gguf_file_are_taken() {
        let (params, warning) = of_gguf(&[
            ("temp", GgufValue::F32(0.7)),
            ("top_k", GgufValue::I32(20)),
            ("top_p", GgufValue::F32(0.8)),
            ("penalty_repeat", GgufValue::F32(1.05)),
            ("penalty_last_n", GgufValue::I32(64)),
            ("sequence", GgufValue::String("penalties;top_k;top_p;temperature".into())),
        ]);
        assert_eq!(warning, None);
        let expected = [StepKind::Repetition, StepKind::FrequencyPresence, StepKind::TopK, StepKind::TopP];
        assert_eq!(params.samplers.as_deref(), Some(&[&expected[..], &[StepKind::Temperature]].concat()[..]));
        assert_eq!((params.temperature, params.top_k, params.top_p), (0.7, 20, 0.8));
        assert_eq!((params.repetition_penalty, params.penalty_window), (1.05, Some(64)));

        let mirostat = [("mirostat", GgufValue::U32(2)), ("top_k", GgufValue::I32(40))];
        assert_eq!(of_gguf(&mirostat).0, SamplingParams { mirostat_tau: Some(5.0), ..SamplingParams::default() });
        let (_, warning) = of_gguf(&[
            ("mirostat", GgufValue::U32(1)),
            ("frobnicate", GgufValue::F32(1.0)),
            ("sequence", GgufValue::String("top_k;adaptive".into())),
        ]);
        let warning = warning.expect("a warning");
        for part in ["mirostat (expected 0 or 2, found 1)", "frobnicate (not known)", "the step \"adaptive\" is not"] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
    }
}
