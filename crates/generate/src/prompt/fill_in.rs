//! Filling a gap in a text: models of code know control tokens that mark the text before and after it.

use pellucid_tokenizer::Tokenizer;

use crate::Error;

/// The control tokens of one family of models.
struct Format {
    prefix: &'static str,
    suffix: &'static str,
    /// Ends the prompt. Families without it put the suffix first.
    middle: Option<&'static str>,
}

/// Formats of published models: Qwen and CodeGemma, StarCoder and Granite, DeepSeek, CodeLlama, Codestral.
const FORMATS: [Format; 5] = [
    Format { prefix: "<|fim_prefix|>", suffix: "<|fim_suffix|>", middle: Some("<|fim_middle|>") },
    Format { prefix: "<fim_prefix>", suffix: "<fim_suffix>", middle: Some("<fim_middle>") },
    Format { prefix: "<｜fim▁begin｜>", suffix: "<｜fim▁hole｜>", middle: Some("<｜fim▁end｜>") },
    Format { prefix: "▁<PRE>", suffix: "▁<SUF>", middle: Some("▁<MID>") },
    Format { prefix: "[PREFIX]", suffix: "[SUFFIX]", middle: None },
];

/// Control tokens with which models end a gap, besides those that end every reply.
const ENDS: [&str; 9] = [
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|endoftext|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
    "<|end_of_text|>",
];

/// The control tokens with which a model fills a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FillInTokens {
    prefix: u32,
    suffix: u32,
    middle: Option<u32>,
}

impl FillInTokens {
    /// Returns the tokens of a vocabulary; `None` if the model was not trained to fill gaps.
    pub fn of(tokenizer: &Tokenizer) -> Option<FillInTokens> {
        FORMATS.iter().find_map(|format| {
            let middle = format.middle.map(|name| tokenizer.id_of(name));
            Some(FillInTokens {
                prefix: tokenizer.id_of(format.prefix)?,
                suffix: tokenizer.id_of(format.suffix)?,
                middle: match middle {
                    None => None,
                    Some(id) => Some(id?),
                },
            })
        })
    }

    /// Returns the tokens at which the filled gap ends.
    pub fn end_ids(tokenizer: &Tokenizer) -> Vec<u32> {
        ENDS.iter().filter_map(|name| tokenizer.id_of(name)).collect()
    }

    /// Returns the ids of a prompt whose reply belongs between the two texts.
    pub(crate) fn encode(self, before: &str, after: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, Error> {
        let (before, after) = (tokenizer.try_encode(before)?, tokenizer.try_encode(after)?);
        let mut ids = Vec::new();
        let num_ids = tokenizer.prefix().len() + before.len() + after.len() + 3;
        ids.try_reserve_exact(num_ids).map_err(|_| Error::OutOfMemory)?;
        ids.extend_from_slice(tokenizer.prefix());
        match self.middle {
            Some(middle) => {
                ids.push(self.prefix);
                ids.extend(before);
                ids.push(self.suffix);
                ids.extend(after);
                ids.push(middle);
            }
            None => {
                ids.push(self.suffix);
                ids.extend(after);
                ids.push(self.prefix);
                ids.extend(before);
            }
        }
        Ok(ids)
    }
}
