//! Normalizers: rewrites of the text before it is split into pieces.
//!
//! The rewrites are those of the reference library (the `tokenizers` crate), with the same tables of Unicode. Text that
//! a rewrite does not change is borrowed. The file loaders choose the rewrites; the tokenizer applies them.

mod character_map;
mod rewritten;

use std::borrow::Cow;
use std::collections::TryReserveError;
use std::ops::Range;

use crate::algorithms::pattern::Pattern;
use crate::algorithms::reference_classes::{CharRanges, controls};
pub(crate) use character_map::CharacterMap;
use rewritten::{Origin, Rewritten, covered};
use unicode_normalization_alignments::char::is_combining_mark;
use unicode_normalization_alignments::{
    IsNormalized, UnicodeNormalization, is_nfc_quick, is_nfd_quick, is_nfkc_quick, is_nfkd_quick,
};
use unicode_segmentation::UnicodeSegmentation;

/// One rewrite.
#[derive(Debug)]
pub(crate) enum Rewrite {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
    Lowercase,
    /// Combining marks are removed (`StripAccents`).
    RemoveMarks,
    /// The characters of a set are removed.
    Remove(&'static CharRanges),
    /// White space at the ends is removed.
    Strip {
        left: bool,
        right: bool,
    },
    /// SentencePiece's cleaning for machine translation: control characters are removed, line ends and marks of width
    /// zero become spaces.
    Nmt,
    /// The first step of `BertNormalizer`: control characters are removed, white space becomes spaces.
    CleanText,
    /// Spaces are inserted around Chinese characters.
    SpaceChinese,
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
    /// SentencePiece's own table of replacements.
    Map(CharacterMap),
    /// SentencePiece's `remove_extra_whitespaces`: a run of spaces becomes one, and spaces at both ends are removed.
    SqueezeSpaces,
}

/// The rewrites of a tokenizer, in order.
#[derive(Debug, Default)]
pub(crate) struct Normalizer {
    pub(crate) rewrites: Vec<Rewrite>,
}

/// Maximum factor by which all replacements together may lengthen a text. Known files stay below 100. Without a bound,
/// a model file could turn a short text into one that exhausts memory.
pub(crate) const MAX_GROWTH: usize = 256;

impl Normalizer {
    /// Returns the normalized text. Fails if there is no memory for it.
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
            Rewrite::Prepend(_) | Rewrite::SpaceChinese => Some(1),
            Rewrite::Replace { from, to } => (to.len() >= from.len()).then_some(1),
            _ => None,
        };
        self.rewrites.iter().try_fold(1, |whole: usize, rewrite| whole.checked_mul(each(rewrite)?))
    }

    /// Normalizes a text and returns where each byte came from.
    pub(crate) fn origins(&self, text: &str) -> Origins {
        Origins(self.trace(text).ok())
    }

    fn trace(&self, text: &str) -> Result<Vec<Origin>, TryReserveError> {
        let mut origins = Vec::new();
        origins.try_reserve(text.len())?;
        for (at, c) in text.char_indices() {
            origins.extend(std::iter::repeat_n(at..at + c.len_utf8(), c.len_utf8()));
        }
        let mut text = Cow::Borrowed(text);
        for rewrite in &self.rewrites {
            let mut rewritten = Rewritten::traced(&text, &origins);
            rewrite.write(&text, &mut rewritten);
            let (changed, after) = rewritten.finish()?;
            origins = after;
            if let Some(changed) = changed {
                text = Cow::Owned(changed);
            }
        }
        Ok(origins)
    }
}

/// The bytes of a text from which each byte of its normalized form came.
pub(crate) struct Origins(Option<Vec<Origin>>);

impl Origins {
    /// Returns the bytes of the text from which the bytes `at` of its normalized form came; `None` if they are unknown,
    /// because there was no memory for them.
    pub(crate) fn of(&self, at: Range<usize>) -> Option<Range<usize>> {
        self.0.as_ref().map(|origins| covered(origins, at))
    }
}

impl Rewrite {
    /// Returns the rewritten text, or `None` if nothing changes.
    fn apply(&self, text: &str) -> Result<Option<String>, TryReserveError> {
        if self.is_idle(text) {
            return Ok(None);
        }
        let mut rewritten = Rewritten::new(text);
        self.write(text, &mut rewritten);
        Ok(rewritten.finish()?.0)
    }

