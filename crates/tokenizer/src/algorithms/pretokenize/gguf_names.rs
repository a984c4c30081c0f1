//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

use super::{
    DEEPSEEK_CJK, DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, DEEPSEEK3, DEEPSEEK3_CJK, GPT2, GPT4O, LLAMA3, QWEN2, QWEN35,
    Stage, TEKKEN, THREE_DIGITS,
};
use crate::error::Error;

/// The meaning of a `tokenizer.ggml.pre` name: the pre-tokenizer, and settings that GGUF files have no key for.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) stages: Vec<Stage>,
    /// Whether a piece that is a token is used whole, without merging.
    pub(crate) ignore_merges: bool,
    /// Whether the model prepends its beginning-of-sequence token, unless the file says otherwise.
    pub(crate) add_bos: bool,
    /// Whether the reference tokenizer normalizes text to NFC first.
    pub(crate) nfc: bool,
}

/// The pre-tokenizers; several names share one.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Recipe {
    Default,
    Llama3,
    Gpt2,
    DigitsGpt2,
    Qwen2,
    Qwen35,
    Cl100k,
    Tekken,
    Gpt4o,
    DeepSeekLlm,
    DeepSeekCoder,
    DeepSeek3,
    Falcon,
}

const NAMES: &[(&str, Recipe)] = &[
    ("default", Recipe::Default),
    ("llama3", Recipe::Llama3),
    ("llama-v3", Recipe::Llama3),
    ("llama-bpe", Recipe::Llama3),
    ("falcon3", Recipe::Llama3),
    ("falcon-h1", Recipe::Llama3),
    ("pixtral", Recipe::Llama3),
    ("lfm2", Recipe::Llama3),
    ("gpt-2", Recipe::Gpt2),
    ("phi-2", Recipe::Gpt2),
    ("mpt", Recipe::Gpt2),
    ("olmo", Recipe::Gpt2),
    ("jais", Recipe::Gpt2),
    ("trillion", Recipe::Gpt2),
    ("exaone4", Recipe::Gpt2),
    ("modern-bert", Recipe::Gpt2),
    ("smollm", Recipe::DigitsGpt2),
    ("starcoder", Recipe::DigitsGpt2),
    ("refact", Recipe::DigitsGpt2),
    ("command-r", Recipe::DigitsGpt2),
    ("codeshell", Recipe::DigitsGpt2),
    ("exaone", Recipe::DigitsGpt2),
    ("minerva-7b", Recipe::DigitsGpt2),
    ("qwen2", Recipe::Qwen2),
    ("deepseek-r1-qwen", Recipe::Qwen2),
    ("stablelm2", Recipe::Qwen2),
    ("megrez", Recipe::Qwen2),
    ("hunyuan", Recipe::Qwen2),
    ("solar-open", Recipe::Qwen2),
    ("grok-2", Recipe::Qwen2),
    ("qwen35", Recipe::Qwen35),
    ("dbrx", Recipe::Cl100k),
    ("smaug-bpe", Recipe::Cl100k),
    ("chatglm-bpe", Recipe::Cl100k),
    ("glm4", Recipe::Cl100k),
    ("tekken", Recipe::Tekken),
    ("gpt-4o", Recipe::Gpt4o),
    ("llama4", Recipe::Gpt4o),
    ("minimax-m2", Recipe::Gpt4o),
    ("deepseek-llm", Recipe::DeepSeekLlm),
    ("deepseek-coder", Recipe::DeepSeekCoder),
    ("deepseek-v3", Recipe::DeepSeek3),
    ("hunyuan-dense", Recipe::DeepSeek3),
    ("falcon", Recipe::Falcon),
];

/// Every supported name.
pub(super) fn known_names() -> impl Iterator<Item = &'static str> {
    NAMES.iter().map(|(name, _)| *name)
}

/// The names whose reference tokenizer normalizes to NFC; GGUF files have no key for it.
const NFC_NAMES: &[&str] = &["qwen2", "command-r", "mpt", "olmo", "modern-bert"];

/// Returns the pre-tokenizer of a `tokenizer.ggml.pre` name. An unknown name is an error that lists the known ones,
/// because a wrong pre-tokenizer gives plausible ids and silently worse replies.
pub(crate) fn named(name: &str) -> Result<Named, Error> {
    let Some(&(_, recipe)) = NAMES.iter().find(|(known, _)| *known == name) else {
        return Err(Error::UnsupportedPreTokenizer { found: name.to_owned(), supported: known_names().collect() });
    };
    let patterns = |list: &[&str]| list.iter().map(|p| Stage::from_pattern(p)).collect::<Result<Vec<_>, _>>();
    let stages = match recipe {
        Recipe::Default => patterns(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", THREE_DIGITS])?,
        Recipe::Llama3 | Recipe::Cl100k => patterns(&[LLAMA3])?,
        Recipe::Gpt2 => patterns(&[GPT2])?,
        Recipe::DigitsGpt2 => patterns(&[r"\p{N}", GPT2])?,
        Recipe::Qwen2 => patterns(&[QWEN2])?,
        Recipe::Qwen35 => patterns(&[QWEN35])?,
        Recipe::Tekken => patterns(&[TEKKEN])?,
        Recipe::Gpt4o => patterns(&[GPT4O])?,
        Recipe::DeepSeekLlm => {
            patterns(&[r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", DEEPSEEK_CJK, r"\p{N}+"])?
        }
        Recipe::DeepSeekCoder => patterns(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"])?,
        Recipe::DeepSeek3 => patterns(&[r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3])?,
        Recipe::Falcon => {
            let mut stages = vec![Stage::Punctuation, Stage::Gpt2];
            stages.extend(patterns(&[THREE_DIGITS])?);
            stages
        }
    };
    Ok(Named {
        stages,
        ignore_merges: matches!(recipe, Recipe::Llama3 | Recipe::Tekken) || name == "glm4",
        add_bos: matches!(recipe, Recipe::Llama3 | Recipe::Tekken),
        nfc: NFC_NAMES.contains(&name),
    })
}

/// The names that [`name_of`] chooses from. Of names with the same pre-tokenizer, the most common comes first.
const WRITTEN_NAMES: [&str; 15] = [
    "gpt-2",
    "mpt",
    "smollm",
    "command-r",
    "llama-bpe",
    "dbrx",
    "qwen2",
    "stablelm2",
    "qwen35",
    "tekken",
    "gpt-4o",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "default",
];

/// Returns the name of a pre-tokenizer; of several names for the same stages, the one whose other settings fit best.
pub(crate) fn name_of(stages: &[Stage], ignore_merges: bool, nfc: bool) -> Option<(&'static str, Named)> {
    let known = WRITTEN_NAMES.into_iter().filter_map(|name| Some((name, named(name).ok()?)));
    let alike = known.filter(|(_, named)| named.stages == stages);
    alike.min_by_key(|(_, named)| (named.ignore_merges != ignore_merges, named.nfc != nfc))
}
