//! A small evaluator of Jinja templates, as chat templates use the language.
//!
//! It differs from a general one in two ways. Every character knows its origin ([`text`]), through every filter and
//! method, so that text of a request can be told from text of the template in the output. And every operation is
//! charged before it is done ([`budget`]), so that no template and no conversation takes more time, memory or stack
//! than the limits allow. It renders like the reference implementation (jinja2 with the settings and functions of the
//! `transformers` library) and cannot read files, the environment or a clock.
//!
//! Read in this order: `lexer`, `syntax`, `parser`, `parse_expression`; `text`, `value`, `budget`; `evaluate`,
//! `expressions`, `operators`, `print`, `builtins`.

mod budget;
mod builtins;
mod evaluate;
mod expressions;
mod failure;
mod lexer;
mod operators;
mod parse_expression;
mod parser;
mod print;
mod syntax;
mod text;
mod value;
mod variables;

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value as Json;

use self::budget::{Budget, with_capacity};
use self::evaluate::Evaluator;
use self::failure::{Failure, Outcome};
use self::syntax::Program;
use self::value::{Builtin, Dict, Value};
use super::{Conversation, Segment};
use crate::error::Error;

pub use self::budget::{MemoryGrant, RenderLimits};

/// A compiled template.
pub(super) struct Template {
    program: Program,
    undeclared: HashSet<String>,
    /// Whether a rendering took more work than its conversation explains.
    is_costly: AtomicBool,
}

/// Units of work of a rendering that does not count as costly, and for each byte of the conversation: some
/// milliseconds.
const CHEAP_WORK: u64 = 100_000;
const CHEAP_WORK_A_BYTE: u64 = 4;

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Template({} statements)", self.program.body.len())
    }
}

impl Template {
    pub(super) fn compile(source: &str) -> Result<Template, Error> {
        let program = parser::parse(source).map_err(|failure| Error::TemplateSyntax(failure.describe()))?;
        let undeclared = variables::undeclared(&program);
        Ok(Template { program, undeclared, is_costly: AtomicBool::new(false) })
    }

    /// Whether the template reads a variable of this name without setting it.
    pub(super) fn reads(&self, variable: &str) -> bool {
        self.undeclared.contains(variable)
    }

    /// Returns the variables that the template reads without setting them, in no order.
    pub(super) fn variables(&self) -> impl Iterator<Item = &str> {
        self.undeclared.iter().map(String::as_str)
    }

    /// Renders a conversation; `tokens` are trusted variables.
    pub(super) fn render(
        &self,
        conversation: &Conversation<'_>,
        tokens: &[(&'static str, String)],
        limits: RenderLimits<'_>,
    ) -> Result<Vec<Segment>, Error> {
        let budget = Budget::new(limits);
        let rendered = self.run(conversation, tokens, &budget);
        if budget.work() > CHEAP_WORK + CHEAP_WORK_A_BYTE * conversation.num_bytes() as u64 {
            self.is_costly.store(true, Ordering::Relaxed);
        }
        rendered.map_err(Failure::into_render_error)
    }

    /// Whether a rendering so far took more work than its conversation explains.
    pub(super) fn is_costly(&self) -> bool {
        self.is_costly.load(Ordering::Relaxed)
    }

    fn run(
        &self,
        conversation: &Conversation<'_>,
        tokens: &[(&'static str, String)],
        budget: &Budget<'_>,
    ) -> Outcome<Vec<Segment>> {
        let evaluator = self.prepare(conversation, tokens, budget)?;
        let (text, parts) = evaluator.run()?.into_parts()?;
        budget.charge_bytes(text.len())?;
        let mut segments = with_capacity(parts.len())?;
        for (range, trusted) in parts {
            let mut bytes = with_capacity(range.len())?;
            bytes.extend_from_slice(text[range].as_bytes());
            // A run ends where a whole piece of text was appended.
            let text = String::from_utf8(bytes).map_err(|_| Failure::error("a character was cut in two"))?;
            segments.push(Segment { text, trusted });
        }
        Ok(segments)
    }

    /// Returns an evaluator with all variables of the conversation that the template reads.
    fn prepare<'p, 'b, 'c>(
        &'p self,
        conversation: &Conversation<'_>,
        tokens: &[(&'static str, String)],
        budget: &'b Budget<'c>,
    ) -> Outcome<Evaluator<'p, 'b, 'c>> {
        let mut evaluator = Evaluator::new(&self.program, budget, conversation.now)?;
        let symbol = |name: &str| self.program.names.iter().position(|known| known == name).map(|at| at as u32);
        let mut set = |name: &str, value: &dyn Fn() -> Outcome<Value>| {
            if let Some(symbol) = symbol(name) {
                evaluator.set_global(symbol, value()?);
            }
            Ok(())
        };
        let functions = [
            ("range", Builtin::Range),
            ("dict", Builtin::Dict),
            ("namespace", Builtin::Namespace),
            ("joiner", Builtin::Joiner),
            ("cycler", Builtin::Cycler),
            ("raise_exception", Builtin::RaiseException),
            ("strftime_now", Builtin::StrftimeNow),
        ];
        for (name, function) in functions {
            set(name, &|| Ok(Value::Function(function)))?;
        }
        for (name, value) in conversation.extra.into_iter().flatten() {
            set(name, &|| from_json(value, budget))?;
        }
        for (name, piece) in tokens {
            set(name, &|| Value::text(piece, true, budget))?;
        }
        set("messages", &|| messages(conversation.messages, budget))?;
        set("tools", &|| conversation.tools.map_or(Ok(Value::None), |tools| from_json(tools, budget)))?;
        set("documents", &|| Ok(Value::None))?;
        set("add_generation_prompt", &|| Ok(Value::Bool(conversation.add_generation_prompt)))?;
        Ok(evaluator)
    }
}

/// Returns the messages. Their roles are trusted, because they were checked against a list: templates make control
/// tokens of them.
fn messages(messages: &[Json], budget: &Budget<'_>) -> Outcome<Value> {
    let mut values = with_capacity(messages.len())?;
    for message in messages {
        let Json::Object(fields) = message else {
            values.push(from_json(message, budget)?);
            continue;
        };
        let mut entries = with_capacity(fields.len())?;
        for (name, value) in fields {
            let key = Value::text(name, false, budget)?;
            let value = match value {
                Json::String(role) if name == "role" => {
                    Value::text(role, super::ROLES.contains(&role.as_str()), budget)?
                }
                other => from_json(other, budget)?,
            };
            entries.push((key, value));
        }
        values.push(Value::Dict(Dict::new(entries, budget)?));
    }
    Value::list(values, budget)
}

/// Returns a value of the request; all of its text is untrusted.
fn from_json(json: &Json, budget: &Budget<'_>) -> Outcome<Value> {
    budget.enter()?;
    let value = match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(int), _) => Value::Int(i128::from(int), false),
            (_, Some(int)) => Value::Int(i128::from(int), false),
            _ => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::text(text, false, budget)?,
        Json::Array(items) => {
            let mut values = with_capacity(items.len())?;
            for item in items {
                values.push(from_json(item, budget)?);
            }
            Value::list(values, budget)?
        }
        Json::Object(fields) => {
            let mut entries = with_capacity(fields.len())?;
            for (name, value) in fields {
                entries.push((Value::text(name, false, budget)?, from_json(value, budget)?));
            }
            Value::Dict(Dict::new(entries, budget)?)
        }
    };
    budget.leave();
    Ok(value)
}
