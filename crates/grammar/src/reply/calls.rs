//! The grammar of calls: from the rows of the table and the schemas of the tools to the syntax of Lark.

use std::fmt::Write;

use pellucid_tokenizer::Tokenizer;
use serde_json::Value;

use super::format::{ArgumentSyntax, CallFormat, Piece};
use super::parameters::{Parameter, ValueKind, parameters, resolve, with_definitions};
use crate::{Error, compiler, schema};

/// White space between pieces: a space, or line breaks with indentation. Without a bound, a model can fill a reply
/// with it.
const SPACE: &str = r"/ |\n{1,2}[ \t]{0,8}/";

/// Calls of tools in a format.
#[derive(Debug, Clone, PartialEq)]
pub struct CallSource {
    /// Row of the table of formats.
    pub format: &'static CallFormat,
    /// Tools that may be called.
    pub tools: Vec<CallTool>,
    /// Whether a reply may hold several calls.
    pub is_parallel: bool,
    /// Whether a reply must hold a call. Then a vocabulary that cannot spell every call is an error; otherwise a reply
    /// that begins such a call ends with an error.
    pub is_required: bool,
}

/// A tool that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct CallTool {
    /// Name of the tool.
    pub name: String,
    /// JSON schema of its arguments, which are an object.
    pub parameters: Value,
    /// Whether a keyword of the schema that is not enforced is an error. Otherwise it is left out, and
    /// [`CompiledGrammar::not_enforced`](crate::CompiledGrammar::not_enforced) names it.
    pub is_strict: bool,
}

/// A part of a tool's schema that calls need not satisfy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotEnforced {
    /// Name of the tool.
    pub tool: String,
    /// JSON pointer to the keyword in the schema, such as `#/properties/tags/uniqueItems`.
    pub place: String,
}

impl CallTool {
    /// Returns the parameters of a tool whose format writes each argument by itself.
    pub fn parameters(&self) -> Result<Vec<Parameter>, Error> {
        parameters(&self.parameters).map_err(|error| error.in_tool(&self.name))
    }
}

/// Returns the grammar of calls, the text before the first included. Adds parts of the schemas that the format cannot
/// enforce to `left_out`.
pub(crate) fn lark(
    source: &CallSource,
    tokenizer: &Tokenizer,
    left_out: &mut Vec<NotEnforced>,
) -> Result<String, Error> {
    let mut writer = Writer {
        tokenizer,
        rules: String::new(),
        num_rules: 0,
        is_strict: true,
        left_out: Vec::new(),
        has_any_value: false,
    };
    let names: Vec<String> = (0..source.tools.len()).map(|index| format!("call_{index}")).collect();
    for (tool, rule) in source.tools.iter().zip(&names) {
        schema::check(&tool.parameters).map_err(|error| error.in_tool(&tool.name))?;
        writer.is_strict = tool.is_strict;
        let body = writer.call(source.format, tool).map_err(|error| error.in_tool(&tool.name))?;
        let places = writer.left_out.drain(..);
        left_out.extend(places.map(|place| NotEnforced { tool: tool.name.clone(), place }));
        writer.rule(rule, &body);
    }
    let format = source.format;
    let (open, close) = (writer.text(format.open), writer.text(format.close));
    let more = match format.separator.filter(|_| source.is_parallel) {
        Some(separator) => format!(" (SPACE? {} SPACE? call)*", writer.text(separator)),
        None => String::new(),
    };
    let space = if format.close.is_empty() { "" } else { "SPACE?" };
    let start = format!("{open} call{more} {space} {close}");
    writer.rule("start", &start);
    writer.rule("call", &names.join(" | "));
    writer.rule("SPACE", SPACE);
    Ok(writer.rules)
}

pub(super) struct Writer<'t> {
    tokenizer: &'t Tokenizer,
    rules: String,
    pub(super) num_rules: usize,
    /// Whether a value that the format cannot write is refused.
    pub(super) is_strict: bool,
    /// Places of values of the current tool that may be anything.
    pub(super) left_out: Vec<String>,
    /// Whether the rule for any value was written.
    pub(super) has_any_value: bool,
}

