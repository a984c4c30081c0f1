//! The OpenAPI document: generated from the types of the routes, then completed with what depends on the served model.

pub(crate) mod schemas;

use std::borrow::Cow;

use pellucid_generate::{ChatPrompt, LoadedModel};
use pellucid_sampling::MAX_VOCAB_SIZE;
use pellucid_tokenizer::message;
use serde_json::{Value, json};
use utoipa::openapi::schema::{Object, Schema};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{InfoBuilder, OpenApi, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::chat::{ChatFields, ChatRequest};
use super::client_fields::ClientFields;
use super::completions::{CompletionFields, CompletionRequest};
use super::conversation::Conversation;
use super::shared_fields::SharedFields;
use schemas::TOKEN_ID;

type Schemas = Vec<(String, RefOr<Schema>)>;

/// Returns an object schema with the fields of several.
fn merged<const N: usize>(parts: [RefOr<Schema>; N]) -> RefOr<Schema> {
    let mut whole = Object::default();
    for part in parts {
        if let RefOr::T(Schema::Object(part)) = part {
            whole.properties.extend(part.properties);
            whole.required.extend(part.required);
        }
    }
    whole.schema_type = utoipa::openapi::schema::SchemaType::new(utoipa::openapi::schema::Type::Object);
    RefOr::T(Schema::Object(whole))
}

impl PartialSchema for ChatRequest {
    fn schema() -> RefOr<Schema> {
        let platform = ClientFields::schema();
        merged([Conversation::schema(), ChatFields::schema(), SharedFields::schema(), platform, schemas::sampling()])
    }
}

impl ToSchema for ChatRequest {
    fn name() -> Cow<'static, str> {
        "ChatRequest".into()
    }

    fn schemas(schemas: &mut Schemas) {
        Conversation::schemas(schemas);
        ChatFields::schemas(schemas);
        SharedFields::schemas(schemas);
    }
}

impl PartialSchema for CompletionRequest {
    fn schema() -> RefOr<Schema> {
        merged([CompletionFields::schema(), SharedFields::schema(), ClientFields::schema(), schemas::sampling()])
    }
}

impl ToSchema for CompletionRequest {
    fn name() -> Cow<'static, str> {
        "CompletionRequest".into()
    }

    fn schemas(schemas: &mut Schemas) {
        CompletionFields::schemas(schemas);
        SharedFields::schemas(schemas);
    }
}

/// Returns an example of a request.
fn example(name: &str, model: &str) -> Option<Value> {
    let messages = json!([{ "role": "user", "content": "Why is the sky blue?" }]);
    Some(match name {
        "ChatRequest" => {
            json!({ "model": model, "messages": messages, "max_tokens": 16, "temperature": 0.7, "seed": 1 })
        }
        "CompletionRequest" => json!({ "model": model, "prompt": "The sky is", "max_tokens": 16, "stop": ["."] }),
        "MessagesRequest" => json!({ "model": model, "max_tokens": 16, "messages": messages }),
        "ContentRequest" => json!({ "prompt": "The sky is", "n_predict": 16 }),
        "InfillRequest" => json!({ "input_prefix": "The sky", "input_suffix": "blue.", "n_predict": 16 }),
        "OllamaChatRequest" => json!({ "model": model, "messages": messages, "stream": false }),
        "OllamaGenerateRequest" => json!({ "model": model, "prompt": "Why is the sky blue?", "stream": false }),
        "OllamaShowRequest" => json!({ "model": model }),
        "CountTokensRequest" => json!({ "model": model, "messages": messages }),
        "TokenizeRequest" => json!({ "model": model, "prompt": "The sky is" }),
        "DetokenizeRequest" => json!({ "model": model, "tokens": [1, 2, 3] }),
        "TemplateRequest" => json!({ "model": model, "messages": messages }),
        _ => return None,
    })
}

/// Schemas of requests and their parts. Unknown fields are refused unless they are null.
const STRICT: [&str; 14] = [
    "ChatRequest",
    "CompletionRequest",
    "MessagesRequest",
    "CountTokensRequest",
    "ContentRequest",
    "InfillRequest",
    "OllamaChatRequest",
    "OllamaGenerateRequest",
    "OllamaShowRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
    "TemplateRequest",
    "StreamOptions",
    "ChatMessage",
];

