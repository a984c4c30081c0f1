//! Parses GBNF.

use std::collections::HashMap;

use super::Expression;
use crate::Error;
use crate::lark::MAX_NESTING;

/// Maximum number of a repetition such as `{3,20}`, as in llama.cpp.
const MAX_REPEAT: usize = 2000;

pub(super) struct Grammar {
    pub(super) rules: Vec<Expression>,
    pub(super) root: usize,
}

struct Parser<'t> {
    text: &'t str,
    /// Byte offset of the next character.
    offset: usize,
    depth: usize,
    /// Names of rules in the order in which they were seen, with the offset of the first mention.
    names: Vec<(&'t str, usize)>,
    indices: HashMap<&'t str, usize>,
    rules: Vec<Option<Expression>>,
}

impl Grammar {
    pub(super) fn parse(text: &str) -> Result<Grammar, Error> {
        let mut parser =
            Parser { text, offset: 0, depth: 0, names: Vec::new(), indices: HashMap::new(), rules: Vec::new() };
        parser.skip_space(true);
        while parser.peek().is_some() {
            parser.rule()?;
            parser.skip_space(true);
        }
        let Some(&root) = parser.indices.get("root") else {
            return Err(Error::source("grammar", "expected a rule named root, where replies begin; found none"));
        };
        let mut rules = Vec::with_capacity(parser.rules.len());
        for index in 0..parser.rules.len() {
            let (name, offset) = parser.names[index];
            let rule = parser.rules[index].take();
            rules.push(rule.ok_or_else(|| parser.error_at(offset, format!("no rule is called {name}")))?);
        }
        Ok(Grammar { rules, root })
    }
}

