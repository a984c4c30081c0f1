//! Normalizers: rewrites of the text before it is split into pieces.
//!
//! The rewrites that most models use are implemented here. All others run in the `tokenizers` crate, which also traces
//! normalized text back to the original bytes.

use std::borrow::Cow;
use std::collections::TryReserveError;
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
    /// Returns the normalized text. Fails if there is no memory for it; rewrites that run in the `tokenizers` crate end
    /// the process then.
    pub(crate) fn apply<'t>(&self, text: &'t str) -> Result<Cow<'t, str>, TryReserveError> {
        let mut text = Cow::Borrowed(text);
        for rewrite in &self.rewrites {
            if let Some(changed) = rewrite.apply(&text)? {
                text = Cow::Owned(changed);
            }
        }
        Ok(text)
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
    fn apply(&self, text: &str) -> Result<Option<String>, TryReserveError> {
        let mut rewritten = String::new();
        match self {
            Rewrite::Nfc => {
                if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
                    return Ok(None);
                }
                rewritten.try_reserve(text.len())?;
                for (c, _) in text.nfc() {
                    rewritten.try_reserve(c.len_utf8())?;
                    rewritten.push(c);
                }
            }
            Rewrite::Prepend(_) if text.is_empty() => return Ok(None),
            Rewrite::Prepend(prefix) => {
                rewritten.try_reserve(prefix.len() + text.len())?;
                rewritten.push_str(prefix);
                rewritten.push_str(text);
            }
            Rewrite::Replace { from, to } => {
                if !text.contains(from.as_str()) {
                    return Ok(None);
                }
                let mut copied = 0;
                rewritten.try_reserve(text.len())?;
                for (at, found) in text.match_indices(from.as_str()) {
                    append(&mut rewritten, [&text[copied..at], to])?;
                    copied = at + found.len();
                }
                append(&mut rewritten, [&text[copied..]])?;
            }
            Rewrite::ReplacePattern { pattern, to } => {
                let mut copied = 0;
                let mut result = rewritten.try_reserve(text.len());
                pattern.for_each_match(text, &mut |found| {
                    if result.is_ok() {
                        result = append(&mut rewritten, [&text[copied..found.start], to]);
                    }
                    copied = found.end;
                });
                result?;
                append(&mut rewritten, [&text[copied..]])?;
            }
            Rewrite::SqueezeSpaces => {
                rewritten.try_reserve(text.len())?;
                for word in text.split(' ').filter(|word| !word.is_empty()) {
                    if !rewritten.is_empty() {
                        rewritten.push(' ');
                    }
                    rewritten.push_str(word);
                }
            }
            Rewrite::Foreign(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                // The reference ignores a failing normalizer too; it fails only on internal inconsistencies.
                return Ok(normalizer.normalize(&mut normalized).is_ok().then(|| normalized.get().to_owned()));
            }
        }
        Ok(Some(rewritten))
    }
}

/// Appends texts; fails if there is no memory for them.
fn append<const N: usize>(text: &mut String, more: [&str; N]) -> Result<(), TryReserveError> {
    text.try_reserve(more.iter().map(|part| part.len()).sum())?;
    more.iter().for_each(|part| text.push_str(part));
    Ok(())
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
        assert_eq!(normalizer.apply("e\u{301} x").unwrap(), "▁é▁x");
        assert_eq!(normalizer.apply("").unwrap(), "");
        assert_eq!(Rewrite::SqueezeSpaces.apply("  a   b ").unwrap().unwrap(), "a b");
    }
}
