//! Wraps a stream of text at the edge of a terminal, between words. Only spaces at line ends change.

use unicode_width::UnicodeWidthChar;

/// Text with fewer columns is not wrapped: long words would leave most lines empty.
const MIN_COLUMNS: usize = 20;

/// Wraps text that arrives in pieces.
#[derive(Debug)]
pub(crate) struct WordWrap {
    /// Columns of the terminal; `None` leaves the text as it is.
    columns: Option<usize>,
    /// Columns of the current line that are written.
    column: usize,
    /// Spaces after the last word, not written yet.
    spaces: usize,
    /// The current word, not written yet: it may belong on the next line.
    word: String,
    /// The current line is or may become a fence of a code block: it has had only backquotes so far.
    num_backquotes: usize,
    is_line_start: bool,
    is_code: bool,
}

impl WordWrap {
    /// Returns a wrapper for this number of columns, for text that begins at the start of a line.
    pub(crate) fn new(columns: Option<usize>) -> WordWrap {
        WordWrap {
            columns: columns.filter(|&columns| columns >= MIN_COLUMNS),
            column: 0,
            spaces: 0,
            word: String::new(),
            num_backquotes: 0,
            is_line_start: true,
            is_code: false,
        }
    }

    /// Returns the wrapper for standard output: it wraps on a terminal only.
    pub(crate) fn for_stdout() -> WordWrap {
        let size = terminal_size::terminal_size_of(std::io::stdout());
        WordWrap::new(size.map(|(width, _)| usize::from(width.0)))
    }

    /// Adds text and returns what can be written.
    pub(crate) fn push(&mut self, text: &str) -> String {
        if self.columns.is_none() {
            return text.to_owned();
        }
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word(&mut out);
                    out.push('\n');
                    (self.column, self.spaces, self.num_backquotes, self.is_line_start) = (0, 0, 0, true);
                }
                // In a code block, spaces and line ends have a meaning.
                _ if self.is_code && self.num_backquotes == 0 && c != '`' => {
                    self.end_word(&mut out);
                    self.is_line_start = false;
                    self.write_spaces(&mut out);
                    out.push(c);
                }
                ' ' => {
                    self.end_word(&mut out);
                    self.spaces += 1;
                }
                _ => {
                    self.count_backquotes(c);
                    self.word.push(c);
                    // Languages without spaces are wrapped between any two characters.
                    if c.width().unwrap_or(0) > 1 {
                        self.end_word(&mut out);
                    }
                }
            }
        }
        out
    }

    /// Returns what is left at the end of the text.
    pub(crate) fn finish(&mut self) -> String {
        let mut out = String::new();
        self.end_word(&mut out);
        self.write_spaces(&mut out);
        out
    }

    /// A line that begins with three backquotes begins or ends a code block.
    fn count_backquotes(&mut self, c: char) {
        if c == '`' && (self.is_line_start || self.num_backquotes > 0) {
            self.num_backquotes += 1;
            if self.num_backquotes == 3 {
                self.is_code = !self.is_code;
            }
        } else if self.num_backquotes < 3 {
            self.num_backquotes = 0;
        }
        self.is_line_start = false;
    }

    fn end_word(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let word = std::mem::take(&mut self.word);
        let width: usize = word.chars().map(|c| c.width().unwrap_or(0)).sum();
        let columns = self.columns.unwrap_or(usize::MAX);
        if self.column > 0 && self.column + self.spaces + width > columns {
            out.push('\n');
            (self.column, self.spaces) = (0, 0);
        }
        self.write_spaces(out);
        out.push_str(&word);
        // A word that is longer than a line is continued by the terminal.
        let end = self.column + width;
        self.column = if end > columns { end % columns } else { end };
    }

    fn write_spaces(&mut self, out: &mut String) {
        out.extend(std::iter::repeat_n(' ', self.spaces));
        self.column += self.spaces;
        self.spaces = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wraps a text that arrives in pieces of `size` characters.
    fn wrapped(text: &str, columns: usize, size: usize) -> String {
        let mut wrap = WordWrap::new(Some(columns));
        let chars: Vec<char> = text.chars().collect();
        let mut out: String = chars.chunks(size).map(|piece| wrap.push(&piece.iter().collect::<String>())).collect();
        out += &wrap.finish();
        out
    }

    #[test]
    fn lines_end_between_words_however_the_text_arrives() {
        let text = "one two three four five six seven\n\n  eight nine ten eleven twelve";
        let expected = "one two three four\nfive six seven\n\n  eight nine ten\neleven twelve";
        for size in 1..9 {
            assert_eq!(wrapped(text, 20, size), expected);
        }
        assert_eq!(wrapped("exactly twenty chars and more", 20, 1), "exactly twenty chars\nand more");
    }

    #[test]
    fn the_words_stay_as_they_are() {
        let text = "a  b\tc 世界世界世界世界世界世界世界 endlessendlessendlessendless x ";
        let same = |text: &str| text.replace(['\n', ' '], "");
        assert_eq!(same(&wrapped(text, 20, 3)), same(text));
        assert_eq!(WordWrap::new(None).push(text), text, "what is no terminal gets the text itself");
        assert_eq!(WordWrap::new(Some(5)).push(text), text);
    }

    #[test]
    fn code_blocks_are_not_wrapped() {
        let code = "```rust\nlet a = 1;  // a comment that is longer than a line\n```\n";
        let text = format!("{code}words after it are wrapped");
        for size in 1..9 {
            assert_eq!(wrapped(&text, 20, size), format!("{code}words after it are\nwrapped"));
        }
        assert_eq!(wrapped("use `a b` and ``` c d e f g", 20, 1), "use `a b` and ``` c\nd e f g");
    }
}
