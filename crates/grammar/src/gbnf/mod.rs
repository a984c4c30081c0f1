//! Grammars of llama.cpp (GBNF), translated to Lark.
//!
//! The parser works with a lexer: a terminal is a regular expression, and the longest match wins. GBNF knows single
//! characters only. A rule that does not refer to itself, directly or through others, is regular and becomes a
//! terminal; the others become rules over terminals. The GBNF grammar allows every reply that the translation allows.
//! Where two terminals compete within a recursive rule, the longest match can exclude a reply that GBNF allows.

mod parse;

use crate::Error;

/// An expression of a grammar.
#[derive(Debug, Clone, PartialEq)]
enum Expression {
    Literal(String),
    /// Ranges of characters, and whether they are excluded.
    Class {
        ranges: Vec<(char, char)>,
        is_negated: bool,
    },
    /// Index of a rule.
    Rule(usize),
    Sequence(Vec<Expression>),
    Alternatives(Vec<Expression>),
    Repeat {
        what: Box<Expression>,
        min: usize,
        max: Option<usize>,
    },
}

/// Whether a grammar is GBNF: only GBNF has `::=`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// Translates a grammar to Lark.
pub(crate) fn to_lark(text: &str) -> Result<String, Error> {
    let grammar = parse::Grammar::parse(text)?;
    let rules = &grammar.rules;
    let is_recursive = recursive_rules(rules);
    let is_nullable = nullable_rules(rules);
    let writer = Writer { is_recursive: &is_recursive, is_nullable: &is_nullable };
    let mut lark = String::from("start: ");
    writer.write(&Expression::Rule(grammar.root), false, &mut lark);
    lark.push('\n');
    for (index, rule) in rules.iter().enumerate() {
        lark.push_str(&writer.name(index));
        lark.push_str(": ");
        writer.write(rule, !is_recursive[index], &mut lark);
        lark.push('\n');
    }
    Ok(lark)
}

/// Finds the rules that can reach themselves, or a rule that can.
fn recursive_rules(rules: &[Expression]) -> Vec<bool> {
    let references: Vec<Vec<usize>> = rules.iter().map(references).collect();
    // A rule is regular once all rules that it refers to are.
    let mut is_regular = vec![false; rules.len()];
    let mut num_open: Vec<usize> = references.iter().map(Vec::len).collect();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    for (index, references) in references.iter().enumerate() {
        references.iter().for_each(|&reference| users[reference].push(index));
    }
    let mut ready: Vec<usize> = (0..rules.len()).filter(|&index| num_open[index] == 0).collect();
    while let Some(index) = ready.pop() {
        is_regular[index] = true;
        for &user in &users[index] {
            num_open[user] -= 1;
            if num_open[user] == 0 {
                ready.push(user);
            }
        }
    }
    is_regular.into_iter().map(|is_regular| !is_regular).collect()
}

/// Returns the rules that an expression refers to, each once.
fn references(expression: &Expression) -> Vec<usize> {
    let mut found = Vec::new();
    let mut open = vec![expression];
    while let Some(expression) = open.pop() {
        match expression {
            Expression::Rule(index) => found.push(*index),
            Expression::Sequence(parts) | Expression::Alternatives(parts) => open.extend(parts),
            Expression::Repeat { what, .. } => open.push(what),
            Expression::Literal(_) | Expression::Class { .. } => {}
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Finds the rules that match the empty text.
fn nullable_rules(rules: &[Expression]) -> Vec<bool> {
    let mut is_nullable = vec![false; rules.len()];
    loop {
        let mut has_changed = false;
        for (index, rule) in rules.iter().enumerate() {
            if !is_nullable[index] && matches_empty(rule, &is_nullable) {
                is_nullable[index] = true;
                has_changed = true;
            }
        }
        if !has_changed {
            return is_nullable;
        }
    }
}

fn matches_empty(expression: &Expression, is_nullable: &[bool]) -> bool {
    match expression {
        Expression::Literal(text) => text.is_empty(),
        Expression::Class { .. } => false,
        Expression::Rule(index) => is_nullable[*index],
        Expression::Sequence(parts) => parts.iter().all(|part| matches_empty(part, is_nullable)),
        Expression::Alternatives(parts) => parts.iter().any(|part| matches_empty(part, is_nullable)),
        Expression::Repeat { what, min, .. } => *min == 0 || matches_empty(what, is_nullable),
    }
}

/// Writes expressions in Lark syntax.
struct Writer<'g> {
    is_recursive: &'g [bool],
    is_nullable: &'g [bool],
}

impl Writer<'_> {
    fn name(&self, rule: usize) -> String {
        if self.is_recursive[rule] { format!("rule_{rule}") } else { format!("TERMINAL_{rule}") }
    }

    fn write(&self, expression: &Expression, in_terminal: bool, lark: &mut String) {
        match expression {
            Expression::Literal(text) => lark.push_str(&serde_json::Value::from(text.as_str()).to_string()),
            Expression::Class { ranges, is_negated } => {
                lark.push_str(if *is_negated { "/[^" } else { "/[" });
                for (low, high) in ranges {
                    let range = format!("\\x{{{:x}}}-\\x{{{:x}}}", u32::from(*low), u32::from(*high));
                    lark.push_str(&range);
                }
                lark.push_str("]/");
            }
            Expression::Rule(index) => {
                lark.push_str(&self.name(*index));
                // A terminal is never matched by the empty text, so a rule may leave it out instead.
                if !in_terminal && self.is_nullable[*index] && !self.is_recursive[*index] {
                    lark.push('?');
                }
            }
            Expression::Sequence(parts) if parts.is_empty() => lark.push_str("\"\""),
            Expression::Sequence(parts) => self.join(parts, " ", in_terminal, lark),
            Expression::Alternatives(parts) => self.join(parts, " | ", in_terminal, lark),
            Expression::Repeat { what, min, max } => {
                lark.push('(');
                self.write(what, in_terminal, lark);
                lark.push(')');
                match (min, max) {
                    (0, None) => lark.push('*'),
                    (1, None) => lark.push('+'),
                    (0, Some(1)) => lark.push('?'),
                    (min, Some(max)) => lark.push_str(&format!("{{{min},{max}}}")),
                    (min, None) => lark.push_str(&format!("{{{min},}}")),
                }
            }
        }
    }

    fn join(&self, parts: &[Expression], separator: &str, in_terminal: bool, lark: &mut String) {
        lark.push('(');
        for (index, part) in parts.iter().enumerate() {
            lark.push_str(if index == 0 { "" } else { separator });
            self.write(part, in_terminal, lark);
        }
        lark.push(')');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_rules_become_terminals_and_recursive_ones_rules() {
        let lark = to_lark("root ::= \"(\" list \")\" # comment\nlist ::= item | item \",\" list\nitem ::= [a-z]+\n");
        let expected = "start: TERMINAL_0\n";
        assert_ne!(lark.as_deref().unwrap_or(""), expected);
        assert_eq!(
            lark.unwrap(),
            "start: rule_0\nrule_0: (\"(\" rule_1 \")\")\nrule_1: (TERMINAL_2 | (TERMINAL_2 \",\" rule_1))\n\
             TERMINAL_2: (/[\\x{61}-\\x{7a}]/)+\n"
        );
    }

    #[test]
    fn terminals_that_match_the_empty_text_are_optional_in_rules() {
        let lark = to_lark("root ::= ws root | \"a\"\nws ::= \" \"*").unwrap();
        assert_eq!(lark, "start: rule_0\nrule_0: ((TERMINAL_1? rule_0) | \"a\")\nTERMINAL_1: (\" \")*\n");
    }
}
