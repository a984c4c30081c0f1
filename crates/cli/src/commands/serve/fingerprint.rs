//! Names: the id under which a model is served, and the fingerprint that tells whether two servers give the same bytes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::loaded::ComputeArgs;

/// Bytes of a file's beginning and end that stand for it: headers and shapes are at the one, weights at the other.
const SAMPLE: u64 = 1 << 20;

/// The name that the user gave, without path and extension.
pub(super) fn model_name(given: Option<&str>, path: &Path) -> String {
    let is_path = given.is_none_or(|name| Path::new(name).exists());
    match given.filter(|_| !is_path) {
        Some(name) => name.to_owned(),
        None => {
            let is_file = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
            let name = if is_file { path.file_stem() } else { path.file_name() };
            name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
        }
    }
}

/// Version and build, instruction set, number format of the KV memory, and model.
pub(super) fn fingerprint(path: &Path, device: &str, compute: &ComputeArgs) -> Result<String> {
    let mut files: Vec<PathBuf> = vec![path.to_owned()];
    if path.is_dir() {
        let entries = std::fs::read_dir(path).with_context(|| path.display().to_string())?;
        files = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
        files.sort();
    }
    let mut model = Sha256::new();
    for file in &files {
        sample(file, &mut model).with_context(|| file.display().to_string())?;
    }
    let mut build = Sha256::new();
    // A program that cannot read itself still serves; its build is then known by its version alone.
    if let Ok(program) = std::env::current_exe() {
        let _ = sample(&program, &mut build);
    }
    let kv = format!("{:?}", compute.kv_type).to_lowercase();
    // Not the same bytes for the same request: two such servers may differ.
    let fast = if compute.fast { "-fast" } else { "" };
    let version = env!("CARGO_PKG_VERSION");
    Ok(format!("pellucid-{version}-{}-{}-{kv}{fast}-{}", short(build), device_word(device), short(model)))
}

/// The device and what it computes with, such as `cpu-avx512` of "cpu (avx512, 2 threads)": how many threads or which of several equal
/// GPUs it was makes no difference to the bytes.
fn device_word(description: &str) -> String {
    let (kind, details) = description.split_once(" (").unwrap_or((description, ""));
    let kind = kind.split(':').next().unwrap_or_default();
    let what = details.split([',', ')']).next().unwrap_or_default();
    format!("{kind}-{what}").replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_")
}

/// Takes in a file's length, beginning and end.
fn sample(path: &Path, hash: &mut Sha256) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    hash.update(length.to_le_bytes());
    let mut bytes = Vec::new();
    file.by_ref().take(SAMPLE).read_to_end(&mut bytes)?;
    file.seek(SeekFrom::Start(length.saturating_sub(SAMPLE).max(bytes.len() as u64)))?;
    file.take(SAMPLE).read_to_end(&mut bytes)?;
    hash.update(&bytes);
    Ok(())
}

fn short(hash: Sha256) -> String {
    hash.finalize().iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_in_a_word() {
        assert_eq!(device_word("cpu (avx512, 2 threads)"), "cpu-avx512");
        assert_eq!(device_word("cuda:1 (NVIDIA H200, compute 9.0, 140 GiB)"), "cuda-NVIDIA_H200");
    }

    #[test]
    fn a_model_is_called_after_its_file() {
        assert_eq!(model_name(None, Path::new("/models/a.Q4_1.gguf")), "a.Q4_1");
        assert_eq!(model_name(None, Path::new("/models/some-folder")), "some-folder");
        assert_eq!(model_name(Some("smollm2"), Path::new("/store/x/file.gguf")), "smollm2");
    }
}
