//! The OpenAPI document: made from the types of the routes, then fitted to the model that is served.

use std::borrow::Cow;

use utoipa::openapi::schema::{AdditionalProperties, Object, Schema};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{InfoBuilder, OpenApi, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::openai::chat::{ChatFields, ChatRequest};
use crate::openai::common::CommonFields;
use crate::openai::completions::{CompletionFields, CompletionRequest};
use crate::openai::sampling::SamplingFields;

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
        merged([ChatFields::schema(), CommonFields::schema(), SamplingFields::schema()])
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
        merged([CompletionFields::schema(), CommonFields::schema(), SamplingFields::schema()])
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

/// Objects that requests are made of: no field of them is ignored.
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
pub(crate) fn document(mut api: OpenApi, has_keys: bool) -> OpenApi {
    api.info = InfoBuilder::new()
        .title("Pellucid")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("LLM inference that can be seen through: OpenAI's routes, and a few of our own."))
        .build();
    api.servers = None;
    let components = api.components.get_or_insert_default();
    for name in STRICT {
        if let Some(RefOr::T(Schema::Object(object))) = components.schemas.get_mut(name) {
            object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
        }
    }
    if has_keys {
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let header = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-Api-Key")));
        components.add_security_scheme("bearer", bearer);
        components.add_security_scheme("header", header);
        let either = ["bearer", "header"].map(|name| SecurityRequirement::new(name, Vec::<String>::new()));
        api.security = Some(either.into());
    }
    api
}
