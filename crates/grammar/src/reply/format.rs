//! The formats in which models write calls of tools: one table, from which prompts, grammars and splitters are made.
//!
//! A row says how a call begins, how calls are separated and how they end, as a list of pieces. `docs/tool-formats.md`
//! shows each row with an example.

use Piece::{Arguments as A, Digits, Id, Key as K, Name as N, Space as S, Text as T, Value as V};

/// A step of the text of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// This text, of which parts may be control tokens.
    Text(&'static str),
    /// White space, which may be missing.
    Space,
    /// Name of the tool.
    Name,
    /// Arguments of the call.
    Arguments,
    /// A number, which has no meaning here.
    Digits,
    /// Nine letters and digits, which have no meaning here.
    Id,
    /// Name of a parameter.
    Key,
    /// Value of a parameter: text as it is, up to the text that follows it, or JSON.
    Value,
}

/// The syntax of arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgumentSyntax {
    /// A JSON object.
    Json,
    /// One such list of pieces for each argument.
    Parameters(&'static [Piece]),
    /// Keyword arguments of Python: `a=1, b="x"`.
    Python,
    /// Keys without quotes and texts between quotation marks of this spelling: `{a:1,b:<|"|>x<|"|>}`.
    Quoted(&'static str),
}

/// The syntax of a call's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdSyntax {
    /// `call_` and 24 letters and digits, as in the OpenAI API.
    Usual,
    /// Nine letters and digits: templates of Mistral accept no others.
    NineCharacters,
}

/// One format of calls.
#[derive(Debug)]
pub struct CallFormat {
    /// Name in messages and documents.
    pub name: &'static str,
    /// Texts of the chat template that identify the format; all must occur.
    pub template: &'static [&'static str],
    /// A token of the vocabulary that identifies the format of a template that reads `tools` without showing calls.
    pub token: Option<&'static str>,
    /// Text before the first call.
    pub open: &'static str,
    /// A call.
    pub call: &'static [Piece],
    /// Text between two calls; `None` if a reply has one call at most.
    pub separator: Option<&'static str>,
    /// Text after the last call.
    pub close: &'static str,
    /// Syntax of the arguments.
    pub arguments: ArgumentSyntax,
    /// Whether calls are recognized only at the beginning of the answer, because they open with ordinary text.
    pub is_at_start: bool,
    /// Syntax of ids.
    pub ids: IdSyntax,
}

impl PartialEq for CallFormat {
    fn eq(&self, other: &CallFormat) -> bool {
        self.name == other.name
    }
}

impl Eq for CallFormat {}

const DEFAULT: CallFormat = CallFormat {
    name: "",
    template: &[],
    token: None,
    open: "",
    call: &[],
    separator: Some(""),
    close: "",
    arguments: ArgumentSyntax::Json,
    is_at_start: false,
    ids: IdSyntax::Usual,
};

/// `{"name": "f", "arguments": {…}}`
const JSON_CALL: &[Piece] = &[
    T("{"),
    S,
    T("\"name\""),
    S,
    T(":"),
    S,
    T("\""),
    N,
    T("\""),
    S,
    T(","),
    S,
    T("\"arguments\""),
    S,
    T(":"),
    S,
    A,
    S,
    T("}"),
];

/// `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`
const TAGGED_JSON_CALL: &[Piece] = &[
    T("<tool_call>"),
    S,
    T("{"),
    S,
    T("\"name\""),
    S,
    T(":"),
    S,
    T("\""),
    N,
    T("\""),
    S,
    T(","),
    S,
    T("\"arguments\""),
    S,
    T(":"),
    S,
    A,
    S,
    T("}"),
    S,
    T("</tool_call>"),
];

const TAGGED_PARAMETER: &[Piece] = &[S, T("<parameter="), K, T(">\n"), V, T("\n</parameter>")];

