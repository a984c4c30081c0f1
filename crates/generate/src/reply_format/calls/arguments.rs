//! Turns the arguments of a call into JSON while their text grows. What was returned is always the beginning of the
//! JSON text of the whole.

use pellucid_grammar::{ArgumentSyntax, Parameter, Piece, ValueKind};
use serde_json::Value;

use super::super::thoughts::longest_beginning;

/// Converts the arguments of one call.
#[derive(Debug, Clone)]
pub(super) enum Converter {
    Json(ValueScanner),
    Parameters(ParameterConverter),
    Python(PythonConverter),
    Quoted(QuotedConverter),
}

impl Converter {
    pub(super) fn new(syntax: ArgumentSyntax, parameters: &[Parameter]) -> Converter {
        match syntax {
            ArgumentSyntax::Json => Converter::Json(ValueScanner::default()),
            ArgumentSyntax::Parameters(pieces) => Converter::Parameters(ParameterConverter {
                pieces,
                kinds: parameters.iter().map(|parameter| (parameter.name.clone(), parameter.kind.clone())).collect(),
                num_keys: 0,
                key: String::new(),
                state: ParameterState::Start,
            }),
            ArgumentSyntax::Python => Converter::Python(PythonConverter { num_keys: 0, state: PythonState::Start }),
            ArgumentSyntax::Quoted(quote) => {
                Converter::Quoted(QuotedConverter { quote, open: Vec::new(), state: QuotedState::Value })
            }
        }
    }

    /// Takes text from `held`, and adds the JSON that it decides to `out`. Returns whether the arguments are complete.
    pub(super) fn push(&mut self, held: &mut String, out: &mut String) -> bool {
        match self {
            Converter::Json(scanner) => scanner.push(held, out),
            Converter::Parameters(converter) => {
                while converter.advance(held, out) {}
                matches!(converter.state, ParameterState::End)
            }
            Converter::Python(converter) => {
                while converter.advance(held, out) {}
                matches!(converter.state, PythonState::End)
            }
            Converter::Quoted(converter) => {
                while converter.advance(held, out) {}
                matches!(converter.state, QuotedState::End)
            }
        }
    }
}

/// Removes the first `num_bytes` bytes of a text and returns them.
fn take(held: &mut String, num_bytes: usize) -> String {
    let rest = held.split_off(num_bytes);
    std::mem::replace(held, rest)
}

/// Returns a text as it stands between the quotes of a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Adds the text before `end` to a JSON string that is open; returns whether the string is complete.
fn push_string(held: &mut String, end: &str, out: &mut String) -> bool {
    let (num_text, is_complete) = match held.find(end) {
        Some(at) => (at, true),
        None => (held.len() - longest_beginning(held, end), false),
    };
    out.push_str(&escaped(&take(held, num_text)));
    if is_complete {
        take(held, end.len());
        out.push('"');
    }
    is_complete
}

/// Finds the end of a JSON value, or of a Python literal whose constants it translates.
#[derive(Debug, Clone, Default)]
pub(super) struct ValueScanner {
    depth: usize,
    is_string: bool,
    is_escaped: bool,
    /// A number or a constant, which is complete when another character follows.
    word: String,
}

impl ValueScanner {
    /// Takes text of the value; returns whether it is complete.
    fn push(&mut self, held: &mut String, out: &mut String) -> bool {
        let mut num_taken = 0;
        let mut is_complete = false;
        for c in held.chars() {
            if self.is_string {
                num_taken += c.len_utf8();
                out.push(c);
                match c {
                    _ if self.is_escaped => self.is_escaped = false,
                    '\\' => self.is_escaped = true,
                    '"' => self.is_string = false,
                    _ => {}
                }
                is_complete = !self.is_string && self.depth == 0;
            } else if c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.') {
                num_taken += c.len_utf8();
                self.word.push(c);
            } else if !self.word.is_empty() && self.depth == 0 {
                self.end_word(out);
                is_complete = true;
            } else {
                self.end_word(out);
                num_taken += c.len_utf8();
                out.push(c);
                match c {
                    '"' => self.is_string = true,
                    '{' | '[' => self.depth += 1,
                    '}' | ']' => self.depth = self.depth.saturating_sub(1),
                    _ => {}
                }
                is_complete = matches!(c, '}' | ']') && self.depth == 0;
            }
            if is_complete {
                break;
            }
        }
        take(held, num_taken);
        is_complete
    }

    fn end_word(&mut self, out: &mut String) {
        let word = std::mem::take(&mut self.word);
        out.push_str(match word.as_str() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => word,
        });
    }
}