    /// Whether a quick look shows that nothing changes.
    fn is_idle(&self, text: &str) -> bool {
        match self {
            Rewrite::Nfc => text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes,
            Rewrite::Nfd => text.is_ascii() || is_nfd_quick(text.chars()) == IsNormalized::Yes,
            Rewrite::Nfkc => text.is_ascii() || is_nfkc_quick(text.chars()) == IsNormalized::Yes,
            Rewrite::Nfkd => text.is_ascii() || is_nfkd_quick(text.chars()) == IsNormalized::Yes,
            Rewrite::RemoveMarks | Rewrite::SpaceChinese => text.is_ascii(),
            Rewrite::Prepend(_) => text.is_empty(),
            _ => false,
        }
    }

    /// Writes the rewritten text.
    fn write(&self, text: &str, out: &mut Rewritten<'_>) {
        match self {
            Rewrite::Nfc => put_aligned(text, text.nfc(), out),
            Rewrite::Nfd => put_aligned(text, text.nfd(), out),
            Rewrite::Nfkc => put_aligned(text, text.nfkc(), out),
            Rewrite::Nfkd => put_aligned(text, text.nfkd(), out),
            Rewrite::Lowercase => for_each_char(text, |c, at| {
                c.to_lowercase().for_each(|lower| out.put_char(lower, at.clone()));
            }),
            Rewrite::RemoveMarks => replace_chars(text, out, |c| (!is_combining_mark(c)).then_some(c)),
            Rewrite::Remove(set) => replace_chars(text, out, |c| (!set.contains(c)).then_some(c)),
            Rewrite::Strip { left, right } => {
                let start = if *left { text.len() - text.trim_start().len() } else { 0 };
                let kept = if *right { text[start..].trim_end().len() } else { text.len() - start };
                out.keep(start..start + kept);
            }
            Rewrite::Nmt => replace_chars(text, out, nmt),
            Rewrite::CleanText => {
                let controls = controls();
                replace_chars(text, out, |c| match c {
                    '\t' | '\n' | '\r' => Some(' '),
                    '\0' | '\u{FFFD}' => None,
                    c if controls.contains(c) => None,
                    c if c.is_whitespace() => Some(' '),
                    c => Some(c),
                });
            }
            Rewrite::SpaceChinese => for_each_char(text, |c, at| {
                let (start, end) = (at.start, at.end);
                let is_chinese = is_chinese(c);
                if is_chinese {
                    out.put(" ", start..start);
                }
                out.keep(at);
                if is_chinese {
                    out.put(" ", end..end);
                }
            }),
            Rewrite::Prepend(_) if text.is_empty() => {}
            Rewrite::Prepend(prefix) => {
                out.put(prefix, 0..0);
                out.keep(0..text.len());
            }
            Rewrite::Replace { from, to } => {
                let mut copied = 0;
                for (at, found) in text.match_indices(from.as_str()) {
                    out.keep(copied..at);
                    copied = at + found.len();
                    out.put(to, at..copied);
                }
                out.keep(copied..text.len());
            }
            Rewrite::ReplacePattern { pattern, to } => {
                let mut copied = 0;
                pattern.for_each_match(text, &mut |found| {
                    out.keep(copied..found.start);
                    copied = found.end;
                    out.put(to, found);
                });
                out.keep(copied..text.len());
            }
            Rewrite::Map(map) => put_mapped(map, text, out),
            Rewrite::SqueezeSpaces => {
                let mut end_of_last = None;
                let mut start = 0;
                for word in text.split(' ') {
                    if !word.is_empty() {
                        if let Some(end) = end_of_last {
                            out.put(" ", end..start);
                        }
                        out.keep(start..start + word.len());
                        end_of_last = Some(start + word.len());
                    }
                    start += word.len() + 1;
                }
            }
        }
    }
}

fn for_each_char(text: &str, mut each: impl FnMut(char, Range<usize>)) {
    text.char_indices().for_each(|(at, c)| each(c, at..at + c.len_utf8()));
}

/// Replaces each character, or removes it where there is no replacement.
fn replace_chars(text: &str, out: &mut Rewritten<'_>, replacement: impl Fn(char) -> Option<char>) {
    for_each_char(text, |c, at| match replacement(c) {
        Some(same) if same == c => out.keep(at),
        Some(other) => out.put_char(other, at),
        None => {}
    });
}

