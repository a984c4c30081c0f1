//! Drafters of a model, as the builder and the flag `--speculate` name them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use pellucid_engine::{MAX_DRAFT_LEN, SpeculationOptions};

/// Drafters that propose tokens, which the model checks several at a time. Replies are the same, to the bit, with any
/// drafters or none; only their speed differs.
///
/// ```
/// use pellucid::{Pellucid, Request, Speculation};
///
/// # fn main() -> Result<(), pellucid::Error> {
/// let request = Request::text("Once upon a time").max_tokens(20);
/// let plain = Pellucid::open("models/tiny.gguf")?.generate(request.clone())?;
/// let model = Pellucid::builder("models/tiny.gguf").speculate(Speculation::OFF.ngram()).open()?;
/// let reply = model.generate(request)?;
/// assert_eq!(reply.text(), plain.text());
/// let counts = reply.summary.speculation.total();
/// println!("{} of {} drafted tokens accepted", counts.accepted, counts.drafted);
/// # Ok(())
/// # }
/// ```
///
/// A text names them as well: `"draft=small.gguf,ngram".parse::<Speculation>()`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "it does nothing until a builder gets it"]
pub struct Speculation {
    draft_model: Option<PathBuf>,
    mtp: bool,
    ngram: bool,
    suffix: bool,
    max_draft_len: usize,
}

impl Speculation {
    /// No drafter. A request may still bring a prediction.
    pub const OFF: Speculation =
        Speculation { draft_model: None, mtp: false, ngram: false, suffix: false, max_draft_len: MAX_DRAFT_LEN };

    /// Drafters of a model whose builder or command line names none.
    pub const DEFAULT: Speculation = Speculation::OFF;

    /// Adds a drafter that proposes what followed the same n-gram earlier in the prompt or the reply.
    pub fn ngram(self) -> Speculation {
        Speculation { ngram: true, ..self }
    }

    /// Adds a drafter that proposes what followed the longest common suffix in the tenant's recent replies.
    pub fn suffix(self) -> Speculation {
        Speculation { suffix: true, ..self }
    }

    /// Adds a draft model: a GGUF file or a Hugging Face folder of a smaller model with the same vocabulary. Opening
    /// fails if a token differs.
    pub fn draft_model(self, path: impl Into<PathBuf>) -> Speculation {
        Speculation { draft_model: Some(path.into()), ..self }
    }

    /// Adds the layer that some models have for predicting further tokens. Opening fails if the model has none, and on
    /// a GPU.
    pub fn mtp(self) -> Speculation {
        Speculation { mtp: true, ..self }
    }

    /// Whether the model's own layer proposes tokens.
    pub fn uses_mtp(&self) -> bool {
        self.mtp
    }

    /// Removes the drafts of the model's own layer.
    pub fn without_mtp(self) -> Speculation {
        Speculation { mtp: false, ..self }
    }

    /// Removes the draft model.
    pub fn without_draft_model(self) -> Speculation {
        Speculation { draft_model: None, ..self }
    }

    /// Sets the maximum tokens of a draft, 1 to 15. Default: 15. The engine chooses a length up to it in each step.
    pub fn max_draft_tokens(self, num_tokens: usize) -> Speculation {
        Speculation { max_draft_len: num_tokens.clamp(1, MAX_DRAFT_LEN), ..self }
    }

    /// Whether there is no drafter.
    pub fn is_off(&self) -> bool {
        self.draft_model.is_none() && !self.mtp && !self.ngram && !self.suffix
    }

    /// Returns the path of the draft model.
    pub fn draft_path(&self) -> Option<&PathBuf> {
        self.draft_model.as_ref()
    }

    /// Returns both together; `None` if both name a model that drafts (a draft model, or the model's own layer), or one
    /// of them names no drafter.
    pub fn and(self, other: Speculation) -> Option<Speculation> {
        let models = [&self, &other].map(|one| usize::from(one.draft_model.is_some()) + usize::from(one.mtp));
        let has_two_models = models.iter().sum::<usize>() > 1 && !(self.mtp && other.mtp);
        if self.is_off() || other.is_off() || has_two_models {
            return None;
        }
        Some(Speculation {
            draft_model: self.draft_model.or(other.draft_model),
            mtp: self.mtp || other.mtp,
            ngram: self.ngram || other.ngram,
            suffix: self.suffix || other.suffix,
            max_draft_len: self.max_draft_len.min(other.max_draft_len),
        })
    }

