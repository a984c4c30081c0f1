//! Template source to tokens, with Jinja's white-space control as the reference implementation sets it: `trim_blocks`
//! removes the line end after a block tag or a comment, `lstrip_blocks` the white space before one on its line.

use super::failure::{Failure, Outcome, Place};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Text outside of tags.
    Data(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    /// A string literal without quotes and escapes.
    Text(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
}

const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// Returns the tokens, each with the place of its first character.
pub(super) fn tokens(source: &str) -> Outcome<Vec<(Token, Place)>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer =
        Lexer { source, at: 0, place: Place { line: 1, column: 1 }, counted: 0, line_starts: true, tokens: Vec::new() };
    lexer.run().map_err(|failure| failure.at(lexer.place))?;
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    /// Place of the byte `counted`.
    place: Place,
    counted: usize,
    /// Whether the text at `at` begins a line.
    line_starts: bool,
    tokens: Vec<(Token, Place)>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    /// Moves `place` to `at`.
    fn count_lines(&mut self) {
        let passed = &self.source[self.counted..self.at];
        self.place.line += passed.bytes().filter(|&byte| byte == b'\n').count() as u32;
        self.place.column = match passed.rfind('\n') {
            Some(end) => passed[end..].chars().count() as u32,
            None => self.place.column + passed.chars().count() as u32,
        };
        self.counted = self.at;
    }

    fn push(&mut self, token: Token) {
        self.count_lines();
        self.tokens.push((token, self.place));
    }

    fn run(&mut self) -> Outcome<()> {
        while !self.rest().is_empty() {
            let rest = self.rest();
            let Some(begin) = find_begin(rest) else {
                self.push(Token::Data(rest.to_owned()));
                self.at = self.source.len();
                break;
            };
            let kind = rest.as_bytes()[begin + 1];
            let sign = rest.as_bytes().get(begin + 2).copied().filter(|sign| matches!(sign, b'-' | b'+'));
            self.push_data(&rest[..begin], sign, kind != b'{');
            self.at += begin;
            self.count_lines();
            self.at += 2 + usize::from(sign.is_some());
            match kind {
                b'#' => self.comment()?,
                b'%' if self.raw()? => {}
                b'%' => {
                    self.push(Token::BlockBegin);
                    self.tag("%}", Token::BlockEnd)?;
                }
                _ => {
                    self.push(Token::VariableBegin);
                    self.tag("}}", Token::VariableEnd)?;
                }
            }
        }
        Ok(())
    }

    /// Emits the text before a tag, stripped as the tag demands.
    fn push_data(&mut self, text: &str, sign: Option<u8>, is_block: bool) {
        let kept = match sign {
            Some(b'-') => text.trim_end_matches(is_python_space),
            None if is_block => {
                let line = text.rfind('\n').map_or(0, |end| end + 1);
                let is_blank = text[line..].chars().all(is_python_space);
                if is_blank && (line > 0 || self.line_starts) { &text[..line] } else { text }
            }
            _ => text,
        };
        if !kept.is_empty() {
            self.push(Token::Data(kept.to_owned()));
        }
    }

    /// Skips a tag's end and the white space that it removes; returns whether one is here.
    fn skip_end(&mut self, end: &str) -> bool {
        let rest = self.rest();
        let (length, strips_all, strips_line) = if rest.strip_prefix('-').is_some_and(|rest| rest.starts_with(end)) {
            (1 + end.len(), true, false)
        } else if end != "}}" && rest.strip_prefix('+').is_some_and(|rest| rest.starts_with(end)) {
            (1 + end.len(), false, false)
        } else if rest.starts_with(end) {
            (end.len(), false, end != "}}")
        } else {
            return false;
        };
        let after = &rest[length..];
        let stripped = match (strips_all, strips_line) {
            (true, _) => after.trim_start_matches(is_python_space),
            (_, true) => after.strip_prefix('\n').unwrap_or(after),
            _ => after,
        };
        self.at = self.source.len() - stripped.len();
        self.line_starts = self.source[..self.at].ends_with('\n');
        true
    }

    fn comment(&mut self) -> Outcome<()> {
        while !self.rest().is_empty() {
            if self.skip_end("#}") {
                return Ok(());
            }
            self.at += self.rest().chars().next().map_or(1, char::len_utf8);
        }
        Err(Failure::error("missing end of comment tag"))
    }

    /// Emits the text of a `raw` block, if the tag at hand begins one.
    fn raw(&mut self) -> Outcome<bool> {
        let start = self.at;
        self.skip_spaces();
        let Some(after) = self.rest().strip_prefix("raw") else {
            self.at = start;
            return Ok(false);
        };
        self.at = self.source.len() - after.len();
        self.skip_spaces();
        // Jinja does not remove the line end after `{% raw %}`.
        let after = match (self.rest().strip_prefix("-%}"), self.rest().strip_prefix("%}")) {
            (Some(after), _) => after.trim_start_matches(is_python_space),
            (_, Some(after)) => after,
            _ => {
                self.at = start;
                return Ok(false);
            }
        };
        self.at = self.source.len() - after.len();
        let text_start = self.at;
        while let Some(begin) = self.rest().find("{%") {
            let text_end = self.at + begin;
            self.at = text_end + 2;
            let sign = self.rest().bytes().next().filter(|sign| matches!(sign, b'-' | b'+'));
            self.at += usize::from(sign.is_some());
            self.skip_spaces();
            if let Some(after) = self.rest().strip_prefix("endraw") {
                let end = self.at;
                self.at = self.source.len() - after.len();
                self.skip_spaces();
                if self.skip_end("%}") {
                    let line_starts = std::mem::replace(&mut self.line_starts, false);
                    self.push_data(&self.source[text_start..text_end], sign, true);
                    self.line_starts = line_starts;
                    return Ok(true);
                }
                self.at = end;
            }
        }
        Err(Failure::error("missing end of raw block"))
    }

    fn skip_spaces(&mut self) {
        self.at = self.source.len() - self.rest().trim_start_matches(is_python_space).len();
    }

    /// Emits the tokens of a tag up to its end, which counts only outside of brackets.
    fn tag(&mut self, end: &str, end_token: Token) -> Outcome<()> {
        let mut brackets: Vec<&str> = Vec::new();
        loop {
            self.skip_spaces();
            self.count_lines();
            if brackets.is_empty() {
                let line_at = self.at;
                if self.skip_end(end) {
                    let after = std::mem::replace(&mut self.at, line_at);
                    self.push(end_token);
                    self.at = after;
                    return Ok(());
                }
            }
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return Err(Failure::error(format!("unexpected end of template, expected '{end}'")));
            };
            if first == '\'' || first == '"' {
                let (text, length) = string_literal(rest, first)?;
                self.push(Token::Text(text));
                self.at += length;
            } else if first.is_ascii_digit() {
                let (number, length) = number(rest)?;
                self.push(number);
                self.at += length;
            } else if first.is_alphabetic() || first == '_' {
                let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                self.push(Token::Name(rest[..length].to_owned()));
                self.at += length;
            } else {
                let Some(operator) = OPERATORS.iter().find(|operator| rest.starts_with(**operator)) else {
                    return Err(Failure::error(format!("unexpected character {first:?}")));
                };
                match *operator {
                    "(" | "[" | "{" => brackets.push(operator),
                    ")" | "]" | "}" => {
                        let expected = brackets.pop();
                        if !matches!((expected, *operator), (Some("("), ")") | (Some("["), "]") | (Some("{"), "}")) {
                            return Err(Failure::error(format!("unexpected '{operator}'")));
                        }
                    }
                    _ => {}
                }
                self.push(Token::Operator(operator));
                self.at += operator.len();
            }
        }
    }
}

