//! Normalizers: rewrites of the text before it is split into pieces.
//!
//! The rewrites that most models use are implemented here. All others run in the `tokenizers` crate, which also traces
//! normalized text back to the original bytes.

use std::borrow::Cow;
use std::ops::Range;

use crate::algorithms::pattern::Pattern;
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
    /// Every match of `pattern` becomes `to`.
    ReplacePattern {
        pattern: Pattern,
        to: String,
    },
    /// SentencePiece's `remove_extra_whitespaces`: a run of spaces becomes one, and spaces at both ends are removed.
    SqueezeSpaces,
    /// A normalizer that only the `tokenizers` crate implements.
    Foreign(NormalizerWrapper),
}

/// The rewrites of a tokenizer, in order.
#[derive(Default)]
pub(crate) struct Normalizer {
    pub(crate) rewrites: Vec<Rewrite>,
    /// The rewrites as steps of the `tokenizers` crate, which keeps the origin of every byte; `None` for GGUF files.
    pub(crate) traced: Option<Vec<TracedRewrite>>,
}

/// A rewrite that the `tokenizers` crate applies.
pub(crate) enum TracedRewrite {
    Reference(NormalizerWrapper),
    /// With a pattern of this crate: the reference would match it with backtracking.
    ReplacePattern {
        pattern: Pattern,
        to: String,
    },
}

impl TracedRewrite {
    fn apply(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        match self {
            TracedRewrite::Reference(normalizer) => normalizer.normalize(text),
            TracedRewrite::ReplacePattern { pattern, to } => text.replace(pattern, to),
        }
    }
}

/// Maximum factor by which all replacements together may lengthen a text. Known files stay below 100. Without a bound,
/// a model file could turn a short text into one that exhausts memory.
pub(crate) const MAX_GROWTH: usize = 256;

impl Normalizer {
    /// Returns the normalized text.
    pub(crate) fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut text = Cow::Borrowed(text);
        for rewrite in &self.rewrites {
            if let Some(changed) = rewrite.apply(&text) {
                text = Cow::Owned(changed);
            }
        }
        text
    }

    /// Returns the maximum factor by which normalization shortens a text; `None` if there is no bound.
    pub(crate) fn max_shrink_factor(&self) -> Option<usize> {
        let each = |rewrite: &Rewrite| match rewrite {
            // Jamo compose to a third of their length. The worst case is U+1FBE with two accents: 7 bytes become 2.
            Rewrite::Nfc => Some(4),
            Rewrite::Prepend(_) => Some(1),
            Rewrite::Replace { from, to } => (to.len() >= from.len()).then_some(1),
            Rewrite::ReplacePattern { .. } | Rewrite::SqueezeSpaces | Rewrite::Foreign(_) => None,
        };
        self.rewrites.iter().try_fold(1, |whole: usize, rewrite| whole.checked_mul(each(rewrite)?))
    }

    /// Normalizes a text and keeps where each byte came from.
    pub(crate) fn origins(&self, text: &str) -> Origins {
        let mut normalized = NormalizedString::from(text);
        let rewrites = self.traced.as_ref();
        let applied = rewrites.map(|list| list.iter().try_for_each(|rewrite| rewrite.apply(&mut normalized)));
        Origins(applied.is_some_and(|result| result.is_ok()).then_some(normalized))
    }
}

/// The bytes of a text from which each byte of its normalized form came.
pub(crate) struct Origins(Option<NormalizedString>);

impl Origins {
    /// Returns the bytes of the text from which the bytes `at` of its normalized form came; `None` if they are unknown.
    pub(crate) fn of(&self, at: Range<usize>) -> Option<Range<usize>> {
        self.0.as_ref()?.convert_offsets(tokenizers::tokenizer::normalizer::Range::Normalized(at))
    }
}

impl Rewrite {
    /// Returns the rewritten text, or `None` if nothing changes.
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
            Rewrite::ReplacePattern { pattern, to } => {
                let mut rewritten = String::new();
                let mut copied = 0;
                pattern.for_each_match(text, &mut |found| {
                    rewritten.push_str(&text[copied..found.start]);
                    rewritten.push_str(to);
                    copied = found.end;
                });
                rewritten.push_str(&text[copied..]);
                Some(rewritten)
            }
            Rewrite::SqueezeSpaces => {
                let words: Vec<&str> = text.split(' ').filter(|word| !word.is_empty()).collect();
                Some(words.join(" "))
            }
            Rewrite::Foreign(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                // The reference ignores a failing normalizer too; it fails only on internal inconsistencies.
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
    fn rewrites_apply_in_order() {
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
