//! The filter `wordwrap`, as Python's `textwrap` breaks lines.

use std::ops::Range;

use super::text_methods::lines;
use super::{CallArguments, int_argument, is_set, text_argument};
use crate::chat::jinja::budget::{Budget, with_capacity};
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::lexer::is_python_space;
use crate::chat::jinja::text::{Text, TextBuilder};
use crate::chat::jinja::value::Value;

struct Rules {
    width: usize,
    breaks_long_words: bool,
    breaks_on_hyphens: bool,
}

pub(super) fn wordwrap(text: &Text, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let parameters = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [width, long_words, separator, hyphens] = arguments.bind("wordwrap", parameters)?;
    if text.len() == 0 {
        return Ok(Value::Text(text.clone()));
    }
    let width = int_argument(width, "wordwrap")?.unwrap_or(79);
    let Some(width) = usize::try_from(width).ok().filter(|width| *width > 0) else {
        return Err(Failure::error(format!("wordwrap: invalid width {width} (must be > 0)")));
    };
    let rules = Rules {
        width,
        breaks_long_words: long_words.is_none() || is_set(&long_words),
        breaks_on_hyphens: hyphens.is_none() || is_set(&hyphens),
    };
    let separator = match text_argument(separator, "wordwrap")? {
        Some(separator) => separator,
        None => Text::new("\n", text.is_trusted(), budget)?,
    };
    budget.charge_bytes(text.len().saturating_mul(4))?;
    let content = text.str();
    let mut out = TextBuilder::new(budget)?;
    for (index, line) in lines(&content, false, budget)?.into_iter().enumerate() {
        if index > 0 {
            out.push_text(&separator)?;
        }
        let mut is_first = true;
        wrap(&content[line.clone()], &rules, budget, &mut |part| {
            if !std::mem::take(&mut is_first) {
                out.push_text(&separator)?;
            }
            out.push_slice(text, line.start + part.start..line.start + part.end)
        })?;
    }
    Ok(Value::Text(out.finish()))
}

/// Calls `emit` with the bytes of each line.
fn wrap(
    text: &str,
    rules: &Rules,
    budget: &Budget<'_>,
    emit: &mut dyn FnMut(Range<usize>) -> Outcome<()>,
) -> Outcome<()> {
    let _held = budget.hold(text.len().saturating_mul(size_of::<(usize, char)>()))?;
    let mut chars: Vec<(usize, char)> = with_capacity(text.chars().count())?;
    chars.extend(text.char_indices());
    let offset = |index: usize| chars.get(index).map_or(text.len(), |(at, _)| *at);
    let is_blank = |chunk: &Range<usize>| chars[chunk.clone()].iter().all(|(_, c)| is_python_space(*c));
    let mut has_lines = false;
    let mut chunk = 0..0;
    let next = |after: usize| after..chunk_end(&chars, after, rules.breaks_on_hyphens);
    loop {
        if chunk.is_empty() {
            chunk = next(chunk.end);
        }
        // White space at the beginning of a line is dropped, but for the first.
        if has_lines && is_blank(&chunk) {
            chunk = next(chunk.end);
        }
        if chunk.is_empty() {
            return Ok(());
        }
        let start = chunk.start;
        let mut last = start..start;
        while !chunk.is_empty() && chunk.end - start <= rules.width {
            last = chunk.clone();
            chunk = next(chunk.end);
        }
        let mut end = last.end;
        if chunk.len() > rules.width {
            let room = rules.width - (end - start);
            if rules.breaks_long_words {
                // Without room this is an empty part, and white space before it is kept.
                last = chunk.start..chunk.start + long_word_end(&chars[chunk.clone()], room, rules.breaks_on_hyphens);
                end = last.end;
                chunk.start = end;
            } else if end == start {
                last = chunk.clone();
                end = last.end;
                chunk = next(chunk.end);
            }
        }
        if is_blank(&last) {
            end = last.start;
        }
        if end > start {
            has_lines = true;
            emit(offset(start)..offset(end))?;
        }
    }
}

/// Returns the characters of a word that go on a line with room for `room`.
fn long_word_end(word: &[(usize, char)], room: usize, breaks_on_hyphens: bool) -> usize {
    let hyphen = word[..room].iter().rposition(|(_, c)| *c == '-').filter(|_| breaks_on_hyphens);
    match hyphen {
        Some(hyphen) if hyphen > 0 && word[..hyphen].iter().any(|(_, c)| *c != '-') => hyphen + 1,
        _ => room,
    }
}

/// Returns the end of the chunk that begins at `start`: white space, a word, a part of a word up to a hyphen, or a dash
/// between words.
fn chunk_end(chars: &[(usize, char)], start: usize, breaks_on_hyphens: bool) -> usize {
    let at = |index: usize| chars.get(index).map(|(_, c)| *c);
    let before = |index: usize, back: usize| index.checked_sub(back).and_then(at);
    let is_space = |c: char| matches!(c, '\t' | '\n' | '\u{b}' | '\u{c}' | '\r' | ' ');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_letter = |c: char| is_word(c) && !c.is_numeric();
    let is_word_mark = |c: char| is_word(c) || matches!(c, '!' | '"' | '\'' | '&' | '.' | ',' | '?');
    let run = |from: usize, is_in: &dyn Fn(char) -> bool| chars[from..].iter().take_while(|(_, c)| is_in(*c)).count();
    let dash = |from: usize| {
        let length = run(from, &|c| c == '-');
        (length >= 2 && at(from + length).is_some_and(is_word) && before(from, 1).is_some_and(is_word_mark))
            .then_some(length)
    };
    let Some(first) = at(start) else { return start };
    if is_space(first) {
        return start + run(start, &is_space);
    }
    if !breaks_on_hyphens {
        return start + run(start, &|c| !is_space(c));
    }
    if first == '-'
        && let Some(length) = dash(start)
    {
        return start + length;
    }
    let mut end = start + 1;
    loop {
        let is = |back: usize, test: &dyn Fn(char) -> bool| before(end, back).is_some_and(test);
        match at(end) {
            None => return end,
            Some(c) if is_space(c) => return end,
            Some('-') => {
                let after_word = is(1, &is_letter) && is(2, &is_letter)
                    || is(1, &is_word_mark) && is(2, &|c| c == '-') && is(3, &is_letter);
                let gap = usize::from(at(end + 2) == Some('-'));
                let before_word = at(end + 1).is_some_and(is_letter) && at(end + 2 + gap).is_some_and(is_letter);
                if after_word && before_word {
                    return end + 1;
                }
                if is(1, &is_word_mark) && dash(end).is_some() {
                    return end;
                }
            }
            Some(_) => {}
        }
        end += 1;
    }
}