impl<'t> Parser<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.offset..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.offset += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.offset += if found { token.len() } else { 0 };
        found
    }

    fn error_at(&self, offset: usize, problem: String) -> Error {
        let line = self.text[..offset].matches('\n').count() + 1;
        Error::source("grammar", format!("line {line}: {problem}"))
    }

    fn expected(&self, what: &str) -> Error {
        let found = match self.peek() {
            Some('\n') => "the end of the line".to_owned(),
            Some(c) => format!("{c:?}"),
            None => "the end".to_owned(),
        };
        self.error_at(self.offset, format!("expected {what}, found {found}"))
    }

    /// Skips white space and comments; line breaks only if `lines` is set.
    fn skip_space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => {}
                '\n' | '\r' if lines => {}
                '#' => {
                    self.offset += self.rest().find('\n').unwrap_or(self.rest().len());
                    continue;
                }
                _ => return,
            }
            self.next();
        }
    }

    fn name(&mut self) -> Option<&'t str> {
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_').unwrap_or(rest.len());
        self.offset += len;
        (len > 0).then(|| &rest[..len])
    }

    fn index_of(&mut self, name: &'t str, offset: usize) -> usize {
        *self.indices.entry(name).or_insert_with(|| {
            self.names.push((name, offset));
            self.rules.push(None);
            self.rules.len() - 1
        })
    }

    fn rule(&mut self) -> Result<(), Error> {
        let start = self.offset;
        let name = self.name().ok_or_else(|| self.expected("the name of a rule"))?;
        self.skip_space(false);
        if !self.eat("::=") {
            return Err(self.expected("\"::=\""));
        }
        self.skip_space(true);
        let index = self.index_of(name, start);
        let rule = self.alternatives(false)?;
        if !matches!(self.peek(), None | Some('\n' | '\r')) {
            return Err(self.expected("the end of the rule"));
        }
        match self.rules[index].replace(rule) {
            None => Ok(()),
            Some(_) => Err(self.error_at(start, format!("the rule {name} is defined twice"))),
        }
    }

    /// Parses alternatives; within parentheses, line breaks are white space.
    fn alternatives(&mut self, nested: bool) -> Result<Expression, Error> {
        let mut parts = vec![self.sequence(nested)?];
        while self.eat("|") {
            self.skip_space(true);
            parts.push(self.sequence(nested)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expression::Alternatives(parts) })
    }

    fn sequence(&mut self, nested: bool) -> Result<Expression, Error> {
        let mut parts = Vec::new();
        loop {
            self.skip_space(nested);
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.next();
                    Expression::Class { ranges: vec![('\0', char::MAX)], is_negated: false }
                }
                Some('(') => {
                    self.next();
                    self.depth += 1;
                    if self.depth > MAX_NESTING {
                        let (kind, what) = ("grammar", "levels of brackets");
                        return Err(Error::TooLarge { kind, what, limit: MAX_NESTING, found: self.depth });
                    }
                    let inner = self.alternatives(true)?;
                    self.depth -= 1;
                    self.skip_space(true);
                    if !self.eat(")") {
                        return Err(self.expected("\")\""));
                    }
                    inner
                }
                Some('<' | '!') => {
                    let problem = "special tokens such as <[1]> or <name> cannot be used; write text in quotes";
                    return Err(self.error_at(self.offset, problem.into()));
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' => {
                    let start = self.offset;
                    let name = self.name().ok_or_else(|| self.expected("the name of a rule"))?;
                    Expression::Rule(self.index_of(name, start))
                }
                _ => break,
            };
            parts.push(self.repeated(item, nested)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expression::Sequence(parts) })
    }

    /// Applies the repetitions that follow an item.
    fn repeated(&mut self, mut item: Expression, nested: bool) -> Result<Expression, Error> {
        let mut num_repeats = 0;
        loop {
            self.skip_space(nested);
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.next();
                    self.bounds()?
                }
                _ => return Ok(item),
            };
            self.next();
            num_repeats += 1;
            if num_repeats > MAX_NESTING {
                return Err(self.expected("fewer repetitions of one item"));
            }
            item = Expression::Repeat { what: Box::new(item), min, max };
        }
    }

    /// Parses the bounds of a repetition up to its closing brace.
    fn bounds(&mut self) -> Result<(usize, Option<usize>), Error> {
        let min = self.number()?.ok_or_else(|| self.expected("a number"))?;
        let max = if self.eat(",") { self.number()? } else { Some(min) };
        if self.peek() != Some('}') {
            return Err(self.expected("\"}\""));
        }
        match max {
            Some(max) if max < min => {
                Err(self.error_at(self.offset, format!("expected at least {min} after the comma, found {max}")))
            }
            max => Ok((min, max)),
        }
    }

    fn number(&mut self) -> Result<Option<usize>, Error> {
        self.skip_space(false);
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if len == 0 {
            return Ok(None);
        }
        let number = rest[..len].parse().ok().filter(|&number: &usize| number <= MAX_REPEAT);
        let number = number.ok_or_else(|| self.expected(&format!("a number up to {MAX_REPEAT}")))?;
        self.offset += len;
        self.skip_space(false);
        Ok(Some(number))
    }

    fn literal(&mut self) -> Result<Expression, Error> {
        let start = self.offset;
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(Expression::Literal(text)),
                Some('\\') => text.push(self.escape()?),
                Some(c) if c != '\n' => text.push(c),
                _ => return Err(self.error_at(start, "expected a closing \" on this line".into())),
            }
        }
    }

    fn class(&mut self) -> Result<Expression, Error> {
        let start = self.offset;
        self.next();
        let is_negated = self.eat("^");
        let mut ranges = Vec::new();
        loop {
            let low = match self.next() {
                Some(']') if !ranges.is_empty() => return Ok(Expression::Class { ranges, is_negated }),
                Some('\\') => self.escape()?,
                Some(c) if c != ']' && c != '\n' => c,
                _ => return Err(self.error_at(start, "expected characters and a closing ] on this line".into())),
            };
            let mut after = self.rest().chars();
            let high = match (after.next(), after.next()) {
                (Some('-'), Some(c)) if c != ']' => {
                    self.next();
                    match self.next() {
                        Some('\\') => self.escape()?,
                        Some(c) => c,
                        None => return Err(self.expected("the end of the range")),
                    }
                }
                _ => low,
            };
            if high < low {
                return Err(self.error_at(start, format!("the range {low:?}-{high:?} is empty")));
            }
            ranges.push((low, high));
        }
    }

    /// Parses an escape sequence after its backslash.
    fn escape(&mut self) -> Result<char, Error> {
        let num_digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '.' | '/' | '\'')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.error_at(self.offset.min(self.text.len()), "unknown escape sequence".into())),
        };
        let digits = self.rest().get(..num_digits);
        let c = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).and_then(char::from_u32);
        let c = c.ok_or_else(|| self.expected(&format!("{num_digits} hexadecimal digits of a character")))?;
        self.offset += num_digits;
        Ok(c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        Grammar::parse(text).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn problems_name_the_line() {
        for (text, expected) in [
            ("root ::= a", "line 1: no rule is called a"),
            ("\n\nroot ::= \"a", "line 3: expected a closing \""),
            ("root ::= [z-a]", "line 1: the range 'z'-'a' is empty"),
            ("root ::= \"a\"{3,2}", "line 1: expected at least 3"),
            ("root ::= \"a\"{9999999}", "line 1: expected a number up to 2000"),
            ("root ::= (\"a\"", "line 1: expected \")\", found the end"),
            ("root ::= \"a\" )", "line 1: expected the end of the rule"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule root is defined twice"),
            ("root = \"a\" # ::=", "line 1: expected \"::=\""),
            ("root ::= <[1]>", "line 1: special tokens"),
            ("root ::= \"\\q\"", "line 1: unknown escape sequence"),
            ("a ::= \"a\"", "expected a rule named root"),
        ] {
            assert!(problem(text).contains(expected), "{text}: {}", problem(text));
        }
        assert!(problem(&format!("root ::= {}", "(".repeat(300))).contains("levels of brackets"));
    }

    #[test]
    fn rules_may_continue_on_further_lines() {
        let text = "root ::=\n  \"a\" |\n  (\"b\"\n   \"c\")?\n\n# end\nx ::= [\\x41-\\x5A\\u00e9\\]-] .\n";
        let grammar = Grammar::parse(text).unwrap();
        assert_eq!(grammar.rules.len(), 2);
        let class =
            Expression::Class { ranges: vec![('A', 'Z'), ('é', 'é'), (']', ']'), ('-', '-')], is_negated: false };
        let any = Expression::Class { ranges: vec![('\0', char::MAX)], is_negated: false };
        assert_eq!(grammar.rules[1], Expression::Sequence(vec![class, any]));
    }
}