/// Returns the offset of the first tag.
fn find_begin(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|pair| pair[0] == b'{' && matches!(pair[1], b'{' | b'%' | b'#'))
}

/// White space as Python's `str.isspace` has it.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

/// Returns a number and its length.
fn number(text: &str) -> Outcome<(Token, usize)> {
    let bytes = text.as_bytes();
    let digits = |from: usize, radix: u32| {
        let is_part = |byte: &u8| (*byte as char).is_digit(radix) || *byte == b'_';
        bytes[from..].iter().position(|byte| !is_part(byte)).map_or(bytes.len(), |length| from + length)
    };
    let radix = match bytes.get(..2) {
        Some([b'0', b'x' | b'X']) => 16,
        Some([b'0', b'o' | b'O']) => 8,
        Some([b'0', b'b' | b'B']) => 2,
        _ => 10,
    };
    let start = if radix == 10 { 0 } else { 2 };
    let mut end = digits(start, radix);
    let mut is_float = false;
    if radix == 10 {
        if bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
            end = digits(end + 1, 10);
            is_float = true;
        }
        if matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
                end = digits(end + 1 + sign, 10);
                is_float = true;
            }
        }
    }
    let plain: String = text[start..end].chars().filter(|c| *c != '_').collect();
    let invalid = || Failure::error(format!("invalid number {:?}", &text[..end]));
    let token = if is_float {
        Token::Float(plain.parse().map_err(|_| invalid())?)
    } else {
        Token::Int(i128::from_str_radix(&plain, radix).map_err(|_| invalid())?)
    };
    Ok((token, end))
}

/// Returns a literal without its quotes and with Python's escapes replaced, and its length in the source.
fn string_literal(source: &str, quote: char) -> Outcome<(String, usize)> {
    let mut out = String::new();
    let mut chars = source.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        if c == quote {
            return Ok((out, at + 1));
        }
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some((at, escape)) = chars.next() else { break };
        let mut code = |digits: &str, radix: u32| -> Outcome<()> {
            let code = u32::from_str_radix(digits, radix).ok().and_then(char::from_u32);
            out.push(code.ok_or_else(|| Failure::error(format!("invalid escape \\{escape}{digits}")))?);
            Ok(())
        };
        match escape {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'v' => out.push('\u{b}'),
            '\n' => {}
            '\\' | '\'' | '"' => out.push(escape),
            'x' | 'u' | 'U' => {
                let length = match escape {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let digits = source.get(at + 1..at + 1 + length).unwrap_or_default();
                code(digits, 16)?;
                chars.nth(length - 1);
            }
            '0'..='7' => {
                let digits = source[at..].bytes().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
                code(&source[at..at + digits], 8)?;
                if digits > 1 {
                    chars.nth(digits - 2);
                }
            }
            other => out.extend(['\\', other]),
        }
    }
    Err(Failure::error("a string literal has no closing quote"))
}