/// Writes characters with their changes in number: 1 for an additional character, -N for one that also stands for the
/// N characters after it.
fn put_aligned(text: &str, normalized: impl Iterator<Item = (char, isize)>, out: &mut Rewritten<'_>) {
    let mut source = text.chars();
    let mut from = 0..0;
    for (c, change) in normalized {
        if change <= 0 {
            let start = text.len() - source.as_str().len();
            // One character, and those that it absorbed.
            source.nth(change.unsigned_abs());
            from = start..text.len() - source.as_str().len();
        }
        out.put_char(c, from.clone());
    }
}

/// Replaces user-perceived characters of less than six bytes, and the characters of others. This is how the reference
/// reads a character map; SentencePiece itself takes the longest entry at each place.
fn put_mapped(map: &CharacterMap, text: &str, out: &mut Rewritten<'_>) {
    for (start, cluster) in text.grapheme_indices(true) {
        if cluster.len() < 6
            && let Some(replacement) = map.replacement(cluster)
        {
            out.put(replacement, start..start + cluster.len());
            continue;
        }
        for_each_char(cluster, |c, at| {
            let replacement = map.replacement(&cluster[at.clone()]);
            let at = start + at.start..start + at.end;
            match replacement {
                Some(replacement) => out.put(replacement, at),
                None => out.put_char(c, at),
            }
        });
    }
}

fn nmt(c: char) -> Option<char> {
    match c {
        '\u{1}'..='\u{8}' | '\u{B}' | '\u{E}'..='\u{1F}' | '\u{7F}' | '\u{8F}' | '\u{9F}' => None,
        '\t' | '\n' | '\u{C}' | '\r' | '\u{1680}' | '\u{200B}'..='\u{200F}' | '\u{2028}' | '\u{2029}' | '\u{2581}' => {
            Some(' ')
        }
        '\u{FEFF}' | '\u{FFFD}' => Some(' '),
        c => Some(c),
    }
}

/// Whether BERT's tokenizers put spaces around a character: the blocks of Chinese characters that it knows.
fn is_chinese(c: char) -> bool {
    matches!(c,
        '\u{4E00}'..='\u{9FFF}' | '\u{3400}'..='\u{4DBF}' | '\u{20000}'..='\u{2A6DF}' | '\u{2A700}'..='\u{2B73F}'
        | '\u{2B740}'..='\u{2B81F}' | '\u{2B920}'..='\u{2CEAF}' | '\u{F900}'..='\u{FAFF}' | '\u{2F800}'..='\u{2FA1F}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalizer() -> Normalizer {
        let replace = Rewrite::Replace { from: " ".into(), to: "▁".into() };
        Normalizer { rewrites: vec![Rewrite::Nfc, Rewrite::Prepend("▁".into()), replace] }
    }

    #[test]
    fn rewrites_apply_in_order() {
        assert_eq!(normalizer().apply("e\u{301} x").unwrap(), "▁é▁x");
        assert_eq!(normalizer().apply("").unwrap(), "");
        assert_eq!(Rewrite::SqueezeSpaces.apply("  a   b ").unwrap().unwrap(), "a b");
    }

    #[test]
    fn text_that_does_not_change_is_borrowed() {
        let all = [
            Rewrite::Nfc,
            Rewrite::Nfkd,
            Rewrite::Lowercase,
            Rewrite::RemoveMarks,
            Rewrite::Strip { left: true, right: true },
            Rewrite::Nmt,
            Rewrite::CleanText,
            Rewrite::SpaceChinese,
            Rewrite::Replace { from: "q".into(), to: "y".into() },
            Rewrite::SqueezeSpaces,
        ];
        let normalizer = Normalizer { rewrites: all.into() };
        assert!(matches!(normalizer.apply("a text, и текст").unwrap(), Cow::Borrowed(_)));
    }

    #[test]
    fn normalized_bytes_are_traced_back() {
        let origins = normalizer().origins("e\u{301} x");
        // The inserted mark comes from no byte, the composed character from both of its parts.
        let expected = [(0..3, 0..0), (3..5, 0..3), (5..8, 3..4), (8..9, 4..5), (0..9, 0..5), (9..9, 5..5)];
        for (at, origin) in expected {
            assert_eq!(origins.of(at.clone()), Some(origin), "{at:?}");
        }
        let shortened = Normalizer { rewrites: vec![Rewrite::Strip { left: true, right: true }, Rewrite::Lowercase] };
        assert_eq!(shortened.origins("  İa ").of(0..3), Some(2..4));
        assert_eq!(shortened.origins("  İa ").of(3..4), Some(4..5));
    }
}