impl Writer<'_> {
    pub(super) fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    fn fresh(&mut self) -> String {
        self.num_rules += 1;
        format!("r{}", self.num_rules)
    }

    /// Adds a rule and returns its name.
    pub(super) fn add(&mut self, body: &str) -> String {
        let name = self.fresh();
        self.rule(&name, body);
        name
    }

    /// Returns a text that may be spelled with ordinary tokens, or with the tokens that mark structure.
    pub(super) fn text(&self, text: &str) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        let flush = |plain: &mut String, parts: &mut Vec<String>| {
            if !plain.is_empty() {
                parts.push(quoted(plain));
                plain.clear();
            }
        };
        while let Some(first) = rest.chars().next() {
            match structure_token(self.tokenizer, rest) {
                Some((piece, id)) => {
                    flush(&mut plain, &mut parts);
                    // A token that ends the reply is no part of its text.
                    if !self.tokenizer.end_ids().contains(&id) {
                        parts.push(format!("(<[{id}]> | {})", quoted(piece)));
                    }
                    rest = &rest[piece.len()..];
                }
                None => {
                    plain.push(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        flush(&mut plain, &mut parts);
        parts.join(" ")
    }

    fn call(&mut self, format: &CallFormat, tool: &CallTool) -> Result<String, Error> {
        let mut parts = Vec::new();
        for piece in format.call {
            match piece {
                Piece::Text(text) => parts.push(self.text(text)),
                Piece::Space => parts.push("SPACE?".into()),
                Piece::Name => parts.push(quoted(&tool.name)),
                Piece::Digits => parts.push("/[0-9]{1,4}/".into()),
                Piece::Id => parts.push("/[a-zA-Z0-9]{9}/".into()),
                Piece::Arguments => {
                    let arguments = self.arguments(format.arguments, &tool.parameters)?;
                    parts.push(self.add(&arguments));
                }
                Piece::Key | Piece::Value => {}
            }
        }
        Ok(parts.join(" "))
    }

    fn arguments(&mut self, syntax: ArgumentSyntax, schema: &Value) -> Result<String, Error> {
        match syntax {
            ArgumentSyntax::Json => Ok(json_rule(schema)),
            ArgumentSyntax::Parameters(pieces) => {
                let mut parts = Vec::new();
                for parameter in parameters(schema)? {
                    let rule = self.parameter(pieces, &parameter);
                    let rule = self.add(&rule);
                    parts.push(if parameter.is_required { rule } else { format!("{rule}?") });
                }
                Ok(if parts.is_empty() { "\"\"".into() } else { parts.join(" ") })
            }
            ArgumentSyntax::Python => {
                let mut members = Vec::new();
                for parameter in parameters(schema)? {
                    let value = python_value(&parameter.schema, schema);
                    members
                        .push((format!("{} {value}", quoted(&format!("{}=", parameter.name))), parameter.is_required));
                }
                Ok(self.list(&members, "\",\" SPACE?"))
            }
            ArgumentSyntax::Quoted(quote) => self.quoted_arguments(quote, schema),
        }
    }

    /// Returns one argument of a format that writes it between two texts.
    fn parameter(&mut self, pieces: &[Piece], parameter: &Parameter) -> String {
        let mut parts = Vec::new();
        let mut pieces = pieces.iter().peekable();
        while let Some(piece) = pieces.next() {
            match piece {
                Piece::Text(text) => parts.push(self.text(text)),
                Piece::Space => parts.push("SPACE?".into()),
                Piece::Key => parts.push(quoted(&parameter.name)),
                Piece::Value => {
                    let end = match pieces.peek() {
                        Some(Piece::Text(text)) => text,
                        _ => "",
                    };
                    let body = match &parameter.kind {
                        ValueKind::Text { min, max } => {
                            pieces.next();
                            self.text_until(end, *min, *max)
                        }
                        ValueKind::TextOr(_) => {
                            pieces.next();
                            self.text_until(end, 0, None)
                        }
                        ValueKind::Choice(choices) => format!("({})", alternatives(choices)),
                        ValueKind::Json => json_rule(&parameter.schema),
                    };
                    parts.push(self.add(&body));
                }
                _ => {}
            }
        }
        parts.join(" ")
    }

    /// Returns any text up to the first occurrence of `end`, which is included.
    pub(super) fn text_until(&mut self, end: &str, min: u64, max: Option<u64>) -> String {
        let any = match (min, max) {
            (0, None) => "/(?s:.*)/".to_owned(),
            (min, max) => format!("/(?s:.{{{min},{}}})/", max.map_or(String::new(), |max| max.to_string())),
        };
        let spelled = self.fresh();
        self.rule(&format!("{spelled}[suffix={}]", quoted(end)), &any);
        let ends_with_token = structure_token(self.tokenizer, end).is_some();
        if !ends_with_token {
            return spelled;
        }
        let name = self.fresh().to_uppercase();
        let with_end = format!("/(?s:.*){}(?s:.*)/", escaped(end));
        self.rule(&name, &format!("{any} & ~{with_end}"));
        format!("{spelled} | {name} {}", self.text(end))
    }

    /// Returns members in their order, separated; those that are not required may be left out.
    pub(super) fn list(&mut self, members: &[(String, bool)], separator: &str) -> String {
        // `rest` follows a member, `first` follows none.
        let (mut first, mut rest) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (member, is_required) in members.iter().rev() {
            let member = self.add(member);
            let (mut next_first, mut next_rest) = (format!("{member} {rest}"), format!("{separator} {member} {rest}"));
            if !is_required {
                next_first = format!("{next_first} | {first}");
                next_rest = format!("{next_rest} | {rest}");
            }
            first = self.add(&next_first);
            rest = self.add(&next_rest);
        }
        first
    }
}

/// Returns the grammar of a value as Python writes it. Within lists and dictionaries, JSON's names of constants are
/// used.
fn python_value(schema: &Value, root: &Value) -> String {
    let schema = resolve(schema, root);
    let constants = |value: &Value| match value {
        Value::Null => Some("\"None\"".to_owned()),
        Value::Bool(true) => Some("\"True\"".to_owned()),
        Value::Bool(false) => Some("\"False\"".to_owned()),
        Value::Number(number) => Some(quoted(&number.to_string())),
        Value::String(text) => Some(quoted(&Value::from(text.as_str()).to_string())),
        _ => None,
    };
    let whole = || json_rule(&with_definitions(schema, root));
    let Value::Object(members) = schema else { return whole() };
    let values = match (members.get("enum"), members.get("const")) {
        (Some(Value::Array(values)), _) => Some(values.clone()),
        (_, Some(value)) => Some(vec![value.clone()]),
        _ => None,
    };
    if let Some(values) = values {
        let spelled: Option<Vec<String>> = values.iter().map(constants).collect();
        return spelled.map_or_else(whole, |values| format!("({})", values.join(" | ")));
    }
    if let Some(Value::Array(schemas)) = members.get("anyOf") {
        let is_plain = members.keys().all(|name| {
            matches!(name.as_str(), "anyOf" | "title" | "description" | "default" | "$defs" | "definitions")
        });
        if is_plain && !schemas.is_empty() {
            let parts: Vec<String> =
                schemas.iter().map(|schema| python_value(&with_definitions(schema, root), root)).collect();
            return format!("({})", parts.join(" | "));
        }
    }
    match members.get("type").and_then(Value::as_str) {
        Some("boolean") => "(\"True\" | \"False\")".into(),
        Some("null") => "\"None\"".into(),
        _ => whole(),
    }
}

/// Returns the token that marks structure with which a text begins: the longest.
pub(super) fn structure_token<'t>(tokenizer: &Tokenizer, text: &'t str) -> Option<(&'t str, u32)> {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8()).take(64);
    let pieces: Vec<&str> = ends.map(|end| &text[..end]).collect();
    pieces.into_iter().rev().find_map(|piece| {
        let id = tokenizer.id_of(piece)?;
        crate::vocabulary::is_structure(tokenizer, id).then_some((piece, id))
    })
}

pub(super) fn json_rule(schema: &Value) -> String {
    format!("%json {}", compiler::call_schema(schema))
}

fn alternatives(choices: &[String]) -> String {
    choices.iter().map(|choice| quoted(choice)).collect::<Vec<_>>().join(" | ")
}

/// Returns a text in quotes.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns an expression that matches a text.
fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '\n' => "\\n".to_owned(),
        c if r"\/.+*?()|[]{}^$".contains(c) => format!("\\{c}"),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}
