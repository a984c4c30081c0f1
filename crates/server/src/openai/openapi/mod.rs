//! The OpenAPI document: generated from the types of the routes, then completed with what depends on the served model.

mod replies;
pub(crate) mod schemas;

use std::borrow::Cow;

use pellucid_generate::{ChatPrompt, LoadedEmbedder, LoadedModel, ShorterVectors};
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
use crate::http::error::ApiError;
use crate::models::{Purpose, ServedModel};
use crate::state::App;
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

/// Schemas of requests to the model that computes vectors.
const EMBEDDER_REQUESTS: [&str; 3] = ["EmbeddingRequest", "RerankRequest", "OllamaEmbedRequest"];

/// Schemas of requests that may name a model of any purpose.
const ANY_MODEL: [&str; 2] = ["ModelRequest", "OllamaShowRequest"];

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
        "OllamaShowRequest" | "ModelRequest" => json!({ "model": model }),
        "CreateResponseRequest" => json!({ "model": model, "input": "Why is the sky blue?", "max_output_tokens": 16 }),
        "InputTokensRequest" => json!({ "model": model, "input": "Why is the sky blue?" }),
        "CountTokensRequest" => json!({ "model": model, "messages": messages }),
        "TokenizeRequest" => json!({ "model": model, "prompt": "The sky is" }),
        "DetokenizeRequest" => json!({ "model": model, "tokens": [1, 2, 3] }),
        "TemplateRequest" => json!({ "model": model, "messages": messages }),
        "EmbeddingRequest" => json!({ "model": model, "input": ["The sky is blue.", "Grass is green."] }),
        "OllamaEmbedRequest" => json!({ "model": model, "input": ["The sky is blue.", "Grass is green."] }),
        "RerankRequest" => {
            json!({ "model": model, "query": "sky", "documents": ["The sky is blue.", "Grass is green."], "top_n": 1 })
        }
        _ => return None,
    })
}

/// Schemas of requests and their parts. Unknown fields are refused unless they are null.
const STRICT: [&str; 20] = [
    "ModelRequest",
    "OllamaEmbedRequest",
    "EmbeddingRequest",
    "RerankRequest",
    "ChatRequest",
    "CompletionRequest",
    "CreateResponseRequest",
    "InputTokensRequest",
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

/// Routes for which a server needs a model that computes vectors.
const EMBEDDER_ROUTES: [&str; 3] = ["/v1/embeddings", "/v1/rerank", "/api/embed"];
/// Routes that serve every kind of model. All others need a model that generates text.
const COMMON_ROUTES: [&str; 18] = [
    "/",
    "/docs",
    "/openapi.json",
    "/health",
    "/ready",
    "/metrics",
    "/requests",
    "/requests/{id}",
    "/models",
    "/models/load",
    "/models/unload",
    "/v1/models",
    "/v1/models/{id}",
    "/api/pull",
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/version",
];

/// Refuses a route that none of the server's models can serve.
pub(crate) fn check_purpose(app: &App, route: &str) -> Result<(), ApiError> {
    let refused = |id: &str, does: &str, wanted: &str| {
        let message = format!("{route} needs a model that {wanted}, but {id:?} {does}");
        Err(ApiError::field("model", message).code("model_not_supported"))
    };
    if COMMON_ROUTES.contains(&route) {
        return Ok(());
    }
    let wanted = if EMBEDDER_ROUTES.contains(&route) { Purpose::Vectors } else { Purpose::Text };
    let models = app.models.entries();
    match models.first() {
        Some(first) if models.iter().all(|model| model.purpose != wanted) => {
            refused(&first.id, first.purpose.does(), wanted.does())
        }
        _ => Ok(()),
    }
}

/// Returns the document for clients. Without `names_models`, it holds nothing that depends on the served models, except
/// that routes are left out which none of them can serve.
pub(crate) fn document(mut api: OpenApi, has_keys: bool, app: &App, names_models: bool) -> Value {
    let model = app.models.fixed_text().filter(|_| names_models).map(|model| &**model);
    api.paths.paths.retain(|path, _| check_purpose(app, path).is_ok());
    api.info = InfoBuilder::new()
        .title("Pellucid")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "LLM inference with the APIs of OpenAI, Anthropic, Ollama and llama.cpp, and routes for tokens, health and \
             metrics.",
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
        let is_of_embedder = EMBEDDER_REQUESTS.contains(&name);
        let purpose = if is_of_embedder { Purpose::Vectors } else { Purpose::Text };
        let vocab_size = match is_of_embedder {
            true => app.models.fixed_embedder().filter(|_| names_models).map(|model| model.info().vocab_size),
            false => model.map(vocab_size),
        };
        fit_ids(schema, vocab_size.unwrap_or(MAX_VOCAB_SIZE));
        // A key may not know all of several models.
        let may_name = names_models && (!has_keys || app.models.entries().len() == 1);
        let is_named = |model: &&ServedModel| may_name && (model.purpose == purpose || ANY_MODEL.contains(&name));
        let of_purpose = app.models.entries().iter().filter(is_named);
        let names: Vec<&str> = of_purpose.flat_map(|model| model.names()).collect();
        let id = names.first().copied().unwrap_or("MODEL").to_owned();
        if let (false, Some(Value::Object(property))) = (names.is_empty(), schema.pointer_mut("/properties/model")) {
            let may_be_null = property.get("type").is_some_and(Value::is_array);
            let mut names: Vec<Value> = names.into_iter().map(Value::from).collect();
            if may_be_null {
                names.push(Value::Null);
            }
            property.insert("enum".into(), names.into());
        }
        if let Some(example) = example(name, &id) {
            schema["examples"] = json!([example]);
        }
        if let (Some(embedder), true) = (app.models.fixed_embedder().filter(|_| names_models), is_of_embedder) {
            fit_embedder(schema, embedder);
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
                only(
                    "prompt",
                    "string",
                    &["messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"],
                ),
                only("messages", "array", &["prompt", "add_special_tokens"]),
            ]);
        }
    }
    replies::describe(&mut document);
    document
}

/// Adds the fields of a conversation to the schema of a request.
fn add_conversation(schema: &mut Value, is_required: bool) {
    if let Value::Object(fields) = json!(Conversation::schema())["properties"].take() {
        fields.into_iter().for_each(|(name, field)| schema["properties"][name] = field);
    }
    match is_required {
        true => schema["required"] = json!(["messages"]),
        false => schema["properties"]["messages"]["type"] = json!(["array", "null"]),
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

/// Sets the ranges of fields that depend on the model that computes vectors.
fn fit_embedder(schema: &mut Value, embedder: &LoadedEmbedder) {
    let info = embedder.info();
    if let Some(property) = schema.pointer_mut("/properties/dimensions") {
        let full = info.num_dimensions;
        match &embedder.shorter {
            ShorterVectors::Any => property["maximum"] = json!(full),
            ShorterVectors::None => property["enum"] = json!([full, null]),
            ShorterVectors::Listed(lengths) => {
                let all = lengths.iter().chain([&full]).map(|length| json!(length)).chain([Value::Null]);
                property["enum"] = all.collect();
            }
        }
    }
    if let Some(property) = schema.pointer_mut("/properties/truncate_prompt_tokens") {
        let own = embedder.tokenizer.prefix().len() + embedder.tokenizer.suffix().len();
        property["anyOf"] = json!([{ "enum": [-1, null] }, { "minimum": own + 1, "maximum": info.context_len }]);
    }
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
