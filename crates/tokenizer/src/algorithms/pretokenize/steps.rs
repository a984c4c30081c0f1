//! Pre-tokenizers as a general list of steps, for tokenizer.json files that the faster stages do not cover.
//!
//! Each step splits a piece, or rewrites it and then splits it, and gives the parts to the next step. The steps are
//! those of the reference library (the `tokenizers` crate); a part without text is dropped. Time and memory are
//! proportional to the text, and no more than one piece of each step is held at a time.

use std::collections::TryReserveError;
use std::ops::Range;

use crate::algorithms::pattern::Pattern;
use crate::algorithms::reference_classes::{CharRanges, punctuation, script};
use crate::vocabulary::char_of_byte;

/// Condition for inserting a mark before a piece that does not begin with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prepend {
    Always,
    /// Only before the first piece of the text.
    First,
    Never,
}

/// One step.
#[derive(Debug)]
pub(crate) enum Step {
    Split {
        delimiter: Delimiter,
        behavior: Behavior,
        /// Whether the text between the matches is the delimiter.
        invert: bool,
    },
    /// Inserts a space before a piece that does not begin with one.
    PrefixSpace,
    /// Spells each byte as a character of GPT-2's alphabet.
    SpellBytes,
    /// Spaces become marks. With `split`, each mark starts a new piece.
    Metaspace { mark: char, prepend: Prepend, split: bool },
    /// Splits where the script changes.
    Scripts,
    /// Splits into pieces of this number of characters; the last one may be shorter.
    FixedLength(usize),
}

/// The texts at which a piece is split.
#[derive(Debug)]
pub(crate) enum Delimiter {
    Char(char),
    Text(String),
    Class(fn(char) -> bool),
    Set(&'static CharRanges),
    Pattern(Pattern),
}

/// The treatment of a delimiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behavior {
    Removed,
    Isolated,
    MergedWithPrevious,
    MergedWithNext,
    Contiguous,
}

impl Behavior {
    /// Returns the behavior with this name in a tokenizer.json.
    pub(crate) fn named(name: &str) -> Option<Behavior> {
        Some(match name {
            "Removed" => Behavior::Removed,
            "Isolated" => Behavior::Isolated,
            "MergedWithPrevious" => Behavior::MergedWithPrevious,
            "MergedWithNext" => Behavior::MergedWithNext,
            "Contiguous" => Behavior::Contiguous,
            _ => return None,
        })
    }
}

/// Returns BERT's pre-tokenizer: words between white space, and every punctuation mark alone.
pub(crate) fn bert_steps() -> Vec<Step> {
    let at = |delimiter, behavior| Step::Split { delimiter, behavior, invert: false };
    vec![
        at(Delimiter::Class(char::is_whitespace), Behavior::Removed),
        at(Delimiter::Set(punctuation()), Behavior::Isolated),
    ]
}

/// A piece, and the number of its first bytes that come from the first character of the whole text.
#[derive(Clone, Copy)]
struct Piece<'p> {
    text: &'p str,
    num_initial: usize,
}

impl<'p> Piece<'p> {
    fn part(self, at: Range<usize>) -> Piece<'p> {
        let num_initial = self.num_initial.saturating_sub(at.start).min(at.len());
        Piece { text: &self.text[at], num_initial }
    }
}

/// Splits a text by all steps and calls `emit` with each piece. `first` is true at the beginning of a whole text. Fails
/// if there is no memory for a rewritten piece.
pub(crate) fn run(steps: &[Step], text: &str, first: bool, emit: &mut dyn FnMut(&str)) -> Result<(), TryReserveError> {
    let num_initial = if first { text.chars().next().map_or(0, char::len_utf8) } else { 0 };
    run_piece(steps, Piece { text, num_initial }, emit)
}

fn run_piece(steps: &[Step], piece: Piece<'_>, emit: &mut dyn FnMut(&str)) -> Result<(), TryReserveError> {
    let Some((step, rest)) = steps.split_first() else {
        emit(piece.text);
        return Ok(());
    };
    let mut result = Ok(());
    let rewritten = step.rewrite(piece)?;
    let piece = match &rewritten {
        Some((text, num_initial)) => Piece { text, num_initial: *num_initial },
        None => piece,
    };
    step.split(piece.text, &mut |at| {
        if result.is_ok() && !at.is_empty() {
            result = run_piece(rest, piece.part(at), emit);
        }
    });
    result
}

