//! Chat templates: they render a conversation to the text that the model was trained on, as segments with their origin.
//!
//! The template is the model's own Jinja source, run by minijinja with the settings and functions of the reference
//! implementation. It cannot read files or the environment and has no clock; its steps and its output are bounded.
//! [`text_origin`] decides which text is trusted.

mod date_time;
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

pub use date_time::DateTime;
pub use segment::Segment;

/// The roles of messages. Templates write roles into the prompt as trusted text, so no other value is accepted.
pub const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// Maximum steps of the template's virtual machine. With the templates of the tests, 20,000 messages take fewer.
const MAX_STEPS: u64 = 1_000_000;
/// Stack size of the thread that renders. A step nests a value at most one level deeper, and comparing, joining or
/// dropping a value takes at most 480 bytes of stack per level (measured), so no template overflows it. It costs
/// address space, not memory.
const STACK_BYTES: usize = MAX_STEPS as usize * 512;
/// Maximum bytes of rendered text; far longer than any context.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

const NAME: &str = "chat";

/// The variables that a template is rendered with.
#[derive(Debug, Clone, Default)]
pub struct Conversation<'c> {
    /// Objects with a `role` of [`ROLES`], a `content`, and whatever else the template reads (`name`, `tool_calls`).
    pub messages: &'c [Value],
    /// Tool descriptions, as the OpenAI API has them.
    pub tools: Option<&'c Value>,
    /// Whether the text ends with the beginning of a reply.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. Their text is untrusted like that of messages.
    pub extra: Option<&'c Map<String, Value>>,
    /// The date for `strftime_now`. Without it, a template that calls `strftime_now` fails: this crate has no clock.
    pub now: Option<DateTime>,
}

/// Returns a message with a text as its content.
pub fn message(role: &str, content: &str) -> Value {
    serde_json::json!({ "role": role, "content": content })
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and others, with their pieces.
    tokens: Vec<(&'static str, String)>,
    origins: Origins,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({} bytes)", self.origins.source().len())
    }
}

/// The message of `raise_exception`, as the source of minijinja's error.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl ChatTemplate {
    /// Compiles a template for this tokenizer. For a template that is not the model's own, call [`Tokenizer::guard`]
    /// first.
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
        // `debug` prints all variables, indented by depth; the bound on steps does not limit that.
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

    /// Whether the template reads a variable of this name without setting it.
    pub fn reads(&self, variable: &str) -> bool {
        self.environment
            .get_template(NAME)
            .is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// Whether the template's source contains this text in quotes. A template that never quotes a role does not treat
    /// it specially.
    pub fn quotes(&self, text: &str) -> bool {
        ['\'', '"'].iter().any(|quote| self.origins.source().contains(&format!("{quote}{text}{quote}")))
    }

    /// Renders a conversation. The joined text of all segments equals that of the reference implementation. Text from
    /// messages, tools and extra variables is untrusted, all other text is trusted. Nothing is prepended: a template
    /// writes the beginning-of-sequence token itself.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<Vec<Segment>, Error> {
        check_roles(conversation.messages)?;
        let (text, marked) = on_large_stack(|| {
            let text = self.render_text(conversation, |value, _| value.clone(), str::to_owned)?;
            let marked = self.render_text(
                conversation,
                |value, key| self.origins.mark(value, key),
                |key| self.origins.mark_key(key),
            );
            // A template that fails on marked text only is treated like one whose two renderings differ.
            Ok((text, marked.ok()))
        })?;
        Ok(self.origins.segments(&text, marked.as_deref(), conversation))
    }

    /// Renders the text of the reference implementation, without origins. Encoded as trusted text, it would let message
    /// text become control tokens; use it for display and tests only.
    pub fn render_unguarded(&self, conversation: &Conversation<'_>) -> Result<String, Error> {
        check_roles(conversation.messages)?;
        on_large_stack(|| self.render_text(conversation, |value, _| value.clone(), str::to_owned))
    }

    /// Renders a conversation with every value passed through `value`, and the names of extra variables through `name`.
    fn render_text(
        &self,
        conversation: &Conversation<'_>,
        value: impl Fn(&Value, Option<&str>) -> Value,
        name: impl Fn(&str) -> String,
    ) -> Result<String, Error> {
        let jinja = |original: &Value, key: Option<&str>| JinjaValue::from(Serde(value(original, key)));
        let mut context: Vec<(String, JinjaValue)> = Vec::new();
        for (key, original) in conversation.extra.into_iter().flatten() {
            context.push((name(key), jinja(original, Some(key))));
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
        context.push(("strftime_now".into(), date_time::strftime_now(conversation.now)));
        let context = JinjaValue::from_pairs(context);

        let template = self.environment.get_template(NAME).map_err(|error| Error::TemplateSyntax(describe(&error)))?;
        let mut output = Bounded(Vec::new());
        match template.render_captured_to(context, &mut output) {
            Ok(_) => String::from_utf8(output.0).map_err(|error| Error::TemplateRender(error.to_string())),
            Err(error) => Err(render_error(error)),
        }
    }
}

/// Runs `work` on a thread with a stack of [`STACK_BYTES`]: deeply nested values are compared and dropped recursively,
/// and a stack overflow would end the process.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK_BYTES);
        let no_thread = |error| Error::TemplateRender(format!("could not start a thread: {error}"));
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

/// Output of at most [`MAX_OUTPUT_BYTES`].
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