/// Every format; the first row that fits a template is its format. The last is for models without one of their own.
pub const FORMATS: &[CallFormat] = &[
    CallFormat {
        name: "harmony",
        template: &["<|channel|>", "<|call|>"],
        call: &[T("<|channel|>commentary to=functions."), N, T(" <|constrain|>json<|message|>"), A, T("<|call|>")],
        separator: None,
        ..DEFAULT
    },
    CallFormat {
        name: "qwen3-coder",
        template: &["<tool_call>", "<function=", "<parameter="],
        call: &[T("<tool_call>"), S, T("<function="), N, T(">"), A, S, T("</function>"), S, T("</tool_call>")],
        arguments: ArgumentSyntax::Parameters(TAGGED_PARAMETER),
        ..DEFAULT
    },
    CallFormat {
        name: "seed-oss",
        template: &["<seed:tool_call>", "<function=", "<parameter="],
        call: &[
            T("<seed:tool_call>"),
            S,
            T("<function="),
            N,
            T(">"),
            A,
            S,
            T("</function>"),
            S,
            T("</seed:tool_call>"),
        ],
        arguments: ArgumentSyntax::Parameters(&[S, T("<parameter="), K, T(">"), V, T("</parameter>")]),
        ..DEFAULT
    },
    CallFormat {
        name: "glm",
        template: &["<tool_call>", "<arg_key>", "<arg_value>"],
        call: &[T("<tool_call>"), N, A, S, T("</tool_call>")],
        arguments: ArgumentSyntax::Parameters(&[
            S,
            T("<arg_key>"),
            K,
            T("</arg_key>"),
            S,
            T("<arg_value>"),
            V,
            T("</arg_value>"),
        ]),
        ..DEFAULT
    },
    CallFormat {
        name: "minimax",
        template: &["<minimax:tool_call>", "<invoke name="],
        open: "<minimax:tool_call>",
        call: &[S, T("<invoke name=\""), N, T("\">"), A, S, T("</invoke>")],
        close: "</minimax:tool_call>",
        arguments: ArgumentSyntax::Parameters(&[S, T("<parameter name=\""), K, T("\">"), V, T("</parameter>")]),
        ..DEFAULT
    },
    CallFormat {
        name: "gemma4",
        template: &["<|tool_call>call:", "<tool_call|>"],
        call: &[T("<|tool_call>"), T("call:"), N, A, T("<tool_call|>")],
        arguments: ArgumentSyntax::Quoted("<|\"|>"),
        ..DEFAULT
    },
    CallFormat {
        name: "function-gemma",
        template: &["<start_function_call>"],
        call: &[T("<start_function_call>"), T("call:"), N, A, T("<end_function_call>")],
        arguments: ArgumentSyntax::Quoted("<escape>"),
        ..DEFAULT
    },
    CallFormat {
        name: "mistral-id",
        template: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        call: &[T("[TOOL_CALLS]"), N, T("[CALL_ID]"), Id, T("[ARGS]"), A],
        ids: IdSyntax::NineCharacters,
        ..DEFAULT
    },
    CallFormat {
        name: "mistral",
        template: &["[TOOL_CALLS]", "[ARGS]"],
        call: &[T("[TOOL_CALLS]"), N, T("[ARGS]"), A],
        ids: IdSyntax::NineCharacters,
        ..DEFAULT
    },
    CallFormat {
        name: "mistral-list",
        template: &["[TOOL_CALLS]"],
        open: "[TOOL_CALLS][",
        call: JSON_CALL,
        separator: Some(","),
        close: "]",
        ids: IdSyntax::NineCharacters,
        ..DEFAULT
    },
    CallFormat {
        name: "deepseek-v3",
        template: &["<｜tool▁calls▁begin｜>", "```json"],
        open: "<｜tool▁calls▁begin｜>",
        call: &[
            T("<｜tool▁call▁begin｜>"),
            T("function"),
            T("<｜tool▁sep｜>"),
            N,
            T("\n```json\n"),
            A,
            T("\n```"),
            T("<｜tool▁call▁end｜>"),
        ],
        close: "<｜tool▁calls▁end｜>",
        ..DEFAULT
    },
    CallFormat {
        name: "deepseek-v3.1",
        template: &["<｜tool▁calls▁begin｜>"],
        open: "<｜tool▁calls▁begin｜>",
        call: &[T("<｜tool▁call▁begin｜>"), N, T("<｜tool▁sep｜>"), A, T("<｜tool▁call▁end｜>")],
        close: "<｜tool▁calls▁end｜>",
        ..DEFAULT
    },
    CallFormat {
        name: "kimi-k2",
        template: &["<|tool_calls_section_begin|>"],
        open: "<|tool_calls_section_begin|>",
        call: &[
            T("<|tool_call_begin|>"),
            T("functions."),
            N,
            T(":"),
            Digits,
            T("<|tool_call_argument_begin|>"),
            A,
            T("<|tool_call_end|>"),
        ],
        close: "<|tool_calls_section_end|>",
        ..DEFAULT
    },
    CallFormat {
        name: "lfm2",
        template: &["<|tool_call_start|>"],
        token: Some("<|tool_call_start|>"),
        open: "<|tool_call_start|>[",
        call: &[N, T("("), A, T(")")],
        separator: Some(","),
        close: "]<|tool_call_end|>",
        arguments: ArgumentSyntax::Python,
        ..DEFAULT
    },
    CallFormat {
        name: "phi-4",
        template: &["<|tool|>", "<|/tool|>"],
        open: "<|tool_call|>[",
        call: JSON_CALL,
        separator: Some(","),
        close: "]<|/tool_call|>",
        ..DEFAULT
    },
    CallFormat {
        name: "granite-3",
        template: &["<|tool_call|>", "<|start_of_role|>"],
        open: "<|tool_call|>[",
        call: JSON_CALL,
        separator: Some(","),
        close: "]",
        ..DEFAULT
    },
    CallFormat {
        name: "nemotron",
        template: &["<TOOLCALL>"],
        open: "<TOOLCALL>[",
        call: JSON_CALL,
        separator: Some(","),
        close: "]</TOOLCALL>",
        ..DEFAULT
    },
    CallFormat { name: "hermes", template: &["<tool_call>"], call: TAGGED_JSON_CALL, ..DEFAULT },
    CallFormat {
        name: "python",
        template: &["func_name1(params_name1="],
        token: Some("<|python_start|>"),
        open: "[",
        call: &[N, T("("), A, T(")")],
        separator: Some(","),
        close: "]",
        arguments: ArgumentSyntax::Python,
        is_at_start: true,
        ..DEFAULT
    },
    CallFormat {
        name: "llama-3-json",
        template: &["{\"name\": function name, \"parameters\": "],
        call: &[T("{\"name\": \""), N, T("\""), S, T(","), S, T("\"parameters\""), S, T(":"), S, A, S, T("}")],
        separator: None,
        is_at_start: true,
        ..DEFAULT
    },
    CallFormat { name: "generic", call: TAGGED_JSON_CALL, ..DEFAULT },
];

