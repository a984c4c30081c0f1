//! Which models compute vectors whose first values are vectors too.

use pellucid_checkpoint::{Checkpoint, Source};
use pellucid_generate::ShorterVectors;

/// Names of models whose files do not say that their vectors may be shortened, as their authors document it.
const KNOWN_TO_SHORTEN: [(&str, &[usize]); 2] =
    [("nomic-embed-text-v1.5", &[64, 128, 256, 512]), ("qwen3-embedding", &[])];

/// Returns the lengths to which a model's vectors may be shortened: by `matryoshka_dimensions` or `is_matryoshka` of
/// `config.json`, or by the name of a known model.
pub(super) fn shorter_vectors(checkpoint: &Checkpoint) -> ShorterVectors {
    let mut name = checkpoint.path().to_string_lossy().to_lowercase();
    match checkpoint.source() {
        Source::Gguf(metadata) => {
            name +=
                &metadata.opt_str("general.name").ok().flatten().unwrap_or_default().to_lowercase().replace(' ', "-");
        }
        Source::HuggingFace(files) => {
            let listed = files.config["matryoshka_dimensions"].as_array();
            let lengths = listed.into_iter().flatten().filter_map(serde_json::Value::as_u64).map(|len| len as usize);
            let lengths: Vec<usize> = lengths.collect();
            if !lengths.is_empty() {
                return ShorterVectors::Listed(lengths);
            }
            if files.config["is_matryoshka"] == true {
                return ShorterVectors::Any;
            }
            name += &files.config["_name_or_path"].as_str().unwrap_or_default().to_lowercase();
        }
    }
    match KNOWN_TO_SHORTEN.iter().find(|(known, _)| name.contains(known)) {
        Some((_, [])) => ShorterVectors::Any,
        Some((_, lengths)) => ShorterVectors::Listed(lengths.to_vec()),
        None => ShorterVectors::None,
    }
}
