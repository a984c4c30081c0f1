//! Unicode general categories as one byte of flags per character, for the hand-written pre-tokenizers.
//!
//! The flags come from the tables of `regex-syntax`, which the regular expressions use too, so a scanner and its
//! pattern cannot disagree about a character.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`
pub(crate) const LETTER: u8 = 1;
/// `\p{N}`
pub(crate) const NUMBER: u8 = 2;
/// `\s`
pub(crate) const SPACE: u8 = 4;
/// `\p{M}`
pub(crate) const MARK: u8 = 8;
/// `\p{P}`
pub(crate) const PUNCTUATION: u8 = 16;
/// `\p{S}`
pub(crate) const SYMBOL: u8 = 32;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`: characters of the upper-case part of a word.
pub(crate) const UPPER_PART: u8 = 64;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`: characters of the lower-case part of a word.
pub(crate) const LOWER_PART: u8 = 128;

const CLASSES: [(u8, &str); 8] = [
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (SPACE, r"\s"),
    (MARK, r"\p{M}"),
    (PUNCTUATION, r"\p{P}"),
    (SYMBOL, r"\p{S}"),
    (UPPER_PART, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
    (LOWER_PART, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
];

/// One byte of flags for each code point: 1.1 MB, built on first use in about a millisecond.
pub(crate) struct Categories {
    flags: Box<[u8]>,
}

impl Categories {
    pub(crate) fn get() -> &'static Categories {
        static TABLE: OnceLock<Categories> = OnceLock::new();
        TABLE.get_or_init(Categories::build)
    }

    fn build() -> Categories {
        let mut flags = vec![0u8; char::MAX as usize + 1].into_boxed_slice();
        for (flag, pattern) in CLASSES {
            let hir = regex_syntax::parse(pattern).expect("a constant pattern");
            let HirKind::Class(Class::Unicode(class)) = hir.kind() else { unreachable!("{pattern} is a class") };
            for range in class.ranges() {
                for point in range.start() as usize..=range.end() as usize {
                    flags[point] |= flag;
                }
            }
        }
        Categories { flags }
    }

    #[inline]
    pub(crate) fn of(&self, c: char) -> u8 {
        self.flags[c as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn well_known_characters_have_their_categories() {
        let table = Categories::get();
        assert_eq!(table.of('a'), LETTER | LOWER_PART);
        assert_eq!(table.of('A'), LETTER | UPPER_PART);
        assert_eq!(table.of('中'), LETTER | UPPER_PART | LOWER_PART);
        assert_eq!(table.of('7'), NUMBER);
        assert_eq!(table.of('½'), NUMBER);
        assert_eq!(table.of('\u{301}'), MARK | UPPER_PART | LOWER_PART);
        assert_eq!(table.of('\u{3000}'), SPACE);
        assert_eq!(table.of('\u{85}'), SPACE);
        assert_eq!(table.of('!'), PUNCTUATION);
        assert_eq!(table.of('€'), SYMBOL);
        assert_eq!(table.of('\0'), 0);
        assert_eq!(table.of(char::MAX), 0);
    }
}
