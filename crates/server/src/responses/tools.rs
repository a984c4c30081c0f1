//! Functions that the model may call, and the choice among them.

use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::translation::ChatBody;

const MAX_TOOLS: usize = 1024;
const MAX_WORD_LEN: usize = 512;

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`, and repeats them in `echo`.
pub(super) fn read(fields: &mut Fields, body: &mut ChatBody, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut shown_tools = Vec::new();
    if let Some(values) = fields.array("tools", MAX_TOOLS)? {
        let mut tools = Vec::new();
        for (i, value) in values.into_iter().enumerate() {
            let path = format!("tools[{i}]");
            shown_tools.push(value.clone().into_value());
            tools.push(read_tool(Fields::within(path.clone(), value)?)?);
            body.rename(&format!("{path}.function"), &path);
        }
        body.set("tools", Some(Json::Array(tools)), "tools");
    }
    echo.insert("tools".into(), Value::Array(shown_tools));
    let choice = fields.take("tool_choice");
    let shown_choice = choice.clone().map_or_else(|| json!("auto"), Json::into_value);
    echo.insert("tool_choice".into(), shown_choice);
    let choice = choice.map(|choice| read_choice(choice, body)).transpose()?;
    body.set("tool_choice", choice, "tool_choice");
    let is_parallel = fields.boolean("parallel_tool_calls")?;
    echo.insert("parallel_tool_calls".into(), json!(is_parallel.unwrap_or(true)));
    body.set("parallel_tool_calls", is_parallel.map(Json::Bool), "parallel_tool_calls");
    Ok(())
}

fn read_tool(mut fields: Fields) -> Result<Json, ApiError> {
    check_kind(&mut fields)?;
    let mut function = vec![("name".to_owned(), fields.required("name")?)];
    for name in ["description", "parameters", "strict"] {
        function.extend(fields.take(name).map(|value| (name.to_owned(), value)));
    }
    let is_false = |value: &Json| *value == Json::Bool(false);
    fields.refuse("defer_loading", is_false, "all functions are shown to the model")?;
    let is_direct =
        |value: &Json| matches!(value, Json::Array(callers) if callers.as_slice() == [Json::String("direct".into())]);
    fields.refuse("allowed_callers", is_direct, "only the model itself calls functions here")?;
    fields.refuse("output_schema", |_| false, "chat templates do not write it")?;
    fields.finish()?;
    Ok(function_json(function))
}

/// Takes `type`, which must be `function`.
fn check_kind(fields: &mut Fields) -> Result<(), ApiError> {
    let path = fields.path("type");
    let kind = fields::string(&path, fields.required("type")?, MAX_WORD_LEN)?;
    if kind == "function" {
        return Ok(());
    }
    let message = format!("{path}: this server runs no tools of its own; expected function, found {}", shown(&kind));
    Err(ApiError::field(path, message).code("unsupported_value"))
}

fn function_json(function: Vec<(String, Json)>) -> Json {
    let function = ("function".into(), Json::Object(function));
    Json::Object(vec![("type".into(), Json::String("function".into())), function])
}

/// Returns the choice in the form of a chat request.
fn read_choice(value: Json, body: &mut ChatBody) -> Result<Json, ApiError> {
    if matches!(value, Json::String(_)) {
        return Ok(value);
    }
    let mut choice = Fields::within("tool_choice".into(), value)?;
    let kind_path = choice.path("type");
    let kind = fields::string(&kind_path, choice.required("type")?, MAX_WORD_LEN)?;
    let translated = match kind.as_str() {
        "function" => {
            body.rename("tool_choice.function", "tool_choice");
            function_json(vec![("name".into(), choice.required("name")?)])
        }
        "allowed_tools" => {
            body.rename("tool_choice.allowed_tools", "tool_choice");
            let mode = choice.required("mode")?;
            let mut tools = Vec::new();
            let values = fields::array("tool_choice.tools", choice.required("tools")?, MAX_TOOLS)?;
            for (i, value) in values.into_iter().enumerate() {
                let path = format!("tool_choice.tools[{i}]");
                let mut tool = Fields::within(path.clone(), value)?;
                check_kind(&mut tool)?;
                tools.push(function_json(vec![("name".into(), tool.required("name")?)]));
                tool.finish()?;
                body.rename(&format!("tool_choice.allowed_tools.tools[{i}].function"), &path);
            }
            let allowed = vec![("mode".into(), mode), ("tools".into(), Json::Array(tools))];
            Json::Object(vec![("type".into(), Json::String(kind)), ("allowed_tools".into(), Json::Object(allowed))])
        }
        _ => {
            let message = format!("{kind_path}: expected function or allowed_tools, found {}", shown(&kind));
            return Err(ApiError::field(kind_path, message).code("unsupported_value"));
        }
    };
    choice.finish()?;
    Ok(translated)
}
