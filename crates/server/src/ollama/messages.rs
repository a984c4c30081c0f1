//! Messages, tools and formats of `/api/chat` in OpenAI's names.

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::translation::ChatBody;

const MAX_MESSAGES: usize = 4096;
const MAX_CALLS: usize = 1024;
const MAX_WORD_LEN: usize = 512;

/// Reads `messages`. A call has no id in this API, so calls are numbered, and results take the ids in their order.
pub(super) fn read(fields: &mut Fields, body: &mut ChatBody) -> Result<usize, ApiError> {
    let values = fields.array("messages", MAX_MESSAGES)?.unwrap_or_default();
    let num_messages = values.len();
    let (mut num_calls, mut num_results) = (0, 0);
    for (i, value) in values.into_iter().enumerate() {
        let path = format!("messages[{i}]");
        let mut fields = Fields::within(path.clone(), value)?;
        let role_path = fields.path("role");
        let role = fields::string(&role_path, fields.required("role")?, MAX_WORD_LEN)?;
        let mut entries = vec![("role".to_owned(), Json::String(role.clone()))];
        let content = fields.take("content");
        let calls = read_calls(&mut fields, &mut num_calls)?;
        if content.is_some() || calls.is_none() {
            entries.push(("content".into(), content.unwrap_or(Json::String(String::new()))));
        }
        entries.extend(calls.map(|calls| ("tool_calls".into(), calls)));
        entries.extend(fields.take("thinking").map(|text| ("reasoning_content".into(), text)));
        if role == "tool" {
            let id = fields.string("tool_call_id", MAX_WORD_LEN)?.unwrap_or_else(|| call_id(num_results));
            num_results += 1;
            entries.push(("tool_call_id".into(), Json::String(id)));
            // The name repeats that of the call.
            for name in ["tool_name", "name"] {
                fields.string(name, MAX_WORD_LEN)?;
            }
        }
        refuse_images(&mut fields)?;
        fields.finish()?;
        body.message(Json::Object(entries), &path);
        body.part_of_last("reasoning_content", &format!("{path}.thinking"));
    }
    Ok(num_messages)
}

/// Refuses images, which the models served here do not read.
pub(super) fn refuse_images(fields: &mut Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    fields.refuse("images", is_empty, "this model reads text only")
}

fn call_id(number: usize) -> String {
    format!("call_{number}")
}

/// Reads the calls of an assistant's message, whose arguments are an object, not text.
fn read_calls(fields: &mut Fields, num_calls: &mut usize) -> Result<Option<Json>, ApiError> {
    let path = fields.path("tool_calls");
    let Some(values) = fields.array("tool_calls", MAX_CALLS)?.filter(|values| !values.is_empty()) else {
        return Ok(None);
    };
    let mut calls = Vec::new();
    for (i, value) in values.into_iter().enumerate() {
        let mut call = Fields::within(format!("{path}[{i}]"), value)?;
        let id = call.string("id", MAX_WORD_LEN)?.unwrap_or_else(|| call_id(*num_calls));
        *num_calls += 1;
        call.string("type", MAX_WORD_LEN)?;
        let function_path = call.path("function");
        let mut function = Fields::within(function_path, call.required("function")?)?;
        function.integer("index", 0..=i64::from(i32::MAX))?;
        function.string("description", usize::MAX)?;
        let (name, arguments_path) = (function.required("name")?, function.path("arguments"));
        let arguments = match function.take("arguments") {
            None => "{}".to_owned(),
            Some(Json::String(text)) => text,
            Some(value @ Json::Object(_)) => value.into_value().to_string(),
            Some(other) => return Err(fields::wrong_type(&arguments_path, "an object", &other)),
        };
        function.finish()?;
        call.finish()?;
        let function = vec![("name".into(), name), ("arguments".into(), Json::String(arguments))];
        calls.push(Json::Object(vec![
            ("id".into(), Json::String(id)),
            ("type".into(), Json::String("function".into())),
            ("function".into(), Json::Object(function)),
        ]));
    }
    Ok(Some(Json::Array(calls)))
}

/// Reads `format`: `json`, or a schema.
pub(super) fn read_format(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let kind = |name: &str| ("type".to_owned(), Json::String(name.into()));
    let format = match fields.take("format") {
        None => return Ok(()),
        Some(Json::String(text)) if text.is_empty() => return Ok(()),
        Some(Json::String(text)) if text == "json" => vec![kind("json_object")],
        Some(schema @ Json::Object(_)) => {
            let schema = vec![("name".into(), Json::String("format".into())), ("schema".into(), schema)];
            body.rename("response_format.json_schema.schema", "format");
            vec![kind("json_schema"), ("json_schema".into(), Json::Object(schema))]
        }
        Some(Json::String(text)) => {
            return Err(ApiError::field(
                "format",
                format!("format: expected json or a schema, found {}", shown(&text)),
            ));
        }
        Some(other) => return Err(fields::wrong_type("format", "json or a schema", &other)),
    };
    body.set("response_format", Some(Json::Object(format)), "format");
    Ok(())
}

/// Reads `think`: whether, or how much, the model thinks before it answers.
pub(super) fn read_think(fields: &mut Fields, can_think: bool, body: &mut ChatBody) -> Result<(), ApiError> {
    let effort = match fields.take("think") {
        // A model that does not think has nothing to switch off.
        Some(Json::Bool(false)) if !can_think => return Ok(()),
        None | Some(Json::Bool(true)) if can_think => return Ok(()),
        None => return Ok(()),
        Some(Json::Bool(false)) => Json::String("none".into()),
        Some(Json::Bool(true)) => {
            let message = "think: this model has no thoughts that its chat template separates from the answer";
            return Err(ApiError::field("think", message).code("unsupported_value"));
        }
        Some(effort @ Json::String(_)) => effort,
        Some(other) => return Err(fields::wrong_type("think", "a boolean or a level", &other)),
    };
    body.set("reasoning_effort", Some(effort), "think");
    Ok(())
}
