//! The supported families of encoders. Each file reads a configuration, names the tensors, and describes how the family
//! differs from BERT.

mod bert;
mod modern_bert;
mod nomic_bert;

use pellucid_checkpoint::{Checkpoint, HuggingFace, Source};
use serde_json::Value;

use super::config::EncoderConfig;
use super::tensor_names::EncoderNames;
use crate::config::gguf::Keys;
use crate::config::hugging_face::Fields;
use crate::{Error, Pooling};

struct Family {
    /// Name of the family in messages, and the value of `general.architecture` in GGUF files.
    name: &'static str,
    /// The values of `model_type` in a Hugging Face `config.json`.
    hugging_face: &'static [&'static str],
    read_gguf: fn(Keys<'_>, &mut EncoderConfig) -> Result<(), Error>,
    read_hugging_face: fn(Fields<'_>, &mut EncoderConfig) -> Result<(), Error>,
    /// Names in Hugging Face folders.
    names: EncoderNames,
    gguf_names: EncoderNames,
}

const FAMILIES: &[Family] = &[bert::BERT, nomic_bert::NOMIC_BERT, modern_bert::MODERN_BERT];

/// A checkpoint's configuration and its tensor names.
#[derive(Debug, Clone)]
pub(crate) struct EncoderBlueprint {
    pub(crate) config: EncoderConfig,
    pub(crate) names: EncoderNames,
    pub(crate) prefix: &'static str,
}

/// Returns the names of the supported families of encoders.
pub fn supported_encoders() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.name).collect()
}

fn family(checkpoint: &Checkpoint) -> Result<Option<&'static Family>, Error> {
    let architecture = checkpoint.architecture()?;
    Ok(FAMILIES.iter().find(|family| match checkpoint.source() {
        Source::Gguf(_) => family.name == architecture,
        Source::HuggingFace(_) => family.hugging_face.contains(&architecture),
    }))
}

/// Whether a checkpoint is an encoder, which computes vectors and no logits.
pub fn is_encoder(checkpoint: &Checkpoint) -> Result<bool, Error> {
    Ok(family(checkpoint)?.is_some())
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<EncoderBlueprint, Error> {
    let architecture = checkpoint.architecture()?;
    let family = family(checkpoint)?.ok_or_else(|| Error::UnsupportedArchitecture { found: architecture.into() })?;
    let mut config = EncoderConfig { architecture: family.name.into(), ..EncoderConfig::BERT };
    let names = match checkpoint.source() {
        Source::Gguf(_) => family.gguf_names,
        Source::HuggingFace(_) => family.names,
    };
    let table = |prefix: &str| format!("{prefix}{}.weight", names.token_embedding);
    let found = names.prefixes.iter().copied().find(|prefix| checkpoint.find_tensor(&table(prefix)).is_some());
    let Some(prefix) = found else {
        if checkpoint.tensors().is_empty() {
            return Err(Error::NoWeights);
        }
        return Err(Error::MissingTensor { names: names.prefixes.iter().map(|prefix| table(prefix)).collect() });
    };
    match checkpoint.source() {
        Source::Gguf(metadata) => {
            (family.read_gguf)(Keys::new(metadata, architecture), &mut config)?;
            config.pooling = gguf_pooling(Keys::new(metadata, architecture))?;
        }
        Source::HuggingFace(files) => {
            (family.read_hugging_face)(Fields::new(&files.config), &mut config)?;
            config.pooling = folder_pooling(files)?;
            if let Some(limit) = max_text_len(files)? {
                config.context_len = config.context_len.min(limit);
            }
        }
    }
    let rows = |name: &str| checkpoint.find_tensor(name).and_then(|table| table.info.shape.first().copied());
    config.vocab_size = rows(&table(prefix)).unwrap_or(0);
    config.num_types = rows(&format!("{prefix}{}.weight", names.type_embedding)).unwrap_or(0);
    config.check()?;
    Ok(EncoderBlueprint { config, names, prefix })
}

/// Reads the pooling that a GGUF file states; 0 means none.
pub(crate) fn gguf_pooling(keys: Keys<'_>) -> Result<Option<Pooling>, Error> {
    match keys.opt_usize("pooling_type")? {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(Pooling::Mean)),
        Some(2) => Ok(Some(Pooling::Cls)),
        Some(3) => Ok(Some(Pooling::Last)),
        // Scores of pairs: the classifier decides, and the rows are not pooled.
        Some(4) => Ok(None),
        Some(found) => Err(Error::BadSetting {
            key: "pooling_type".into(),
            expected: "0 to 4 (none, mean, cls, last, rank)".into(),
            found: found.to_string(),
        }),
    }
}

/// Reads the pooling that the sentence-transformers files of a folder state.
pub(crate) fn folder_pooling(files: &HuggingFace) -> Result<Option<Pooling>, Error> {
    let Some(stated) = &files.pooling_config else { return Ok(None) };
    // Files before 2026 have a flag for each mode; more than one concatenates vectors.
    let flags = [
        ("pooling_mode_mean_tokens", Some(Pooling::Mean)),
        ("pooling_mode_cls_token", Some(Pooling::Cls)),
        ("pooling_mode_lasttoken", Some(Pooling::Last)),
        ("pooling_mode_max_tokens", None),
        ("pooling_mode_mean_sqrt_len_tokens", None),
        ("pooling_mode_weightedmean_tokens", None),
    ];
    let set: Vec<_> = flags.iter().filter(|(key, _)| stated[key].as_bool() == Some(true)).collect();
    let named = match &stated["pooling_mode"] {
        Value::String(name) if name == "lasttoken" => Some(Pooling::Last),
        Value::String(name) => Pooling::named(name),
        _ => None,
    };
    match (&set[..], named) {
        ([(_, Some(pooling))], _) => Ok(Some(*pooling)),
        ([], Some(pooling)) => Ok(Some(pooling)),
        (modes, _) => Err(Error::BadSetting {
            key: "1_Pooling/config.json: pooling mode".into(),
            expected: "one of mean, cls and last".into(),
            found: match modes {
                [] => stated["pooling_mode"].to_string(),
                modes => modes.iter().map(|(key, _)| *key).collect::<Vec<_>>().join(", "),
            },
        }),
    }
}

/// Returns the maximum tokens of a text that the sentence-transformers files of a folder state.
fn max_text_len(files: &HuggingFace) -> Result<Option<usize>, Error> {
    match &files.sentence_config {
        Some(config) => Fields::new(config).opt_usize("max_seq_length"),
        None => Ok(None),
    }
}