impl Step {
    /// Returns the maximum factor by which this step lengthens a text.
    pub(crate) fn max_growth(&self) -> usize {
        match self {
            // Each piece may be one byte that gets a space, and each byte a character of two bytes.
            Step::PrefixSpace | Step::SpellBytes => 2,
            Step::Metaspace { mark, .. } => 1 + mark.len_utf8(),
            Step::Split { .. } | Step::Scripts | Step::FixedLength(_) => 1,
        }
    }

    /// Returns a piece as this step rewrites it before it splits, with its number of initial bytes.
    fn rewrite(&self, piece: Piece<'_>) -> Result<Option<(String, usize)>, TryReserveError> {
        let Piece { text, num_initial } = piece;
        let mut rewritten = String::new();
        let mut initial = None;
        match self {
            Step::PrefixSpace if !text.starts_with(' ') => {
                rewritten.try_reserve(1 + text.len())?;
                rewritten.push(' ');
                rewritten.push_str(text);
                // An inserted text counts to the character after it.
                initial = Some(if num_initial > 0 { num_initial + 1 } else { 0 });
            }
            Step::SpellBytes => {
                // A character of the alphabet has one or two bytes.
                rewritten.try_reserve(text.len() + text.bytes().filter(|byte| !byte.is_ascii_graphic()).count())?;
                for (at, byte) in text.bytes().enumerate() {
                    if at == num_initial {
                        initial = Some(rewritten.len());
                    }
                    rewritten.push(char_of_byte(byte));
                }
            }
            Step::Metaspace { mark, prepend, .. } => {
                let num_spaces = text.bytes().filter(|byte| *byte == b' ').count();
                rewritten.try_reserve(text.len() + (num_spaces + 1) * mark.len_utf8())?;
                let is_wanted = match prepend {
                    Prepend::Always => true,
                    Prepend::First => num_initial > 0,
                    Prepend::Never => false,
                };
                // After the replacement, a space is a mark.
                if is_wanted && !text.starts_with([' ', *mark]) {
                    rewritten.push(*mark);
                }
                for (at, c) in text.char_indices() {
                    if at >= num_initial && initial.is_none() {
                        initial = Some(if num_initial > 0 { rewritten.len() } else { 0 });
                    }
                    rewritten.push(if c == ' ' { *mark } else { c });
                }
            }
            _ => return Ok(None),
        }
        let initial = initial.unwrap_or(rewritten.len());
        Ok(Some((rewritten, initial)))
    }

    fn split(&self, text: &str, emit: &mut dyn FnMut(Range<usize>)) {
        match self {
            Step::Split { delimiter, behavior, invert } => {
                let mut merger = Merger { behavior: *behavior, held: None, emit };
                delimiter.for_each_part(text, &mut |at, is_match| merger.take(at, is_match != *invert));
                merger.finish();
            }
            Step::Metaspace { mark, split: true, .. } => {
                let mut start = 0;
                for (at, _) in text.match_indices(*mark).filter(|(at, _)| *at > 0) {
                    emit(start..at);
                    start = at;
                }
                emit(start..text.len());
            }
            Step::PrefixSpace | Step::SpellBytes | Step::Metaspace { .. } => emit(0..text.len()),
            Step::Scripts => split_at_scripts(text, emit),
            Step::FixedLength(length) => {
                let mut start = 0;
                for (at, _) in text.char_indices().step_by(*length).skip(1) {
                    emit(start..at);
                    start = at;
                }
                emit(start..text.len());
            }
        }
    }
}

impl Delimiter {
    /// Calls `emit` with each match and each text between matches, from the left; the flag tells which it is.
    fn for_each_part(&self, text: &str, emit: &mut dyn FnMut(Range<usize>, bool)) {
        let mut gap = 0;
        let mut found = |at: Range<usize>| {
            if gap < at.start {
                emit(gap..at.start, false);
            }
            gap = at.end;
            emit(at, true);
        };
        let mut chars = |is_delimiter: &dyn Fn(char) -> bool| {
            for (at, c) in text.char_indices().filter(|(_, c)| is_delimiter(*c)) {
                found(at..at + c.len_utf8());
            }
        };
        match self {
            Delimiter::Char(delimiter) => chars(&|c| c == *delimiter),
            Delimiter::Class(is_delimiter) => chars(is_delimiter),
            Delimiter::Set(set) => chars(&|c| set.contains(c)),
            Delimiter::Text(wanted) => {
                text.match_indices(wanted.as_str()).for_each(|(at, matched)| found(at..at + matched.len()));
            }
            Delimiter::Pattern(pattern) => pattern.for_each_match(text, &mut found),
        }
        if gap < text.len() {
            emit(gap..text.len(), false);
        }
    }
}

