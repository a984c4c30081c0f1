//! `/tokenize`, `/detokenize` and `/apply-template`: text to token ids and back. The field names are vLLM's.

use std::sync::Arc;

use pellucid_generate::LoadedModel;
use pellucid_tokenizer::TokenKind;
use serde::Serialize;
use utoipa::ToSchema;

use super::conversation::{Conversation, prompt_error};
use super::openapi::schemas;
use super::shared_fields::check_model;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::limits::client_memory::out_of_memory;
use crate::reply::parts::JsonParts;

/// A text or a conversation to encode: either `prompt` or `messages`.
#[derive(Debug, ToSchema)]
pub(crate) struct TokenizeRequest {
    /// The model's id; may be left out.
    #[schema(max_length = 512)]
    pub(crate) model: Option<String>,
    /// A text. Control tokens in it are encoded as text.
    pub(crate) prompt: Option<String>,
    #[schema(ignore)]
    pub(crate) conversation: Option<Conversation>,
    /// Add the tokens that the model expects before and after a text.
    #[schema(default = true)]
    pub(crate) add_special_tokens: Option<bool>,
    /// End the conversation with the beginning of an assistant's message.
    #[schema(default = true)]
    pub(crate) add_generation_prompt: Option<bool>,
    /// End the conversation within its last message, which must be the assistant's.
    #[schema(default = false)]
    pub(crate) continue_final_message: Option<bool>,
    /// Return the text of each token.
    #[schema(default = false)]
    pub(crate) return_token_strs: Option<bool>,
    /// Return the bytes of each token.
    #[schema(default = false)]
    pub(crate) return_token_bytes: Option<bool>,
    /// Return the kind of each token.
    #[schema(default = false)]
    pub(crate) return_token_kinds: Option<bool>,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_bytes: Option<Vec<Vec<u8>>>,
    /// `normal`, `control` (never made of a message's text), `user_defined` (cut out before everything else, such as
    /// `<think>`), `byte`, `unknown` or `unused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_kinds: Option<Vec<&'static str>>,
}

/// Token ids to decode.
#[derive(Debug, ToSchema)]
pub(crate) struct DetokenizeRequest {
    #[schema(max_length = 512)]
    pub(crate) model: Option<String>,
    #[schema(schema_with = schemas::all_ids)]
    pub(crate) tokens: Vec<u32>,
    /// Leave out control tokens.
    #[schema(default = false)]
    pub(crate) skip_special_tokens: Option<bool>,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct Detokenized {
    prompt: String,
}

/// A conversation to render.
#[derive(Debug, ToSchema)]
pub(crate) struct TemplateRequest {
    #[schema(max_length = 512)]
    pub(crate) model: Option<String>,
    #[schema(ignore)]
    pub(crate) conversation: Conversation,
    #[schema(default = true)]
    pub(crate) add_generation_prompt: Option<bool>,
    /// End the conversation within its last message, which must be the assistant's.
    #[schema(default = false)]
    pub(crate) continue_final_message: Option<bool>,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct Rendered {
    /// The rendered conversation.
    prompt: String,
    /// The rendered conversation in segments. Only trusted segments can contain control tokens.
    segments: Vec<RenderedSegment>,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct RenderedSegment {
    text: String,
    /// Whether the template wrote the text, and not a message.
    trusted: bool,
}

/// Bytes of the parts that show one segment, without its text.
const SEGMENT_BYTES: usize = 128;

/// Text that two parts of a reply show.
#[derive(Clone)]
struct SharedText(Arc<String>);

impl AsRef<str> for SharedText {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// A reply whose JSON is written while the client reads it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) parts: JsonParts,
    /// Bytes that the parts hold.
    pub(crate) held: usize,
}

/// Refuses a name other than that of the served model; these routes need no name.
fn check_named(name: Option<&String>, model: &LoadedModel) -> Result<(), ApiError> {
    name.map_or(Ok(()), |name| check_model(name, model))
}

impl TokenizeRequest {
    pub(crate) fn read(value: Json, model: &LoadedModel) -> Result<TokenizeRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let prompt = fields.string("prompt", usize::MAX)?;
        let request = TokenizeRequest {
            prompt,
            conversation: Conversation::read_optional(&mut fields, model)?,
            add_special_tokens: fields.boolean("add_special_tokens")?,
            add_generation_prompt: fields.boolean("add_generation_prompt")?,
            continue_final_message: fields.boolean("continue_final_message")?,
            return_token_strs: fields.boolean("return_token_strs")?,
            return_token_bytes: fields.boolean("return_token_bytes")?,
            return_token_kinds: fields.boolean("return_token_kinds")?,
            model: fields.string("model", 512)?,
        };
        fields.finish()?;
        check_named(request.model.as_ref(), model)?;
        if request.prompt.is_some() == request.conversation.is_some() {
            return Err(ApiError::field("prompt", "expected either prompt or messages"));
        }
        let has_messages = request.conversation.is_some();
        for (is_given, name, without) in [
            (request.add_special_tokens.is_some() && has_messages, "add_special_tokens", "prompt"),
            (request.add_generation_prompt.is_some() && !has_messages, "add_generation_prompt", "messages"),
            (request.continue_final_message.is_some() && !has_messages, "continue_final_message", "messages"),
        ] {
            if is_given {
                return Err(ApiError::field(name, format!("{name} has no effect without {without}")));
            }
        }
        Ok(request)
    }

    pub(crate) fn answer(self, model: &LoadedModel) -> Result<Answer, ApiError> {
        let tokenizer = &model.tokenizer;
        let tokens = match (&self.prompt, &self.conversation) {
            (_, Some(conversation)) => {
                let end = conversation.prompt_end(self.continue_final_message, self.add_generation_prompt)?;
                conversation.encode(end, model.prompts())?
            }
            (Some(text), None) if self.add_special_tokens.unwrap_or(true) => {
                let ids = model.prompts().encode_text(text);
                let mut ids = ids.map_err(|error| prompt_error("prompt", error))?;
                ids.try_reserve(tokenizer.suffix().len()).map_err(|_| out_of_memory())?;
                ids.extend_from_slice(tokenizer.suffix());
                ids
            }
            (text, None) => {
                let ids = tokenizer.try_encode(text.as_deref().unwrap_or_default());
                ids.map_err(|error| prompt_error("prompt", error.into()))?
            }
        };
        let mut parts = JsonParts::default();
        parts.literal(&format!("{{\"count\":{},\"max_model_len\":{},\"tokens\":[", tokens.len(), model.context_len));
        let held = tokens.capacity() * size_of::<u32>();
        // Shared as it is: a copy would be as large as the request.
        let tokens = Arc::new(tokens);
        let ids = tokens.clone();
        parts.list(0..ids.len(), move |i, out| out.json(&ids[i]));
        if self.return_token_strs.unwrap_or(false) {
            parts.literal("],\"token_strs\":[");
            let (tokenizer, tokens) = (tokenizer.clone(), tokens.clone());
            parts.list(0..tokens.len(), move |i, out| {
                let bytes = tokenizer.token(tokens[i]).map(|token| token.bytes).unwrap_or_default();
                out.json(&String::from_utf8_lossy(&bytes))
            });
        }
        if self.return_token_bytes.unwrap_or(false) {
            parts.literal("],\"token_bytes\":[");
            let (tokenizer, tokens) = (tokenizer.clone(), tokens.clone());
            parts.list(0..tokens.len(), move |i, out| {
                let bytes = tokenizer.token(tokens[i]).map(|token| token.bytes).unwrap_or_default();
                out.json(&bytes)
            });
        }
        if self.return_token_kinds.unwrap_or(false) {
            parts.literal("],\"token_kinds\":[");
            let tokenizer = tokenizer.clone();
            parts.list(0..tokens.len(), move |i, out| {
                out.json(&kind_name(tokenizer.token(tokens[i]).map_or(TokenKind::Unknown, |token| token.kind)))
            });
        }
        parts.literal("]}");
        Ok(Answer { parts, held })
    }
}

fn kind_name(kind: TokenKind) -> &'static str {
    match kind {
        TokenKind::Normal => "normal",
        TokenKind::Control => "control",
        TokenKind::UserDefined => "user_defined",
        TokenKind::Byte => "byte",
        TokenKind::Unknown => "unknown",
        TokenKind::Unused => "unused",
    }
}

impl DetokenizeRequest {
    pub(crate) fn read(value: Json, model: &LoadedModel) -> Result<DetokenizeRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let tokens = fields.required("tokens")?;
        let request = DetokenizeRequest {
            tokens: fields::ids("tokens", fields::array("tokens", tokens, 1 << 20)?)?,
            skip_special_tokens: fields.boolean("skip_special_tokens")?,
            model: fields.string("model", 512)?,
        };
        fields.finish()?;
        check_named(request.model.as_ref(), model)?;
        let vocab_size = model.tokenizer.vocab_size();
        match request.tokens.iter().find(|&&id| id as usize >= vocab_size) {
            Some(id) => {
                Err(ApiError::field("tokens", format!("tokens: the id {id} is outside the vocabulary of {vocab_size}")))
            }
            None => Ok(request),
        }
    }

