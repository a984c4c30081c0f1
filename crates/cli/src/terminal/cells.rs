//! Cells of tables: visible text, padding to terminal columns, percentages, bars and colour.
//!
//! Knows nothing of tokens or sampling.

use unicode_width::UnicodeWidthChar;

/// Writes text in colour if it is on. Colour never carries information that the text lacks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paint {
    pub(crate) is_on: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Ink {
    Plain,
    Faint,
    Strong,
    Winner,
    Cut,
    Before,
    After,
    /// Text of the newest token.
    Fresh,
}

impl Paint {
    pub(crate) fn ink(self, ink: Ink, text: &str) -> String {
        let code = match ink {
            Ink::Plain => return text.to_owned(),
            Ink::Faint => "2",
            Ink::Strong => "1",
            Ink::Winner => "1;32",
            Ink::Cut => "31",
            Ink::Before => "34",
            Ink::After => "36",
            Ink::Fresh => "1;7;32",
        };
        if self.is_on && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Makes the bytes of a token visible: `␣` for a space, `⏎` for a line end, `\xe2` for a byte that is not a whole
/// character.
pub(crate) fn visible(bytes: &[u8]) -> String {
    let mut shown = String::new();
    for chunk in bytes.utf8_chunks() {
        chunk.valid().chars().for_each(|c| if c == ' ' { shown.push('␣') } else { push_visible(c, &mut shown) });
        chunk.invalid().iter().for_each(|byte| shown.push_str(&format!("\\x{byte:02x}")));
    }
    shown
}

/// Makes a text visible on one line like [`visible`], but keeps its spaces.
pub(crate) fn one_line(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    text.chars().for_each(|c| push_visible(c, &mut shown));
    shown
}

fn push_visible(c: char, shown: &mut String) {
    match c {
        '\n' => shown.push('⏎'),
        '\t' => shown.push('⇥'),
        '\r' => shown.push('␍'),
        _ if is_unseen(c) => shown.extend(c.escape_unicode()),
        // A combining mark without a letter would be drawn onto the character to its left.
        _ if c.width() == Some(0) => shown.extend(['◌', c]),
        _ => shown.push(c),
    }
}

/// Whether a character controls the terminal, changes the writing direction, is invisible, or changes the width of the
/// character beside it.
fn is_unseen(c: char) -> bool {
    let spaces =
        matches!(c, '\u{a0}' | '\u{ad}' | '\u{2000}'..='\u{200f}' | '\u{2028}'..='\u{202f}' | '\u{205f}'..='\u{206f}');
    c.is_control()
        || spaces
        || matches!(c, '\u{3000}' | '\u{feff}' | '\u{fe00}'..='\u{fe0f}' | '\u{e0000}'..='\u{e0fff}')
}

/// Returns the number of terminal columns of a text.
pub(crate) fn width(text: &str) -> usize {
    text.chars().map(|c| c.width().unwrap_or(0)).sum()
}

/// Returns the beginning of a text that fits into `columns`, with `…` if it was cut.
pub(crate) fn beginning(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut left = columns.saturating_sub(1);
    let fits = |c: &char| {
        let taken = c.width().unwrap_or(0);
        let fits = taken <= left;
        left = left.saturating_sub(taken);
        fits
    };
    text.chars().take_while(fits).chain(['…']).collect()
}

/// Returns the end of a text that fits into `columns`, with `…` if it was cut.
pub(crate) fn ending(text: &str, columns: usize) -> String {
    let backwards = |text: &str| text.chars().rev().collect::<String>();
    backwards(&beginning(&backwards(text), columns))
}

/// Pads a text on the right.
pub(crate) fn left_aligned(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Pads a text on the left.
pub(crate) fn right_aligned(text: &str, columns: usize) -> String {
    format!("{}{text}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Breaks a text into lines of at most `columns` columns.
pub(crate) fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if width(line) + 1 + width(word) <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Breaks the lines of a text between words. What follows is indented like the text after a label, or by one column
/// after a bracket.
pub(crate) fn hanging(text: &str, columns: usize) -> String {
    let line = |line: &str| {
        let label = line.find("  ").map(|end| line.len() - line[end..].trim_start().len());
        let indent = match label.filter(|&end| line.is_char_boundary(end) && width(&line[..end]) <= MAX_LABEL) {
            Some(end) => end,
            None => usize::from(line.starts_with(['[', '('])),
        };
        let (label, rest) = line.split_at(indent);
        let lines = wrapped(rest, columns.saturating_sub(width(label)).max(MIN_WRAPPED));
        format!("{label}{}", lines.join(&format!("\n{}", " ".repeat(width(label)))))
    };
    text.split('\n').map(line).collect::<Vec<String>>().join("\n")
}

/// Columns of the widest label of a line, and of the narrowest text beside it.
const MAX_LABEL: usize = 24;
const MIN_WRAPPED: usize = 20;

/// Formats a probability as a percentage of at most six columns.
pub(crate) fn share(probability: f64) -> String {
    let percent = 100.0 * probability;
    match percent {
        _ if percent == 0.0 => "0%".into(),
        // 100% is for certainty only.
        _ if probability < 1.0 - 1e-9 && percent >= 99.95 => ">99.9%".into(),
        99.95.. => "100%".into(),
        9.995.. => format!("{percent:.1}%"),
        0.005.. => format!("{percent:.2}%"),
        _ => "<0.01%".into(),
    }
}

/// Draws a bar of at most `columns` columns with a resolution of an eighth of a column.
pub(crate) fn bar(fraction: f64, columns: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    // NaN converts to 0.
    let eighths = (fraction.clamp(0.0, 1.0) * (8 * columns) as f64).round() as usize;
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_hang_below_their_text() {
        assert_eq!(hanging("model  a b c d e f g h i j k", 27), "model  a b c d e f g h i j\n       k");
        assert_eq!(hanging("[one two three four five six]", 24), "[one two three four five\n six]");
        assert_eq!(hanging("one two three four five six", 24), "one two three four five\nsix");
        assert_eq!(hanging("short\n  /help  this list", 80), "short\n  /help  this list");
        assert_eq!(hanging("", 80), "");
    }

    #[test]
    fn nothing_of_a_token_stays_unseen() {
        assert_eq!(visible(b" a\n\t\r"), "␣a⏎⇥␍");
        assert_eq!(visible(b"\x1b[31m"), "\\u{1b}[31m");
        assert_eq!(visible(b"\xe2\x82"), "\\xe2\\x82");
        assert_eq!(visible("\u{202e}\u{200d}\u{a0}".as_bytes()), "\\u{202e}\\u{200d}\\u{a0}");
        assert_eq!(visible("\u{301}".as_bytes()), "◌\u{301}");
        assert_eq!(one_line("a b\n"), "a b⏎");
    }

    #[test]
    fn wide_characters_keep_their_columns() {
        assert_eq!(width("模型a"), 5);
        for columns in 1..8 {
            for text in ["模型模型", "🙂🙂🙂", "abcdefgh", "é", ""] {
                let cut = beginning(text, columns);
                assert!(width(&cut) <= columns, "{text} in {columns}: {cut}");
                assert_eq!(width(&left_aligned(&cut, 9)), 9);
                assert_eq!(width(&right_aligned(&ending(text, columns), 9)), 9);
            }
        }
        assert_eq!((beginning("模型模型", 4).as_str(), ending("abcdef", 3).as_str()), ("模…", "…ef"));
    }

    #[test]
    fn shares_fit_and_do_not_pretend() {
        let cases = [
            (0.0, "0%"),
            (1.0, "100%"),
            (0.99996, ">99.9%"),
            (0.9994, "99.9%"),
            (0.1234, "12.3%"),
            (0.09999, "10.0%"),
            (0.0123, "1.23%"),
            (0.00006, "0.01%"),
            (0.00001, "<0.01%"),
        ];
        for (probability, expected) in cases {
            assert_eq!(share(probability), expected);
        }
        assert!((0..=100_000).all(|i| share(f64::from(i) / 1e5).len() <= 6));
    }

    #[test]
    fn bars_grow_by_eighths() {
        assert_eq!([bar(0.0, 4), bar(1e-9, 4), bar(0.5, 4), bar(0.53, 4), bar(1.0, 4)], ["", "", "██", "██▏", "████"]);
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("keeps the 40 highest", 9), ["keeps the", "40", "highest"]);
    }
}
