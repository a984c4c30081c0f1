//! The OpenAPI document: made from the types of the routes, then fitted to the model that is served.

use std::borrow::Cow;

use pellucid_generate::LoadedModel;
use serde_json::{Value, json};
use utoipa::openapi::schema::{Object, Schema};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{InfoBuilder, OpenApi, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::openai::chat::{ChatFields, ChatRequest};
use crate::openai::completions::{CompletionFields, CompletionRequest};
use crate::openai::shared_fields::CommonFields;
use crate::schemas::{self, TOKEN_ID};

type Schemas = Vec<(String, RefOr<Schema>)>;

/// One object with the fields of several.
fn merged(parts: [RefOr<Schema>; 3]) -> RefOr<Schema> {
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
        merged([ChatFields::schema(), CommonFields::schema(), schemas::sampling()])
    }
}

impl ToSchema for ChatRequest {
    fn name() -> Cow<'static, str> {
        "ChatRequest".into()
    }

    fn schemas(schemas: &mut Schemas) {
        ChatFields::schemas(schemas);
        CommonFields::schemas(schemas);
    }
}

impl PartialSchema for CompletionRequest {
    fn schema() -> RefOr<Schema> {
        merged([CompletionFields::schema(), CommonFields::schema(), schemas::sampling()])
    }
}

impl ToSchema for CompletionRequest {
    fn name() -> Cow<'static, str> {
        "CompletionRequest".into()
    }

    fn schemas(schemas: &mut Schemas) {
        CompletionFields::schemas(schemas);
        CommonFields::schemas(schemas);
    }
}

/// A request of each kind as people write them. The model's name is added.
fn example(name: &str, model: &LoadedModel) -> Option<Value> {
    let messages = json!([{ "role": "user", "content": "Why is the sky blue?" }]);
    let mut request = match name {
        "ChatRequest" => json!({ "messages": messages, "max_tokens": 16, "temperature": 0.7, "seed": 1 }),
        "CompletionRequest" => json!({ "prompt": "The sky is", "max_tokens": 16, "stop": ["."] }),
        "TokenizeRequest" => json!({ "prompt": "The sky is" }),
        "DetokenizeRequest" => json!({ "tokens": [1, 2, 3] }),
        "TemplateRequest" => json!({ "messages": messages }),
        _ => return None,
    };
    request["model"] = json!(model.id);
    Some(request)
}

/// Objects that requests are made of: no field of them is ignored, and one that nobody knows can only be null.
const STRICT: [&str; 7] = [
    "ChatRequest",
    "CompletionRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
    "TemplateRequest",
    "StreamOptions",
    "ChatMessage",
];

/// The document as clients see it.
pub(crate) fn document(mut api: OpenApi, has_keys: bool, model: &LoadedModel) -> Value {
    api.info = InfoBuilder::new()
        .title("Pellucid")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("LLM inference that can be seen through: OpenAI's routes, and a few of our own."))
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
        // This route makes text of ids, which not every id of a model has.
        let has_text = name == "DetokenizeRequest";
        fit_ids(schema, if has_text { model.tokenizer.vocab_size() } else { model.vocab_size });
        if let Some(Value::Object(property)) = schema.pointer_mut("/properties/model") {
            let may_be_null = property.get("type").is_some_and(Value::is_array);
            let names = if may_be_null { json!([model.id, null]) } else { json!([model.id]) };
            property.insert("enum".into(), names);
        }
        if let Some(example) = example(name, model) {
            schema["examples"] = json!([example]);
        }
        if name == "TokenizeRequest" {
            let only = |given: &str, kind: &str, others: [&str; 2]| {
                let nothing = json!({ "type": "null" });
                json!({ "required": [given], "properties": { given: { "type": kind }, others[0]: nothing, others[1]: nothing } })
            };
            schema["oneOf"] = json!([
                only("prompt", "string", ["messages", "add_generation_prompt"]),
                only("messages", "array", ["prompt", "add_special_tokens"]),
            ]);
        }
    }
    document
}

/// Token ids end where the vocabulary ends.
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