/// Adds the name of an argument.
fn push_key(key: &str, num_keys: &mut usize, out: &mut String) {
    if *num_keys > 0 {
        out.push_str(", ");
    }
    *num_keys += 1;
    out.push_str(&format!("\"{}\": ", escaped(key)));
}

/// Converts arguments that are written one by one, between markers.
#[derive(Debug, Clone)]
pub(super) struct ParameterConverter {
    pieces: &'static [Piece],
    kinds: Vec<(String, ValueKind)>,
    num_keys: usize,
    key: String,
    state: ParameterState,
}

#[derive(Debug, Clone)]
enum ParameterState {
    Start,
    /// Before a parameter, or behind the last.
    Between,
    /// A piece of a parameter.
    Piece(usize),
    /// Text of a value, as a JSON string.
    Text(usize),
    /// A JSON value.
    Json(usize, ValueScanner),
    End,
}

impl ParameterConverter {
    /// Returns the text of the piece at an index, if it has one.
    fn text(&self, index: usize) -> &'static str {
        match self.pieces.get(index) {
            Some(Piece::Text(text)) => text,
            _ => "",
        }
    }

    fn advance(&mut self, held: &mut String, out: &mut String) -> bool {
        match &mut self.state {
            ParameterState::Start => {
                out.push('{');
                self.state = ParameterState::Between;
                true
            }
            ParameterState::Between => {
                let open = self.pieces.iter().position(|piece| matches!(piece, Piece::Text(_))).unwrap_or(0);
                let text = held.trim_start();
                let marker = self.text(open);
                if text.starts_with(marker) {
                    let num_bytes = held.len() - text.len() + marker.len();
                    take(held, num_bytes);
                    self.state = ParameterState::Piece(open + 1);
                    return true;
                }
                if !marker.starts_with(text) {
                    out.push('}');
                    self.state = ParameterState::End;
                }
                false
            }
            ParameterState::Piece(index) => {
                let index = *index;
                self.read_piece(index, held, out)
            }
            ParameterState::Text(index) => {
                let index = *index;
                let is_complete = push_string(held, self.text(index), out);
                if is_complete {
                    self.state = ParameterState::Piece(index + 1);
                }
                is_complete
            }
            ParameterState::Json(index, scanner) => {
                let is_complete = scanner.push(held, out);
                if is_complete {
                    self.state = ParameterState::Piece(*index);
                }
                is_complete
            }
            ParameterState::End => false,
        }
    }

    fn read_piece(&mut self, index: usize, held: &mut String, out: &mut String) -> bool {
        let Some(piece) = self.pieces.get(index) else {
            self.state = ParameterState::Between;
            return true;
        };
        match piece {
            Piece::Text(text) => {
                if !held.starts_with(text) {
                    return false;
                }
                take(held, text.len());
            }
            Piece::Space => {
                let num_bytes = held.len() - held.trim_start().len();
                take(held, num_bytes);
                if held.is_empty() {
                    return false;
                }
            }
            Piece::Key => {
                let Some(at) = held.find(self.text(index + 1)) else { return false };
                self.key = take(held, at);
                push_key(&self.key, &mut self.num_keys, out);
            }
            Piece::Value => return self.begin_value(index + 1, held, out),
            _ => {}
        }
        self.state = ParameterState::Piece(index + 1);
        true
    }

    /// Begins a value; `next` is the index of the text behind it.
    fn begin_value(&mut self, next: usize, held: &mut String, out: &mut String) -> bool {
        let kind = self.kinds.iter().find(|(key, _)| *key == self.key).map(|(_, kind)| kind);
        match kind {
            Some(ValueKind::TextOr(types)) => {
                let end = self.text(next);
                let Some(at) = held.find(end) else { return false };
                let text = take(held, at);
                take(held, end.len());
                if types.has(&text) {
                    out.push_str(&text);
                } else {
                    out.push_str(&Value::from(text).to_string());
                }
                self.state = ParameterState::Piece(next + 1);
            }
            Some(ValueKind::Json) => self.state = ParameterState::Json(next, ValueScanner::default()),
            _ => {
                out.push('"');
                self.state = ParameterState::Text(next);
            }
        }
        true
    }
}

