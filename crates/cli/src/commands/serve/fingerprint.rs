//! The name of the served model, and the fingerprint: servers with equal fingerprints return equal bytes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::flags::compute::ComputeArgs;
use crate::hub::known_models;

/// Bytes hashed at the beginning of a file, which holds the header, and at its end. `BETWEEN` samples of
/// `BETWEEN_SAMPLE` bytes are hashed between them, so that every layer of a model is sampled.
const SAMPLE: u64 = 1 << 20;
const BETWEEN: u64 = 256;
const BETWEEN_SAMPLE: u64 = 16 << 10;

/// Returns the name that the user gave, or the default model's; for a path, its last component without extension.
pub(super) fn model_name(given: Option<&str>, path: &Path) -> String {
    match given {
        None => {
            let is_file = |model: &&known_models::KnownModel| path.file_name().is_some_and(|name| name == model.file);
            return known_models::MODELS.iter().find(is_file).unwrap_or(known_models::DEFAULT).name.to_owned();
        }
        Some(name) if !Path::new(name).exists() => return name.to_owned(),
        Some(_) => {}
    }
    let is_file = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_file { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// Returns the further names of a model, each once and none that is `id`.
pub(super) fn aliases(id: &str, given: &[String]) -> Vec<String> {
    let mut aliases: Vec<String> = Vec::new();
    for name in given {
        if name != id && !aliases.contains(name) {
            aliases.push(name.clone());
        }
    }
    aliases
}

/// Returns version and build, instruction set, KV format and a hash of the model: its files, the context length, on
/// which the positions of some models depend, and `settings`: the chat template if another one replaces the model's
/// own, and what decides which text guards block.
pub(super) fn fingerprint(
    path: &Path,
    files: &[PathBuf],
    context_len: usize,
    device: &str,
    compute: &ComputeArgs,
    settings: [Option<&str>; 2],
) -> Result<String> {
    let mut files = files.to_vec();
    if path.is_dir() {
        let entries = std::fs::read_dir(path).with_context(|| path.display().to_string())?;
        files = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
        files.sort();
    }
    let mut model = Sha256::new();
    model.update((context_len as u64).to_le_bytes());
    for file in &files {
        sample(file, &mut model).with_context(|| file.display().to_string())?;
    }
    for text in settings.into_iter().flatten() {
        model.update(text);
    }
    let kv = compute.kv_type;
    // With --fast, equal requests may return different bytes.
    let fast = if compute.fast { "-fast" } else { "" };
    Ok(format!("pellucid-{}-{}-{kv}{fast}-{}", build(), device_name(device), short(model)))
}

/// Returns the version of the program and a hash of its file.
pub(crate) fn build() -> String {
    let mut build = Sha256::new();
    // If the program cannot read its own file, only the version identifies the build.
    if let Ok(program) = std::env::current_exe() {
        let _ = sample(&program, &mut build);
    }
    format!("{}-{}", env!("CARGO_PKG_VERSION"), short(build))
}

/// Returns the devices without their numbers and threads, such as `cpu-avx512` for "cpu (avx512, 2 threads)": these do
/// not change any bytes. Neither does it matter which of several devices of one kind has what, but which of different
/// ones does.
fn device_name(description: &str) -> String {
    let parts: Vec<(String, &str)> = (description.split("; "))
        // Some GPUs have "with" in their names.
        .map(|device| device.split_once(") with ").unwrap_or((device, "")))
        .map(|(device, parts)| (name_of_one(device), parts))
        .collect();
    if parts.iter().all(|(name, _)| *name == parts[0].0) {
        return parts[0].0.clone();
    }
    let mut placement = Sha256::new();
    parts.iter().for_each(|(name, parts)| placement.update(format!("{name} {parts}\0")));
    let names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
    format!("{}-{}", names.join("-"), short(placement))
}

fn name_of_one(description: &str) -> String {
    let (kind, details) = description.split_once(" (").unwrap_or((description, ""));
    let kind = kind.split(':').next().unwrap_or_default();
    let model = details.split([',', ')']).next().unwrap_or_default();
    format!("{kind}-{}", model.replace(|c: char| !c.is_ascii_alphanumeric(), "_"))
}

/// Hashes the length of a file, its beginning and end, and samples between them.
fn sample(path: &Path, hash: &mut Sha256) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    hash.update(length.to_le_bytes());
    let mut bytes = Vec::new();
    file.by_ref().take(SAMPLE).read_to_end(&mut bytes)?;
    for i in 1..BETWEEN {
        let at = length / BETWEEN * i;
        if at >= SAMPLE {
            file.seek(SeekFrom::Start(at))?;
            file.by_ref().take(BETWEEN_SAMPLE).read_to_end(&mut bytes)?;
        }
    }
    file.seek(SeekFrom::Start(length.saturating_sub(SAMPLE).max(SAMPLE.min(length))))?;
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
    fn device_names() {
        assert_eq!(device_name("cpu (avx512, 2 threads)"), "cpu-avx512");
        assert_eq!(device_name("cuda:1 (NVIDIA H200, compute 9.0, 140 GiB)"), "cuda-NVIDIA_H200");
        let mobile = "cuda:0 (NVIDIA GeForce RTX 2080 with Max-Q Design, compute 7.5, 8 GiB)";
        assert_eq!(device_name(mobile), "cuda-NVIDIA_GeForce_RTX_2080_with_Max_Q_Design");
    }

    #[test]
    fn names_of_several_devices() {
        let two = |first: &str, second: &str, at: usize| {
            device_name(&format!("{first} with layers {at} to 9, the output; {second} with layers 0 to {}", at - 1))
        };
        let (cpu, gpu) = ("cpu (amx, 16 threads)", "cuda:0 (NVIDIA H200, compute 9.0, 140 GiB)");
        assert_eq!(two(cpu, "cpu (amx, 2 threads)", 4), "cpu-amx", "devices of one kind give the bits of one");
        assert!(two(gpu, cpu, 4).starts_with("cuda-NVIDIA_H200-cpu-amx-"), "{}", two(gpu, cpu, 4));
        assert_eq!(two(gpu, cpu, 4), two(gpu, "cpu (amx, 2 threads)", 4));
        assert_ne!(two(gpu, cpu, 4), two(gpu, cpu, 5), "the placement changes bits");
    }

    #[test]
    fn a_change_in_the_middle_of_a_file_shows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut bytes = vec![1u8; 20 << 20];
        let hash = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let mut hash = Sha256::new();
            sample(&path, &mut hash).unwrap();
            short(hash)
        };
        let before = hash(&bytes);
        assert_eq!(hash(&bytes), before);
        // A hundredth of the file, about the size of a layer.
        bytes[10_500_000..10_700_000].fill(2);
        assert_ne!(hash(&bytes), before);
    }

    #[test]
    fn a_model_is_called_after_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.Q4_1.gguf");
        std::fs::write(&file, b"").unwrap();
        assert_eq!(model_name(file.to_str(), &file), "a.Q4_1");
        let name = folder.path().file_name().unwrap().to_string_lossy();
        assert_eq!(model_name(folder.path().to_str(), folder.path()), name);
        let stored = Path::new("/store/x/file.gguf");
        assert_eq!(model_name(Some("mine"), stored), "mine");
        for model in known_models::MODELS {
            assert_eq!(model_name(None, &Path::new("/store").join(model.file)), model.name);
        }
    }
}