/// Returns the document for clients. Without `model`, it holds nothing that depends on the served model.
pub(crate) fn document(mut api: OpenApi, has_keys: bool, model: Option<&LoadedModel>) -> Value {
    api.info = InfoBuilder::new()
        .title("Pellucid")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "LLM inference with the APIs of OpenAI, Anthropic, Ollama and llama.cpp, and routes for tokens, health and metrics.",
        ))
        .build();
    api.servers = None;
    let components = api.components.get_or_insert_default();
    if has_keys {
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let header = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-Api-Key")));
        components.add_security_scheme("bearer", bearer);
        components.add_security_scheme("header", header);
        let either = ["bearer", "header"].map(|name| SecurityRequirement::new(name, Vec::<String>::new()));
        api.security = Some(either.into());
    }
    let mut document = json!(api);
    for name in STRICT {
        let Some(schema) = document.pointer_mut(&format!("/components/schemas/{name}")) else { continue };
        schema["additionalProperties"] = json!({ "type": "null" });
        // A model may have more logits than its tokenizer has tokens; only tokens can be decoded.
        let has_text = name == "DetokenizeRequest";
        let vocab_size = |model: &LoadedModel| if has_text { model.tokenizer.vocab_size() } else { model.vocab_size };
        fit_ids(schema, model.map_or(MAX_VOCAB_SIZE, vocab_size));
        if let (Some(model), Some(Value::Object(property))) = (model, schema.pointer_mut("/properties/model")) {
            let may_be_null = property.get("type").is_some_and(Value::is_array);
            let mut names: Vec<Value> = model.names().map(Value::from).collect();
            if may_be_null {
                names.push(Value::Null);
            }
            property.insert("enum".into(), names.into());
        }
        if let Some(example) = example(name, model.map_or("MODEL", |model| &model.id)) {
            schema["examples"] = json!([example]);
        }
        if name == "ChatMessage" && model.is_some_and(|model| !writes_names(model)) {
            let description = "Only for the result of a tool, whose name it must be: the model's chat template does not \
                               write names.";
            schema["properties"]["name"]["description"] = json!(description);
        }
        if name == "TokenizeRequest" || name == "TemplateRequest" {
            add_conversation(schema, name == "TemplateRequest");
        }
        if let (Some(model), Some(property)) = (model, schema.pointer_mut("/properties/chat_template_kwargs")) {
            fit_variables(property, model);
        }
        if name == "TokenizeRequest" {
            let only = |given: &str, kind: &str, others: &[&str]| {
                let mut properties = json!({ given: { "type": kind } });
                others.iter().for_each(|name| properties[*name] = json!({ "type": "null" }));
                json!({ "required": [given], "properties": properties })
            };
            schema["oneOf"] = json!([
                only("prompt", "string", &["messages", "add_generation_prompt", "chat_template_kwargs"]),
                only("messages", "array", &["prompt", "add_special_tokens"]),
            ]);
        }
    }
    document
}

/// Adds the fields of a conversation to the schema of a request.
fn add_conversation(schema: &mut Value, is_required: bool) {
    if let Value::Object(fields) = json!(Conversation::schema())["properties"].take() {
        fields.into_iter().for_each(|(name, field)| schema["properties"][name] = field);
    }
    if is_required {
        schema["required"] = json!(["messages"]);
    }
}

/// Whether the model's chat template writes the names of messages.
fn writes_names(model: &LoadedModel) -> bool {
    ["user", "system"].into_iter().any(|role| {
        let mut named = message(role, "a");
        named["name"] = json!("b");
        matches!(model.prompts().unwritten_name(&ChatPrompt::new(&[named])), Ok(None))
    })
}

/// Names the variables of the model's chat template.
fn fit_variables(schema: &mut Value, model: &LoadedModel) {
    let encoder = model.prompts();
    let value = || json!({ "type": ["boolean", "number", "string"] });
    let variables = encoder.variables().into_iter().map(|name| (name.to_owned(), value()));
    schema["properties"] = Value::Object(variables.collect());
    schema["additionalProperties"] = json!(false);
}

/// Sets the maximum of token ids to that of the vocabulary.
fn fit_ids(schema: &mut Value, vocab_size: usize) {
    match schema {
        Value::Object(entries) => {
            if entries.remove(TOKEN_ID).is_some() {
                entries.insert("maximum".into(), json!(vocab_size.saturating_sub(1)));
            }
            entries.values_mut().for_each(|value| fit_ids(value, vocab_size));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| fit_ids(value, vocab_size)),
        _ => {}
    }
}
