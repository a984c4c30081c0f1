//! The goldens: tiny models with the logits and greedy continuations that the reference implementation computes for
//! them.
//!
//! `fixtures/README.md` says how they are made and how far two correct implementations differ.

use std::path::{Path, PathBuf};

/// A golden: a tiny model, prompts, and the reference's logits at every position.
#[derive(Debug)]
pub struct Golden {
    pub name: String,
    pub folder: PathBuf,
    pub prompts: Vec<Vec<u32>>,
    /// The reference's greedy continuation of each prompt.
    pub greedy: Vec<Vec<u32>>,
    vocab_size: usize,
    /// The file with the logits for the GGUF form, if there is one. They may differ: GGUF cannot express every setting.
    gguf_logits: Option<String>,
    /// The length beyond which LongRoPE uses its long factors.
    original_context_len: Option<usize>,
}

/// Returns the folder of all goldens in the repository.
pub fn goldens_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/goldens")
}

/// Reads every golden of the repository, sorted by name.
pub fn goldens() -> Vec<Golden> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(goldens_folder())
        .expect("the goldens are part of the repository")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.join("golden.json").exists())
        .collect();
    folders.sort();
    folders.iter().map(|folder| Golden::read(folder)).collect()
}

fn ids(value: &serde_json::Value) -> Vec<Vec<u32>> {
    serde_json::from_value(value.clone()).expect("a list of lists of ids")
}

impl Golden {
    pub(crate) fn read(folder: &Path) -> Golden {
        let read = |file: &str| -> serde_json::Value {
            let text = std::fs::read_to_string(folder.join(file)).expect("a readable golden");
            serde_json::from_str(&text).expect("valid JSON")
        };
        let (golden, config) = (read("golden.json"), read("config.json"));
        Golden {
            name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            folder: folder.to_owned(),
            prompts: ids(&golden["prompts"]),
            greedy: ids(&golden["greedy"]),
            vocab_size: golden["shape"][0][1].as_u64().expect("a vocabulary size") as usize,
            gguf_logits: golden["gguf"]["logits"].as_str().map(str::to_owned),
            original_context_len: config["original_max_position_embeddings"].as_u64().map(|len| len as usize),
        }
    }

    /// Returns the paths of the model with the logits to compare with: the Hugging Face folder, and the GGUF file if
    /// there is one.
    pub fn sources(&self) -> Vec<(PathBuf, Vec<Vec<f32>>)> {
        let mut sources = vec![(self.folder.clone(), self.logits("logits.bin"))];
        if let Some(file) = &self.gguf_logits {
            sources.push((self.folder.join("model.gguf"), self.logits(file)));
        }
        sources
    }

    /// Reads the logits for each prompt, `[position][vocabulary]` flattened.
    pub fn logits(&self, file: &str) -> Vec<Vec<f32>> {
        let bytes = std::fs::read(self.folder.join(file)).expect("a readable golden");
        let mut values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
        let logits: Vec<Vec<f32>> = (self.prompts.iter())
            .map(|prompt| values.by_ref().take(prompt.len() * self.vocab_size).collect())
            .collect();
        assert_eq!(values.next(), None, "{file} holds one row for each position");
        logits
    }

    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the context length to load the model for, to compare a prompt of `len` tokens: the reference selects
    /// LongRoPE's factors by the prompt's length.
    pub fn context_len(&self, len: usize) -> Option<usize> {
        self.original_context_len.filter(|&original| len <= original)
    }
}