    /// Returns the engine's options.
    pub fn options(&self) -> SpeculationOptions {
        SpeculationOptions {
            mtp: self.mtp,
            ngram: self.ngram,
            suffix: self.suffix,
            max_draft_len: self.max_draft_len,
            ..SpeculationOptions::OFF
        }
    }
}

impl Default for Speculation {
    fn default() -> Speculation {
        Speculation::DEFAULT
    }
}

/// Why a text names no drafters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpeculationError {
    /// A word that is no drafter.
    #[error("expected draft=MODEL, mtp, ngram or suffix, separated by commas, or off; found {0:?}")]
    Word(String),
    /// A draft model without a name.
    #[error("draft= needs a model, such as draft=qwen2.5-coder-0.5b")]
    NoModel,
    /// Two models that draft, or `off` and a drafter.
    #[error("{0} and {1} cannot be combined")]
    Contradiction(String, String),
}

impl FromStr for Speculation {
    type Err = SpeculationError;

    fn from_str(text: &str) -> Result<Speculation, SpeculationError> {
        let mut whole: Option<Speculation> = None;
        for word in text.split(',').map(str::trim) {
            let one = match (word, word.strip_prefix("draft=")) {
                ("off", _) => Speculation::OFF,
                ("mtp", _) => Speculation::OFF.mtp(),
                ("ngram", _) => Speculation::OFF.ngram(),
                ("suffix", _) => Speculation::OFF.suffix(),
                ("draft" | "draft=", _) => return Err(SpeculationError::NoModel),
                (_, Some(model)) => Speculation::OFF.draft_model(model.trim()),
                _ => return Err(SpeculationError::Word(word.to_owned())),
            };
            whole = Some(match whole {
                None => one,
                Some(before) => {
                    let error = || SpeculationError::Contradiction(before.to_string(), word.to_owned());
                    before.clone().and(one).ok_or_else(error)?
                }
            });
        }
        whole.ok_or_else(|| SpeculationError::Word(text.to_owned()))
    }
}

impl fmt::Display for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let draft = self.draft_model.as_ref().map(|path| format!("draft={}", path.display()));
        let lookup = [("mtp", self.mtp), ("ngram", self.ngram), ("suffix", self.suffix)];
        let lookup = lookup.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| name.to_owned());
        let words: Vec<String> = draft.into_iter().chain(lookup).collect();
        f.write_str(if words.is_empty() { "off".into() } else { words.join(",") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_drafters() {
        let read = |text: &str| text.parse::<Speculation>().map_err(|error| error.to_string());
        for text in
            ["off", "ngram", "suffix", "mtp", "mtp,ngram", "draft=a/b.gguf", "draft=owner/repo:Q4_K_M,ngram,suffix"]
        {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        assert_eq!(read(" suffix , ngram ").unwrap(), Speculation::OFF.ngram().suffix());
        assert_eq!(read("ngram,ngram").unwrap(), Speculation::OFF.ngram());
        assert_eq!(read("draft=x").unwrap().draft_path(), Some(&PathBuf::from("x")));
        let expected = "expected draft=MODEL, mtp, ngram or suffix, separated by commas, or off; found";
        assert_eq!(read("ngrams"), Err(format!("{expected} \"ngrams\"")));
        assert_eq!(read("ngram,,suffix"), Err(format!("{expected} \"\"")));
        assert_eq!(read("NGRAM"), Err(format!("{expected} \"NGRAM\"")));
        assert_eq!(read("off,ngram"), Err("off and ngram cannot be combined".into()));
        assert_eq!(read("ngram,draft=a,off"), Err("draft=a,ngram and off cannot be combined".into()));
        assert_eq!(read("draft=a,draft=b"), Err("draft=a and draft=b cannot be combined".into()));
        assert!(read("draft=").unwrap_err().starts_with("draft= needs a model"));
        assert!(read("ngram,draft").unwrap_err().starts_with("draft= needs a model"));
    }

    #[test]
    fn the_length_of_drafts_is_bounded() {
        let length = |speculation: &Speculation| speculation.options().max_draft_len;
        assert_eq!(length(&Speculation::DEFAULT), MAX_DRAFT_LEN);
        assert_eq!(length(&Speculation::OFF.max_draft_tokens(4)), 4);
        assert_eq!(length(&Speculation::OFF.max_draft_tokens(0)), 1);
        assert_eq!(length(&Speculation::OFF.max_draft_tokens(99)), MAX_DRAFT_LEN);
    }
}
