//! Chat templates: a conversation becomes the text that the model was trained on, as segments that know their origin.
//!
//! The template is the model's own Jinja source, run by minijinja with the settings and functions that the reference
//! implementation gives it. It has no loader, no files, no environment and no clock; its steps and its output are
//! bounded. The server and the CLI call this; what is trusted is decided in [`text_origin`].

mod python_functions;
mod segment;
mod text_origin;

use std::fmt;
use std::io;

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, ErrorKind, Value as JinjaValue};
use serde_json::{Map, Value};

use crate::error::Error;
use crate::tokenizer::Tokenizer;
use text_origin::Origins;

pub use python_functions::DateTime;
pub use segment::Segment;

/// Who may speak. Roles are written into the prompt as they are, so they come from this list and nowhere else.
pub const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// Steps of the template's virtual machine; with the templates of our tests, twenty thousand messages take fewer.
const MAX_STEPS: u64 = 1_000_000;
/// The stack that a template is rendered on. A step makes a value one level deeper at most, and to compare, to join or to drop a value
/// takes at most 480 bytes of stack a level, as measured: so no template overflows it. It costs address space, not memory.
const STACK_BYTES: usize = MAX_STEPS as usize * 512;
/// Bytes of rendered text, far beyond any context.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

const NAME: &str = "chat";

/// What a template is rendered with.
#[derive(Debug, Clone, Default)]
pub struct Conversation<'c> {
    /// Objects with a `role` of [`ROLES`], a `content`, and whatever else the template reads (`name`, `tool_calls`).
    pub messages: &'c [Value],
    /// Tool descriptions, as the OpenAI API has them.
    pub tools: Option<&'c Value>,
    /// End with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. Their text is untrusted like that of messages.
    pub extra: Option<&'c Map<String, Value>>,
    /// What `strftime_now` answers. A template that asks without it is an error: this crate has no clock.
    pub now: Option<DateTime>,
}

/// A message of plain text.
pub fn message(role: &str, content: &str) -> Value {
    serde_json::json!({ "role": role, "content": content })
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and its kin, by the names that templates know.
    tokens: Vec<(&'static str, String)>,
    origins: Origins,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({} bytes)", self.origins.source().len())
    }
}

