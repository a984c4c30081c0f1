//! Upper and lower case. Every changed character keeps the origin of the one it came from.

use crate::chat::jinja::failure::Outcome;
use crate::chat::jinja::text::{Text, TextBuilder};

/// A change of case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    Upper,
    Lower,
    /// Python's `str.title`: the first letter of each run of letters.
    Title,
    /// Jinja's filter `title`: the first character after white space, a hyphen or an opening bracket.
    Words,
    Capitalize,
    Swap,
}

/// Appends the text with its case changed.
pub(super) fn change_case(text: &Text, case: Case, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    let mut begins = true;
    let mut result = Ok(());
    let chars = text.str();
    let mut offset = 0;
    text.for_each_part(|part, trusted| {
        if result.is_err() {
            return;
        }
        let mut changed = String::with_capacity(part.len());
        for (at, c) in part.char_indices() {
            let upper = match case {
                Case::Upper => true,
                Case::Lower => false,
                Case::Swap => c.is_lowercase(),
                Case::Title | Case::Words | Case::Capitalize => begins,
            };
            begins = match case {
                Case::Title => !c.is_alphabetic(),
                Case::Words => c.is_whitespace() || matches!(c, '-' | '(' | '{' | '[' | '<'),
                _ => false,
            };
            if upper {
                changed.extend(c.to_uppercase());
            } else if c == 'Σ' && is_final(&chars, offset + at) {
                changed.push('ς');
            } else {
                changed.extend(c.to_lowercase());
            }
        }
        offset += part.len();
        result = out.push(&changed, trusted);
    });
    result
}

/// Whether a capital sigma ends a word: a letter before it and none after it.
fn is_final(text: &str, at: usize) -> bool {
    let is_letter = |c: char| c.is_lowercase() || c.is_uppercase();
    let is_ignored = |c: &char| matches!(c, '\'' | '.' | ':' | '\u{AD}' | '\u{2019}');
    let before = text[..at].chars().rev().find(|c| !is_ignored(c)).is_some_and(is_letter);
    let after = text[at + 'Σ'.len_utf8()..].chars().find(|c| !is_ignored(c)).is_some_and(is_letter);
    before && !after
}