/// Joins matches and the texts between them as a [`Behavior`] says.
struct Merger<'e> {
    behavior: Behavior,
    /// A part that the next one may extend, and whether the last part was a match.
    held: Option<(Range<usize>, bool)>,
    emit: &'e mut dyn FnMut(Range<usize>),
}

impl Merger<'_> {
    fn take(&mut self, at: Range<usize>, is_match: bool) {
        let joins = |was_match: bool| match self.behavior {
            Behavior::Removed | Behavior::Isolated => false,
            Behavior::Contiguous => is_match == was_match,
            Behavior::MergedWithPrevious => is_match && !was_match,
            Behavior::MergedWithNext => was_match && !is_match,
        };
        match &mut self.held {
            Some((held, was_match)) if joins(*was_match) => {
                held.end = at.end;
                *was_match = is_match;
            }
            _ => {
                let is_removed = self.behavior == Behavior::Removed && is_match;
                let last = std::mem::replace(&mut self.held, (!is_removed).then_some((at, is_match)));
                if let Some((last, _)) = last {
                    (self.emit)(last);
                }
            }
        }
    }

    fn finish(self) {
        if let Some((last, _)) = self.held {
            (self.emit)(last);
        }
    }
}

/// Splits where the script changes. Characters without a script belong to the text before them, and are dropped at the
/// beginning, as the reference does.
fn split_at_scripts(text: &str, emit: &mut dyn FnMut(Range<usize>)) {
    let mut start = None;
    let mut last_script = None;
    for (at, c) in text.char_indices() {
        let Some(script) = script(c) else { continue };
        if last_script != Some(script) {
            if let Some(start) = start {
                emit(start..at);
            }
            (start, last_script) = (Some(at), Some(script));
        }
    }
    if let Some(start) = start {
        emit(start..text.len());
    }
}

/// Returns the pieces of a text, for tests.
#[cfg(test)]
pub(crate) fn pieces(steps: &[Step], text: &str, first: bool) -> Vec<String> {
    let mut pieces = Vec::new();
    run(steps, text, first, &mut |piece| pieces.push(piece.to_owned())).unwrap();
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delimiters_are_joined_as_the_behavior_says() {
        let cases = [
            (Behavior::Removed, &["the", "final", "countdown"][..]),
            (Behavior::Isolated, &["the", "-", "final", "-", "-", "countdown"]),
            (Behavior::MergedWithPrevious, &["the-", "final-", "-", "countdown"]),
            (Behavior::MergedWithNext, &["the", "-final", "-", "-countdown"]),
            (Behavior::Contiguous, &["the", "-", "final", "--", "countdown"]),
        ];
        for (behavior, expected) in cases {
            let step = Step::Split { delimiter: Delimiter::Char('-'), behavior, invert: false };
            assert_eq!(pieces(&[step], "the-final--countdown", true), expected, "{behavior:?}");
        }
    }

    #[test]
    fn a_mark_for_the_first_piece_needs_the_beginning_of_the_text() {
        let steps = |prepend| {
            let split = Step::Split { delimiter: Delimiter::Char(','), behavior: Behavior::Removed, invert: false };
            [split, Step::Metaspace { mark: '▁', prepend, split: true }]
        };
        assert_eq!(pieces(&steps(Prepend::First), "a b,c", true), ["▁a", "▁b", "c"]);
        assert_eq!(pieces(&steps(Prepend::First), "a b,c", false), ["a", "▁b", "c"]);
        assert_eq!(pieces(&steps(Prepend::First), ",c", true), ["c"]);
        assert_eq!(pieces(&steps(Prepend::Always), "a b,c", false), ["▁a", "▁b", "▁c"]);
        assert_eq!(pieces(&steps(Prepend::Never), " a b,c", true), ["▁a", "▁b", "c"]);
    }
}