impl CallFormat {
    /// Returns the format of models whose template knows no tools, or writes calls in a way that is not in the table.
    pub fn generic() -> &'static CallFormat {
        FORMATS.last().unwrap_or(&DEFAULT)
    }

    /// Whether the format is the one for models without their own. It is described in a system message.
    pub fn is_generic(&self) -> bool {
        self.template.is_empty()
    }

    /// Finds the format of a template. `reads_tools` says that the template has a variable `tools`, and `has_token`
    /// that the vocabulary has a token of this text.
    pub fn of_template(source: &str, reads_tools: bool, has_token: impl Fn(&str) -> bool) -> &'static CallFormat {
        // A template that does not print tools may still mention calls, such as those that it removes from history.
        if !reads_tools {
            return CallFormat::generic();
        }
        let by_text = |format: &&CallFormat| {
            !format.template.is_empty() && format.template.iter().all(|text| source.contains(text))
        };
        let by_token = |format: &&CallFormat| format.token.is_some_and(&has_token);
        let found = FORMATS.iter().find(by_text).or_else(|| FORMATS.iter().find(by_token));
        found.unwrap_or(CallFormat::generic())
    }

    /// Returns the texts of which one begins a call to one of these tools within an answer.
    pub fn triggers<'n>(&self, names: impl Iterator<Item = &'n str>) -> Vec<String> {
        if !self.is_at_start {
            let first = match (self.open, self.call.first()) {
                ("", Some(Piece::Text(text))) => text,
                (open, _) => open,
            };
            return vec![first.to_owned()];
        }
        // The name is part of the trigger, so that an answer which happens to be JSON or a list remains one.
        let mut triggers: Vec<String> = names
            .map(|name| {
                let mut text = self.open.to_owned();
                let mut is_named = false;
                for piece in self.call {
                    match piece {
                        Piece::Text(part) => text.push_str(part),
                        Piece::Name => text.push_str(name),
                        _ => break,
                    }
                    if is_named {
                        break;
                    }
                    is_named = *piece == Piece::Name;
                }
                text
            })
            .collect();
        triggers.sort_unstable();
        triggers
    }

    /// Returns every marker of the format: the texts that are not part of names, arguments or answers.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let parameter = match self.arguments {
            ArgumentSyntax::Parameters(pieces) => pieces,
            _ => &[],
        };
        let texts = self.call.iter().chain(parameter).filter_map(|piece| match piece {
            Piece::Text(text) => Some(*text),
            _ => None,
        });
        let quote = match self.arguments {
            ArgumentSyntax::Quoted(quote) => quote,
            _ => "",
        };
        let around = [self.open, self.separator.unwrap_or(""), self.close, quote];
        around.into_iter().chain(texts).filter(|text| !text.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_well_formed() {
        for format in FORMATS {
            let count = |piece: Piece| format.call.iter().filter(|other| **other == piece).count();
            assert_eq!((count(Piece::Name), count(Piece::Arguments)), (1, 1), "{}", format.name);
            // A name ends where a character follows that no name has.
            let at = format.call.iter().position(|piece| *piece == Piece::Name).unwrap();
            let next = format.call[at + 1];
            let is_in_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
            match next {
                Piece::Text(text) => assert!(!text.starts_with(is_in_name), "{}", format.name),
                Piece::Arguments => assert_ne!(format.arguments, ArgumentSyntax::Json, "{}", format.name),
                other => panic!("{}: {other:?}", format.name),
            }
            assert!(!format.triggers(["f"].into_iter()).iter().any(String::is_empty), "{}", format.name);
            assert_eq!(FORMATS.iter().filter(|other| other.name == format.name).count(), 1);
        }
    }

    #[test]
    fn triggers_at_the_start_hold_the_name() {
        let triggers = |name: &str| FORMATS.iter().find(|f| f.name == name).unwrap().triggers(["f", "g"].into_iter());
        assert_eq!(triggers("llama-3-json"), ["{\"name\": \"f\"", "{\"name\": \"g\""]);
        assert_eq!(triggers("python"), ["[f(", "[g("]);
        assert_eq!(triggers("hermes"), ["<tool_call>"]);
        assert_eq!(triggers("phi-4"), ["<|tool_call|>["]);
    }
}
