//! Hand-written scanners for the pre-tokenizer patterns that most models use.
//!
//! With a backtracking regular-expression engine, these patterns take most of the tokenizer's time; the scanners split
//! the same way in one pass. Each function is one alternation, with its alternatives in order. The tests in the parent
//! module compare every scanner with its pattern on random text.

use crate::unicode_categories::{Categories, LETTER, LOWER_PART, MARK, NUMBER, PUNCTUATION, SPACE, SYMBOL, UPPER_PART};

/// A character at a byte position, with its categories.
#[derive(Clone, Copy)]
struct CharInfo {
    c: char,
    flags: u8,
    len: usize,
}

/// A text with category lookups by byte position.
struct Text<'t> {
    text: &'t str,
    categories: &'static Categories,
}

impl<'t> Text<'t> {
    fn new(text: &'t str) -> Self {
        Text { text, categories: Categories::get() }
    }

    #[inline]
    fn char_at(&self, at: usize) -> Option<CharInfo> {
        let byte = *self.text.as_bytes().get(at)?;
        let c = if byte < 0x80 { byte as char } else { self.text[at..].chars().next()? };
        Some(CharInfo { c, flags: self.categories.of(c), len: c.len_utf8() })
    }

    /// Returns the end of the run of characters from `at` that satisfy `keep`.
    #[inline]
    fn run(&self, mut at: usize, keep: impl Fn(CharInfo) -> bool) -> usize {
        while let Some(info) = self.char_at(at) {
            if !keep(info) {
                break;
            }
            at += info.len;
        }
        at
    }

    /// Like [`Text::run`], for at most `count` characters.
    #[inline]
    fn run_up_to(&self, mut at: usize, count: usize, keep: impl Fn(CharInfo) -> bool) -> usize {
        for _ in 0..count {
            match self.char_at(at) {
                Some(info) if keep(info) => at += info.len,
                _ => break,
            }
        }
        at
    }

    /// Returns the end of `'s|'t|'re|'ve|'m|'ll|'d` at `at`, or `None`.
    /// With `ignore_case`, U+017F (long s) matches `s`, as in Unicode case folding.
    fn contraction(&self, at: usize, ignore_case: bool) -> Option<usize> {
        let fold = |c: char| match c {
            'ſ' if ignore_case => 's',
            c if ignore_case => c.to_ascii_lowercase(),
            c => c,
        };
        if self.char_at(at)?.c != '\'' {
            return None;
        }
        let first = self.char_at(at + 1)?;
        let end = at + 1 + first.len;
        let second = || self.char_at(end).map(|info| fold(info.c));
        match fold(first.c) {
            's' | 't' | 'm' | 'd' => Some(end),
            'r' | 'v' if second() == Some('e') => Some(end + 1),
            'l' if second() == Some('l') => Some(end + 1),
            _ => None,
        }
    }

    /// Returns the end of `\s+(?!\S)|\s+` at `at`, which must be white space: the last space of a run goes to the next
    /// word.
    fn spaces(&self, at: usize) -> usize {
        let mut end = at;
        let mut last = at;
        while let Some(info) = self.char_at(end) {
            if info.flags & SPACE == 0 {
                // A word follows: all white space but the last character, unless there is only one.
                return if last > at { last } else { end };
            }
            last = end;
            end += info.len;
        }
        end
    }

    /// Returns the end of `\s*[\r\n]+` at `at`: after the last line break of the white space, or `None` without one.
    fn line_breaks(&self, at: usize) -> Option<usize> {
        let mut end = at;
        let mut after_break = None;
        while let Some(info) = self.char_at(end) {
            if info.flags & SPACE == 0 {
                break;
            }
            end += info.len;
            if is_line_break(info) {
                after_break = Some(end);
            }
        }
        after_break
    }
}

fn is_line_break(info: CharInfo) -> bool {
    info.c == '\r' || info.c == '\n'
}

/// Whether a character is neither white space nor a letter nor a number.
fn is_other(info: CharInfo) -> bool {
    info.flags & (SPACE | LETTER | NUMBER) == 0
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
pub(super) fn gpt2<'t>(text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let scan = Text::new(text);
    let mut at = 0;
    while let Some(info) = scan.char_at(at) {
        let end = gpt2_word(&scan, at, info);
        emit(&text[at..end]);
        at = end;
    }
}