/// The template's `raise_exception`, on its way through minijinja's error.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl ChatTemplate {
    /// Compiles a template for use with this tokenizer. A template that is not the model's own must be made known to
    /// the tokenizer first ([`Tokenizer::guard`]).
    pub fn compile(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, Error> {
        let mut environment = Environment::new();
        let syntax = minijinja::syntax::SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| Error::TemplateSyntax(error.to_string()))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_unknown_method_callback(python_functions::call_method);
        environment.set_formatter(python_functions::format_like_python);
        python_functions::add_filters(&mut environment);
        // It prints all variables with an indent for each level, which the bound on steps does not bound.
        environment.remove_global("debug");
        environment.add_test("iterable", python_functions::is_iterable);
        environment.add_function("raise_exception", |message: String| -> Result<JinjaValue, minijinja::Error> {
            let error = minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception");
            Err(error.with_source(Refused(message)))
        });
        environment
            .add_template_owned(NAME, python_functions::without_generation_tags(source))
            .map_err(|error| Error::TemplateSyntax(describe(&error)))?;
        let piece = |id: Option<u32>| id.and_then(|id| tokenizer.token(id)).map(|token| token.piece.to_owned());
        let tokens = [
            ("bos_token", tokenizer.bos()),
            ("eos_token", tokenizer.eos()),
            ("unk_token", tokenizer.unknown()),
            ("pad_token", tokenizer.padding()),
        ];
        let tokens = tokens.into_iter().filter_map(|(name, id)| piece(id).map(|piece| (name, piece))).collect();
        Ok(ChatTemplate { environment, tokens, origins: Origins::new(source, tokenizer) })
    }

    /// Whether the template reads a variable of this name that it does not set itself.
    pub fn reads(&self, variable: &str) -> bool {
        self.environment
            .get_template(NAME)
            .is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// Whether the template's source has this text in quotes, as a role that it tells from others: what it never names, it cannot heed.
    pub fn quotes(&self, text: &str) -> bool {
        ['\'', '"'].iter().any(|quote| self.origins.source().contains(&format!("{quote}{text}{quote}")))
    }

    /// Renders a conversation. The text of all segments joined is what the reference implementation renders; the text
    /// of messages, tools and extra variables is untrusted, everything else is trusted. Nothing is prepended: a
    /// template writes the model's first token itself.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<Vec<Segment>, Error> {
        check_roles(conversation.messages)?;
        let (text, marked) = on_large_stack(|| {
            let text = self.render_text(conversation, |value, _| value.clone(), str::to_owned)?;
            let marked = self.render_text(
                conversation,
                |value, key| self.origins.mark(value, key),
                |key| self.origins.mark_key(key),
            );
            // A template that fails only on marked text looked into it; that is settled like any other difference.
            Ok((text, marked.ok()))
        })?;
        Ok(self.origins.segments(&text, marked.as_deref(), conversation))
    }

    /// The text that the reference implementation would render, without origins. Encoding it as trusted text lets
    /// message text become control tokens; it is for showing, and for tests.
    pub fn render_unguarded(&self, conversation: &Conversation<'_>) -> Result<String, Error> {
        check_roles(conversation.messages)?;
        on_large_stack(|| self.render_text(conversation, |value, _| value.clone(), str::to_owned))
    }

    /// Renders with every value that came from outside passed through `value`, and extra names through `name`.
    fn render_text(
        &self,
        conversation: &Conversation<'_>,
        value: impl Fn(&Value, Option<&str>) -> Value,
        name: impl Fn(&str) -> String,
    ) -> Result<String, Error> {
        let jinja = |outside: &Value, key: Option<&str>| JinjaValue::from(Serde(value(outside, key)));
        let mut context: Vec<(String, JinjaValue)> = Vec::new();
        for (key, outside) in conversation.extra.into_iter().flatten() {
            context.push((name(key), jinja(outside, Some(key))));
        }
        for (key, piece) in &self.tokens {
            context.push(((*key).to_owned(), JinjaValue::from(piece.as_str())));
        }
        let messages: Vec<JinjaValue> = conversation.messages.iter().map(|message| jinja(message, None)).collect();
        context.push(("messages".into(), JinjaValue::from(messages)));
        let tools = conversation.tools.map_or(JinjaValue::from(()), |tools| jinja(tools, None));
        context.push(("tools".into(), tools));
        context.push(("documents".into(), JinjaValue::from(())));
        context.push(("add_generation_prompt".into(), JinjaValue::from(conversation.add_generation_prompt)));
        context.push(("strftime_now".into(), python_functions::strftime_now(conversation.now)));
        let context = JinjaValue::from_pairs(context);

        let template = self.environment.get_template(NAME).map_err(|error| Error::TemplateSyntax(describe(&error)))?;
        let mut output = Bounded(Vec::new());
        match template.render_captured_to(context, &mut output) {
            Ok(_) => String::from_utf8(output.0).map_err(|error| Error::TemplateRender(error.to_string())),
            Err(error) => Err(render_error(error)),
        }
    }
}

/// Does the work on a thread of [`STACK_BYTES`]: values that a template nested deeply are compared and dropped level by level, and a
/// stack that overflows ends the process.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK_BYTES);
        let no_thread = |error| Error::TemplateRender(format!("no thread to render it on: {error}"));
        match thread.spawn_scoped(scope, work).map_err(no_thread)?.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn check_roles(messages: &[Value]) -> Result<(), Error> {
    for (index, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if !ROLES.contains(&role) {
            return Err(Error::UnknownRole { index, role: role.chars().take(40).collect(), allowed: ROLES });
        }
    }
    Ok(())
}

fn describe(error: &minijinja::Error) -> String {
    match error.line() {
        Some(line) => format!("{error} (line {line})"),
        None => error.to_string(),
    }
}

fn render_error(error: minijinja::Error) -> Error {
    if error.kind() == ErrorKind::OutOfFuel {
        return Error::TemplateTooSlow { limit: MAX_STEPS };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Refused(message)) = current.downcast_ref() {
            return Error::TemplateRefused(message.clone());
        }
        if current.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::StorageFull) {
            return Error::TemplateTooLong { limit: MAX_OUTPUT_BYTES };
        }
        cause = current.source();
    }
    Error::TemplateRender(describe(&error))
}

/// Output that refuses to grow past the bound.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
