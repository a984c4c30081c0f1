//! Normalizers: how text is rewritten before it is cut into pieces.
//!
//! The rewrites that models use most have a plain version here; any other that a tokenizer.json names is done by the
//! `tokenizers` crate, which is also asked where a stretch of rewritten text came from.

use std::borrow::Cow;
use std::ops::Range;

use tokenizers::{NormalizedString, Normalizer as _, NormalizerWrapper};
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// One rewrite.
pub(crate) enum Rewrite {
    Nfc,
    Prepend(String),
    Replace {
        from: String,
        to: String,
    },
    /// SentencePiece's `remove_extra_whitespaces`: runs of spaces become one, none at the ends.
    SqueezeSpaces,
    Foreign(NormalizerWrapper),
}

/// The rewrites of a tokenizer, in order.
#[derive(Default)]
pub(crate) struct Normalizer {
    pub(crate) rewrites: Vec<Rewrite>,
    /// The same from the reference library, which keeps the origin of every byte; `None` where the file had none.
    pub(crate) traced: Option<NormalizerWrapper>,
}

/// The most that all replacements together may lengthen a text, each taken at its worst: known files stay below a hundred, and the bound
/// is what keeps a short text from becoming one that no memory holds.
pub(crate) const MAX_GROWTH: usize = 256;

impl Normalizer {
    pub(crate) fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut text = Cow::Borrowed(text);
        for rewrite in &self.rewrites {
            if let Some(changed) = rewrite.apply(&text) {
                text = Cow::Owned(changed);
            }
        }
        text
    }

    /// How many times shorter a text can become at most; `None` where there is no bound.
    pub(crate) fn max_shrink_factor(&self) -> Option<usize> {
        let each = |rewrite: &Rewrite| match rewrite {
            // Jamo compose to a third of their length; the worst is iota's other form with two accents, 7 bytes to 2.
            Rewrite::Nfc => Some(4),
            Rewrite::Prepend(_) => Some(1),
            Rewrite::Replace { from, to } => (to.len() >= from.len()).then_some(1),
            Rewrite::SqueezeSpaces | Rewrite::Foreign(_) => None,
        };
        self.rewrites.iter().try_fold(1, |whole: usize, rewrite| whole.checked_mul(each(rewrite)?))
    }

    /// The bytes of `text` that the bytes `at` of its normalized form came from; `None` when that cannot be told.
    pub(crate) fn origin(&self, text: &str, at: Range<usize>) -> Option<Range<usize>> {
        let mut normalized = NormalizedString::from(text);
        self.traced.as_ref()?.normalize(&mut normalized).ok()?;
        normalized.convert_offsets(tokenizers::tokenizer::normalizer::Range::Normalized(at))
    }
}

impl Rewrite {
    /// The rewritten text, or `None` when nothing changes.
    fn apply(&self, text: &str) -> Option<String> {
        match self {
            Rewrite::Nfc => {
                if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
                    return None;
                }
                Some(text.nfc().map(|(c, _)| c).collect())
            }
            Rewrite::Prepend(prefix) => (!text.is_empty()).then(|| format!("{prefix}{text}")),
            Rewrite::Replace { from, to } => text.contains(from.as_str()).then(|| text.replace(from.as_str(), to)),
            Rewrite::SqueezeSpaces => {
                let words: Vec<&str> = text.split(' ').filter(|word| !word.is_empty()).collect();
                Some(words.join(" "))
            }
            Rewrite::Foreign(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                // The reference ignores a failing normalizer as well; it fails only on its own inconsistencies.
                normalizer.normalize(&mut normalized).ok()?;
                Some(normalized.get().to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewrites_in_order() {
        let normalizer = Normalizer {
            rewrites: vec![
                Rewrite::Nfc,
                Rewrite::Prepend("▁".into()),
                Rewrite::Replace { from: " ".into(), to: "▁".into() },
            ],
            traced: None,
        };
        assert_eq!(normalizer.apply("e\u{301} x"), "▁é▁x");
        assert_eq!(normalizer.apply(""), "");
        assert_eq!(Rewrite::SqueezeSpaces.apply("  a   b ").unwrap(), "a b");
    }
}