fn gpt2_word(scan: &Text<'_>, at: usize, info: CharInfo) -> usize {
    if let Some(end) = scan.contraction(at, false) {
        return end;
    }
    let (start, first) = match info.c {
        ' ' => match scan.char_at(at + 1) {
            Some(next) => (at + 1, next),
            None => return at + 1,
        },
        _ => (at, info),
    };
    if first.flags & LETTER != 0 {
        scan.run(start, |l| l.flags & LETTER != 0)
    } else if first.flags & NUMBER != 0 {
        scan.run(start, |l| l.flags & NUMBER != 0)
    } else if is_other(first) {
        scan.run(start, is_other)
    } else {
        scan.spaces(at)
    }
}

/// The family of Llama 3. The alternatives of its pattern, in order:
///
/// ```text
/// (?i:'s|'t|'re|'ve|'m|'ll|'d)
/// [^\r\n\p{L}\p{N}]?\p{L}+
/// \p{N}{1,D}                   with D = digits
///  ?[^\s\p{L}\p{N}]+[\r\n]*
/// \s*[\r\n]+
/// \s+(?!\S)
/// \s+
/// ```
///
/// With `marks`, `\p{L}+` is `[\p{L}\p{M}]+` and the fourth alternative excludes `\p{M}`.
pub(super) fn words<'t>(text: &'t str, digits: usize, marks: bool, emit: &mut dyn FnMut(&'t str)) {
    let scan = Text::new(text);
    let letters = if marks { LETTER | MARK } else { LETTER };
    let mut at = 0;
    while let Some(info) = scan.char_at(at) {
        let end = words_word(&scan, at, info, digits, letters);
        emit(&text[at..end]);
        at = end;
    }
}

fn words_word(scan: &Text<'_>, at: usize, info: CharInfo, digits: usize, letters: u8) -> usize {
    if let Some(end) = scan.contraction(at, true) {
        return end;
    }
    let is_letter = |l: CharInfo| l.flags & letters != 0;
    if is_letter(info) {
        return scan.run(at, is_letter);
    }
    if info.flags & NUMBER != 0 {
        return scan.run_up_to(at, digits, |l| l.flags & NUMBER != 0);
    }
    let next = scan.char_at(at + info.len);
    if !is_line_break(info) && next.is_some_and(is_letter) {
        return scan.run(at + info.len, is_letter);
    }
    let is_symbol = |l: CharInfo| is_other(l) && l.flags & letters == 0;
    if is_symbol(info) || (info.c == ' ' && next.is_some_and(is_symbol)) {
        let end = scan.run(at + info.len, is_symbol);
        return scan.run(end, is_line_break);
    }
    scan.line_breaks(at).unwrap_or_else(|| scan.spaces(at))
}

/// The family of GPT-4o and Tekken, whose words end where lower case changes to upper case:
/// `P?U*L+C?|P?U+L*C?|\p{N}{1,D}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+` with
/// `P = [^\r\n\p{L}\p{N}]`, `U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`, `L = [\p{Ll}\p{Lm}\p{Lo}\p{M}]` and
/// `C = (?i:'s|'t|'re|'ve|'m|'ll|'d)` if `contractions` stay with their word.
pub(super) fn cased<'t>(text: &'t str, digits: usize, contractions: bool, emit: &mut dyn FnMut(&'t str)) {
    let scan = Text::new(text);
    let mut at = 0;
    while let Some(info) = scan.char_at(at) {
        let end = cased_word(&scan, at, info, digits, contractions);
        emit(&text[at..end]);
        at = end;
    }
}

fn cased_word(scan: &Text<'_>, at: usize, info: CharInfo, digits: usize, contractions: bool) -> usize {
    let can_lead = !is_line_break(info) && info.flags & (LETTER | NUMBER) == 0;
    // The optional leading character is greedy: try with it, then without.
    let starts = [can_lead.then_some(at + info.len), Some(at)];
    let word = starts
        .iter()
        .flatten()
        .find_map(|&start| cased_lower_end(scan, start))
        .or_else(|| starts.iter().flatten().find_map(|&start| cased_upper_end(scan, start)));
    if let Some(end) = word {
        return if contractions { scan.contraction(end, true).unwrap_or(end) } else { end };
    }
    if info.flags & NUMBER != 0 {
        return scan.run_up_to(at, digits, |l| l.flags & NUMBER != 0);
    }
    if is_other(info) || (info.c == ' ' && scan.char_at(at + 1).is_some_and(is_other)) {
        let end = scan.run(at + info.len, is_other);
        return scan.run(end, |l| is_line_break(l) || l.c == '/');
    }
    scan.line_breaks(at).unwrap_or_else(|| scan.spaces(at))
}