    pub(crate) fn answer(self, model: &LoadedModel) -> Result<Answer, ApiError> {
        let text = model.tokenizer.try_decode(&self.tokens, self.skip_special_tokens.unwrap_or(false));
        let text = text.map_err(|error| prompt_error("tokens", error.into()))?;
        let held = text.capacity();
        let mut parts = JsonParts::default();
        parts.literal("{\"prompt\":\"");
        parts.text(text);
        parts.literal("\"}");
        Ok(Answer { parts, held })
    }
}

impl TemplateRequest {
    pub(crate) fn read(value: Json, model: &LoadedModel) -> Result<TemplateRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let request = TemplateRequest {
            conversation: Conversation::read(&mut fields, model)?,
            add_generation_prompt: fields.boolean("add_generation_prompt")?,
            continue_final_message: fields.boolean("continue_final_message")?,
            model: fields.string("model", 512)?,
        };
        fields.finish()?;
        check_named(request.model.as_ref(), model)?;
        Ok(request)
    }

    pub(crate) fn answer(self, model: &LoadedModel) -> Result<Answer, ApiError> {
        let end = self.conversation.prompt_end(self.continue_final_message, self.add_generation_prompt)?;
        let segments = self.conversation.render(end, model.prompts())?;
        let mut shared: Vec<(SharedText, bool)> = Vec::new();
        shared.try_reserve_exact(segments.len()).map_err(|_| out_of_memory())?;
        shared.extend(segments.into_iter().map(|segment| (SharedText(Arc::new(segment.text)), segment.trusted)));
        // Each segment takes two parts.
        let held = shared.iter().map(|(text, _)| text.0.capacity() + 2 * SEGMENT_BYTES).sum();
        let mut parts = JsonParts::default();
        parts.literal("{\"prompt\":\"");
        for (text, _) in &shared {
            parts.text(text.clone());
        }
        parts.literal("\",\"segments\":[");
        for (i, (text, trusted)) in shared.into_iter().enumerate() {
            parts.literal(if i > 0 { ",{\"text\":\"" } else { "{\"text\":\"" });
            parts.text(text);
            parts.literal(&format!("\",\"trusted\":{trusted}}}"));
        }
        parts.literal("]}");
        Ok(Answer { parts, held })
    }
}