/// Converts keyword arguments of Python.
#[derive(Debug, Clone)]
pub(super) struct PythonConverter {
    num_keys: usize,
    state: PythonState,
}

#[derive(Debug, Clone)]
enum PythonState {
    Start,
    /// Before a keyword, or at the closing bracket.
    Key,
    Value(ValueScanner),
    /// Behind a value.
    After,
    End,
}

impl PythonConverter {
    fn advance(&mut self, held: &mut String, out: &mut String) -> bool {
        match &mut self.state {
            PythonState::Start => {
                out.push('{');
                self.state = PythonState::Key;
            }
            PythonState::Key => {
                let text = held.trim_start();
                if text.starts_with(')') {
                    out.push('}');
                    self.state = PythonState::End;
                    return false;
                }
                let Some((key, rest)) = text.split_once('=') else { return false };
                push_key(key, &mut self.num_keys, out);
                *held = rest.to_owned();
                self.state = PythonState::Value(ValueScanner::default());
            }
            PythonState::Value(scanner) => {
                if !scanner.push(held, out) {
                    return false;
                }
                self.state = PythonState::After;
            }
            PythonState::After => {
                *held = held.trim_start().to_owned();
                if let Some(rest) = held.strip_prefix(',') {
                    *held = rest.to_owned();
                } else if held.is_empty() {
                    return false;
                }
                self.state = PythonState::Key;
            }
            PythonState::End => return false,
        }
        true
    }
}

/// Converts objects whose keys have no quotes and whose texts have marks of their own.
#[derive(Debug, Clone)]
pub(super) struct QuotedConverter {
    quote: &'static str,
    /// Objects (`true`) and arrays that are open.
    open: Vec<bool>,
    state: QuotedState,
}

#[derive(Debug, Clone)]
enum QuotedState {
    /// Before a value.
    Value,
    /// Before a key or the end of an object.
    Key,
    /// Before a value or the end of an array.
    Item,
    Text,
    /// Behind a value.
    After,
    End,
}

impl QuotedConverter {
    fn advance(&mut self, held: &mut String, out: &mut String) -> bool {
        let first = held.chars().next();
        match self.state {
            QuotedState::Key | QuotedState::Item if matches!(first, Some('}' | ']')) => self.close(held, out),
            QuotedState::Key => {
                let Some(at) = held.find(':') else { return false };
                let key = take(held, at);
                take(held, 1);
                out.push_str(&format!("\"{}\": ", escaped(&key)));
                self.state = QuotedState::Value;
            }
            QuotedState::Value | QuotedState::Item => match first {
                Some(open @ ('{' | '[')) => {
                    take(held, 1);
                    out.push(open);
                    self.open.push(open == '{');
                    self.state = if open == '{' { QuotedState::Key } else { QuotedState::Item };
                }
                Some(_) if held.starts_with(self.quote) => {
                    take(held, self.quote.len());
                    out.push('"');
                    self.state = QuotedState::Text;
                }
                Some(_) if self.quote.starts_with(held.as_str()) => return false,
                _ => {
                    let Some(at) = held.find([',', '}', ']']) else { return false };
                    out.push_str(&take(held, at));
                    self.state = QuotedState::After;
                }
            },
            QuotedState::Text => {
                if !push_string(held, self.quote, out) {
                    return false;
                }
                self.state = QuotedState::After;
            }
            QuotedState::After => match first {
                Some(',') => {
                    take(held, 1);
                    out.push_str(", ");
                    let is_object = self.open.last().copied().unwrap_or(false);
                    self.state = if is_object { QuotedState::Key } else { QuotedState::Value };
                }
                Some('}' | ']') => self.close(held, out),
                _ => return false,
            },
            QuotedState::End => return false,
        }
        true
    }

    fn close(&mut self, held: &mut String, out: &mut String) {
        out.push_str(&take(held, 1));
        self.open.pop();
        self.state = if self.open.is_empty() { QuotedState::End } else { QuotedState::After };
    }
}