/// `U*L+`: the upper part is greedy. If no lower part follows, it backtracks to its last character that may also be
/// part of the lower part (letters without case, marks).
fn cased_lower_end(scan: &Text<'_>, start: usize) -> Option<usize> {
    let mut upper_end = start;
    let mut given_back = None;
    while let Some(info) = scan.char_at(upper_end) {
        if info.flags & UPPER_PART == 0 {
            break;
        }
        upper_end += info.len;
        if info.flags & LOWER_PART != 0 {
            given_back = Some(upper_end);
        }
    }
    let end = scan.run(upper_end, |l| l.flags & LOWER_PART != 0);
    if end > upper_end { Some(end) } else { given_back }
}

/// `U+L*`, tried only if `U*L+` failed.
fn cased_upper_end(scan: &Text<'_>, start: usize) -> Option<usize> {
    let upper_end = scan.run(start, |l| l.flags & UPPER_PART != 0);
    (upper_end > start).then(|| scan.run(upper_end, |l| l.flags & LOWER_PART != 0))
}

/// DeepSeek-V3's last stage. Adjacent characters that no alternative matches form one piece. The alternatives, in
/// order:
///
/// ```text
/// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+
/// [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
///  ?[\p{P}\p{S}]+[\r\n]*
/// \s*[\r\n]+
/// \s+(?!\S)
/// \s+
/// ```
pub(super) fn deepseek3<'t>(text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let scan = Text::new(text);
    let mut gap = 0;
    let mut at = 0;
    while let Some(info) = scan.char_at(at) {
        let Some(end) = deepseek3_word(&scan, at, info) else {
            at += info.len;
            continue;
        };
        if gap < at {
            emit(&text[gap..at]);
        }
        emit(&text[at..end]);
        at = end;
        gap = end;
    }
    if gap < at {
        emit(&text[gap..at]);
    }
}

fn deepseek3_word(scan: &Text<'_>, at: usize, info: CharInfo) -> Option<usize> {
    let next = scan.char_at(at + info.len);
    if info.c.is_ascii_punctuation() && next.is_some_and(|n| n.c.is_ascii_alphabetic()) {
        return Some(scan.run(at + 1, |l| l.c.is_ascii_alphabetic()));
    }
    let in_word = |l: CharInfo| l.flags & (LETTER | MARK) != 0;
    let can_lead = !is_line_break(info) && info.flags & (LETTER | PUNCTUATION | SYMBOL) == 0;
    if in_word(info) || (can_lead && next.is_some_and(in_word)) {
        return Some(scan.run(at + info.len, in_word));
    }
    let is_mark = |l: CharInfo| l.flags & (PUNCTUATION | SYMBOL) != 0;
    if is_mark(info) || (info.c == ' ' && next.is_some_and(is_mark)) {
        let end = scan.run(at + info.len, is_mark);
        return Some(scan.run(end, is_line_break));
    }
    if info.flags & SPACE != 0 {
        return Some(scan.line_breaks(at).unwrap_or_else(|| scan.spaces(at)));
    }
    None
}

/// Splits at numbers, into pieces of at most `max_digits` characters; the text between them forms pieces too.
pub(super) fn numbers<'t>(text: &'t str, max_digits: usize, emit: &mut dyn FnMut(&'t str)) {
    let scan = Text::new(text);
    let mut gap = 0;
    let mut at = 0;
    while let Some(info) = scan.char_at(at) {
        if info.flags & NUMBER == 0 {
            at += info.len;
            continue;
        }
        if gap < at {
            emit(&text[gap..at]);
        }
        let end = scan.run_up_to(at, max_digits, |l| l.flags & NUMBER != 0);
        emit(&text[at..end]);
        at = end;
        gap = end;
    }
    if gap < at {
        emit(&text[gap..at]);
    }
}

/// Splits at runs of punctuation: `\p{P}` and the ASCII symbols for which C's `ispunct` is true.
pub(super) fn punctuation<'t>(text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let scan = Text::new(text);
    let is_punctuation = |l: CharInfo| l.c.is_ascii_punctuation() || l.flags & PUNCTUATION != 0;
    let mut at = 0;
    while let Some(info) = scan.char_at(at) {
        let inside = is_punctuation(info);
        let end = scan.run(at + info.len, |l| is_punctuation(l) == inside);
        emit(&text[at..end]);
        at = end;
    }
}
