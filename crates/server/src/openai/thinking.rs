//! Settings of thinking in a request, as variables of the model's chat template.

use pellucid_generate::{LoadedModel, REASONING_EFFORTS};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};

use super::messages::ChatMessage;
use super::openapi::schemas;
use crate::http::error::ApiError;
use crate::http::fields::{Fields, shown};

/// Reads `reasoning_effort` and adds the variables that set it.
pub(super) fn read_effort(
    fields: &mut Fields,
    model: &LoadedModel,
    variables: &mut Option<Map<String, Value>>,
) -> Result<Option<String>, ApiError> {
    let name = "reasoning_effort";
    let path = fields.path(name);
    let Some(effort) = fields.string(name, 64)? else { return Ok(None) };
    if !REASONING_EFFORTS.contains(&effort.as_str()) {
        let message = format!("{path}: expected one of {}, found {}", REASONING_EFFORTS.join(", "), shown(&effort));
        return Err(ApiError::field(path, message));
    }
    let added = model.thinking().settings.variables(&effort);
    let added = added.map_err(|error| {
        let message = format!("{path} is not supported: {error}");
        ApiError::field(path.clone(), message).code("unsupported_parameter")
    })?;
    add(added, &path, variables)?;
    Ok(Some(effort))
}

/// Reads `thinking_budget` and adds the variable that tells the model, if the template has one.
pub(super) fn read_budget(
    fields: &mut Fields,
    model: &LoadedModel,
    variables: &mut Option<Map<String, Value>>,
) -> Result<Option<usize>, ApiError> {
    let name = "thinking_budget";
    let path = fields.path(name);
    let Some(budget) = fields.whole(name, 0..=i64::from(i32::MAX))? else { return Ok(None) };
    if model.thinking().markers.is_none() {
        let message = format!("{path} is not supported: the model's chat template has no thoughts");
        return Err(ApiError::field(path, message).code("unsupported_parameter"));
    }
    add(model.thinking().settings.budget_variables(budget), &path, variables)?;
    Ok(Some(budget))
}

fn add(added: Map<String, Value>, path: &str, variables: &mut Option<Map<String, Value>>) -> Result<(), ApiError> {
    for (name, value) in added {
        let given = variables.get_or_insert_default();
        if given.contains_key(&name) {
            let message = format!("{path} sets {name}, which chat_template_kwargs sets as well: give one of them");
            return Err(ApiError::field(path, message));
        }
        given.insert(name, value);
    }
    Ok(())
}

/// Reads the thoughts of an assistant's message, under the name of replies or of their streams.
pub(super) fn read_thoughts(fields: &mut Fields, is_assistant: bool) -> Result<Option<String>, ApiError> {
    let mut thoughts = None;
    for name in ["reasoning_content", "reasoning"] {
        let path = fields.path(name);
        let Some(text) = fields.string(name, usize::MAX)? else { continue };
        if !is_assistant {
            let message = format!("{path}: only a message of the assistant has thoughts");
            return Err(ApiError::field(path, message));
        }
        // Clients that send a reply back may have both names, with the same text.
        if thoughts.replace(text).is_some_and(|other| Some(&other) != thoughts.as_ref()) {
            let message = format!("{path} differs from reasoning_content, which means the same: give one of them");
            return Err(ApiError::field(path, message));
        }
    }
    Ok(thoughts.filter(|text| !text.is_empty()))
}

/// Refuses thoughts of earlier messages if the model's template has none.
pub(super) fn check_thoughts(path: &str, messages: &[ChatMessage], model: &LoadedModel) -> Result<(), ApiError> {
    match messages.iter().position(|message| message.reasoning_content.is_some()) {
        Some(index) if model.thinking().markers.is_none() => {
            let path = format!("{path}[{index}].reasoning_content");
            let message = format!("{path} is not supported: the model's chat template has no thoughts");
            Err(ApiError::field(path, message).code("unsupported_parameter"))
        }
        _ => Ok(()),
    }
}

/// Describes `reasoning_effort`.
pub(crate) fn reasoning_effort() -> RefOr<Schema> {
    let description = "Amount of thinking before the answer; refused if the model's chat template has no such setting";
    let levels: Vec<Value> = REASONING_EFFORTS.iter().map(|&level| level.into()).chain([Value::Null]).collect();
    schemas::schema(json!({ "description": description, "type": ["string", "null"], "enum": levels }))
}
