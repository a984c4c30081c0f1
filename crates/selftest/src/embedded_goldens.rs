//! The goldens' files inside the program, for machines that have no checkout of the repository.

use std::path::{Path, PathBuf};

use crate::Golden;

/// The name of a golden, and the name and content of each of its files.
type Files = (&'static str, [(&'static str, &'static [u8]); 4]);

macro_rules! golden {
    ($name:literal) => {
        (
            $name,
            [
                golden!($name, "config.json"),
                golden!($name, "golden.json"),
                golden!($name, "logits.bin"),
                golden!($name, "model.safetensors"),
            ],
        )
    };
    ($name:literal, $file:literal) => {
        ($file, include_bytes!(concat!("../fixtures/goldens/", $name, "/", $file)))
    };
}

static GOLDENS: [Files; 69] = [
    golden!("awq"),
    golden!("deepseek2"),
    golden!("deepseek2-lite"),
    golden!("deepseek3"),
    golden!("fp8"),
    golden!("fp8-channel"),
    golden!("gemma2"),
    golden!("gemma3"),
    golden!("gemma3-old"),
    golden!("gemma4"),
    golden!("gemma4-moe"),
    golden!("gemma4-small"),
    golden!("gemma4-unified"),
    golden!("glm4-moe"),
    golden!("glm4-moe-groups"),
    golden!("glm4-moe-lite"),
    golden!("gpt-oss"),
    golden!("gpt-oss-mxfp4"),
    golden!("gpt2"),
    golden!("gptq"),
    golden!("gptq-act"),
    golden!("granite"),
    golden!("granite-hybrid"),
    golden!("granite-hybrid-attention"),
    golden!("granite-hybrid-groups"),
    golden!("granite-hybrid-moe"),
    golden!("granite-moe"),
    golden!("granite-moe-shared"),
    golden!("int4"),
    golden!("int8"),
    golden!("lfm2"),
    golden!("lfm2-bias"),
    golden!("lfm2-moe"),
    golden!("llama-bias"),
    golden!("llama-linear"),
    golden!("llama2"),
    golden!("llama3"),
    golden!("llama3-old"),
    golden!("minimax-m2"),
    golden!("ministral3"),
    golden!("mistral"),
    golden!("mistral3"),
    golden!("mixtral"),
    golden!("nemotron-h"),
    golden!("nemotron-h-groups"),
    golden!("nemotron-h-latent"),
    golden!("nemotron-h-moe"),
    golden!("olmo2"),
    golden!("olmo3"),
    golden!("phi3"),
    golden!("phi3-longrope"),
    golden!("phi4-mini"),
    golden!("qwen2"),
    golden!("qwen2-window"),
    golden!("qwen2-yarn"),
    golden!("qwen3"),
    golden!("qwen3-moe"),
    golden!("qwen3-moe-mixed"),
    golden!("qwen3-moe-step"),
    golden!("qwen3-next"),
    golden!("qwen3-vl"),
    golden!("qwen3-vl-moe"),
    golden!("qwen35"),
    golden!("qwen35-moe"),
    golden!("qwen35-text"),
    golden!("smollm2"),
    golden!("smollm3"),
    golden!("smollm3-list"),
    golden!("xglm"),
];

macro_rules! predictor {
    ($name:literal) => {
        (
            $name,
            [
                predictor!($name, "config.json"),
                predictor!($name, "model.safetensors"),
                predictor!($name, "predictor.json"),
                predictor!($name, "logits.bin"),
            ],
        )
    };
    ($name:literal, $file:literal) => {
        ($file, include_bytes!(concat!("../fixtures/predictors/", $name, "/", $file)))
    };
}

/// Models with a layer that predicts further tokens, and what the reference's layer computes.
static PREDICTORS: [Files; 2] = [predictor!("glm4-moe"), predictor!("qwen3-next")];

/// Writes each model with a predictor into a folder below `parent`, and returns their names and folders.
pub(crate) fn write_predictors(parent: &Path) -> Vec<(&'static str, PathBuf)> {
    PREDICTORS.iter().map(|(name, files)| (*name, write_files(&parent.join(name), files))).collect()
}

/// The names of all embedded goldens.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    GOLDENS.iter().map(|golden| golden.0)
}

/// Writes the files of the golden `name` into a folder below `parent`, from where a checkpoint can be opened.
pub(crate) fn write(name: &str, parent: &Path) -> Golden {
    let (_, files) = GOLDENS.iter().find(|golden| golden.0 == name).expect("the name of an embedded golden");
    Golden::read(&write_files(&parent.join(name), files))
}

fn write_files(folder: &Path, files: &[(&str, &[u8])]) -> PathBuf {
    std::fs::create_dir_all(folder).expect("a folder that can be written");
    for (file, bytes) in files {
        std::fs::write(folder.join(file), bytes).expect("a file that can be written");
    }
    folder.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A golden that is missing from the list would never be checked on a user's machine.
    #[test]
    fn every_golden_of_the_repository_is_embedded() {
        let in_repository: Vec<String> = crate::goldens().into_iter().map(|golden| golden.name).collect();
        assert_eq!(names().collect::<Vec<_>>(), in_repository);
    }
}
