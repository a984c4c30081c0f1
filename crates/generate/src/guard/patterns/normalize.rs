//! The form in which characters are compared: Unicode's compatibility form (NFKC) of each character by itself, without
//! invisible characters.
//!
//! A full-width or mathematical letter is compared as the letter, a ligature as its letters, and a word with zero-width
//! characters inside as the word. A letter followed by a combining mark is not joined with it: what a letter is would
//! then depend on the next token, and every token would have to wait for the one behind it.

use unicode_normalization_alignments::UnicodeNormalization;

/// Returns the characters as which `character` is compared; none if it is invisible.
pub(super) fn normalized(character: char) -> impl Iterator<Item = char> {
    let wide = (!character.is_ascii() && !is_invisible(character)).then_some(character);
    let narrow = character.is_ascii().then_some(character);
    narrow.into_iter().chain(wide.into_iter().nfkc().map(|(form, _)| form))
}

/// Whether a character has the property `Default_Ignorable_Code_Point`.
fn is_invisible(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use regex_syntax::hir::{Class, HirKind};

    use super::*;

    #[test]
    fn invisible_characters_are_those_of_unicode() {
        let hir = regex_syntax::parse(r"\p{Default_Ignorable_Code_Point}").unwrap();
        let HirKind::Class(Class::Unicode(class)) = hir.kind() else { panic!("{hir:?}") };
        let listed = |c: char| class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&c));
        let differing: Vec<char> = ('\0'..=char::MAX).filter(|&c| listed(c) != is_invisible(c)).collect();
        assert!(differing.is_empty(), "{differing:?}");
    }

    #[test]
    fn compatibility_forms() {
        for (text, form) in
            [("ｋｉｌｌ", "kill"), ("𝐤ill", "kill"), ("ﬁre", "fire"), ("k\u{200b}ill", "kill"), ("é", "é")]
        {
            assert_eq!(text.chars().flat_map(normalized).collect::<String>(), form);
        }
    }
}
