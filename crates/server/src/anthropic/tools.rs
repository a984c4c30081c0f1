//! Tools of a request, and the choice among them.

use super::content::read_cache_control;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::translation::ChatBody;

const MAX_TOOLS: usize = 1024;
const MAX_WORD_LEN: usize = 512;

/// Reads `tools` and `tool_choice`.
pub(super) fn read(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    if let Some(values) = fields.array("tools", MAX_TOOLS)? {
        let mut tools = Vec::new();
        for (i, value) in values.into_iter().enumerate() {
            let path = format!("tools[{i}]");
            tools.push(read_tool(Fields::within(path.clone(), value)?)?);
            body.rename(&format!("{path}.function"), &path);
            body.rename(&format!("{path}.function.parameters"), &format!("{path}.input_schema"));
        }
        body.set("tools", Some(Json::Array(tools)), "tools");
    }
    read_choice(fields, body)
}

fn read_tool(mut fields: Fields) -> Result<Json, ApiError> {
    let kind_path = fields.path("type");
    if let Some(kind) = fields.string("type", MAX_WORD_LEN)?
        && kind != "custom"
    {
        let message =
            format!("{kind_path}: this server runs no tools of its own; expected custom, found {}", shown(&kind));
        return Err(ApiError::field(kind_path, message).code("unsupported_value"));
    }
    read_cache_control(&mut fields)?;
    let mut function = vec![("name".to_owned(), fields.required("name")?)];
    for (name, target) in [("description", "description"), ("input_schema", "parameters"), ("strict", "strict")] {
        let value = if name == "input_schema" { Some(fields.required(name)?) } else { fields.take(name) };
        function.extend(value.map(|value| (target.to_owned(), value)));
    }
    // Arguments are streamed as they are generated in any case.
    fields.boolean("eager_input_streaming")?;
    let is_false = |value: &Json| *value == Json::Bool(false);
    fields.refuse("defer_loading", is_false, "all tools are shown to the model")?;
    fields.refuse("input_examples", |_| false, "chat templates do not write examples")?;
    fields.refuse("allowed_callers", |_| false, "this server runs no tools of its own")?;
    fields.finish()?;
    Ok(Json::Object(vec![
        ("type".into(), Json::String("function".into())),
        ("function".into(), Json::Object(function)),
    ]))
}

fn read_choice(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let Some(value) = fields.take("tool_choice") else { return Ok(()) };
    let mut choice = Fields::within("tool_choice".into(), value)?;
    let kind_path = choice.path("type");
    let kind = fields::string(&kind_path, choice.required("type")?, MAX_WORD_LEN)?;
    let translated = match kind.as_str() {
        "auto" | "none" => Json::String(kind),
        "any" => Json::String("required".into()),
        "tool" => {
            let function = Json::Object(vec![("name".into(), choice.required("name")?)]);
            body.rename("tool_choice.function", "tool_choice");
            Json::Object(vec![("type".into(), Json::String("function".into())), ("function".into(), function)])
        }
        _ => {
            let message = format!("{kind_path}: expected auto, any, tool or none, found {}", shown(&kind));
            return Err(ApiError::field(kind_path, message));
        }
    };
    if choice.boolean("disable_parallel_tool_use")? == Some(true) {
        body.set("parallel_tool_calls", Some(Json::Bool(false)), "tool_choice.disable_parallel_tool_use");
    }
    choice.finish()?;
    body.set("tool_choice", Some(translated), "tool_choice");
    Ok(())
}
