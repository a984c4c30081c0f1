//! Tools in requests (OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`), calls and results in messages, and
//! calls in replies.

mod calls;
mod plan;
mod reply_calls;
mod schemas;

use pellucid_generate::{MAX_TOOLS, Tool, ToolChoice, ToolError, ToolRules};

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;

pub(crate) use calls::{CallReader, check_results};
pub(crate) use plan::plan;
pub(crate) use reply_calls::{CallPiece, CalledTool, calls_bytes, texts_len, write_calls};
pub(crate) use schemas::{parallel_tool_calls, tool_calls, tool_choice, tools};

const MAX_WORD_LEN: usize = 64;
/// Maximum bytes of a tool's description. Those of published coding agents have up to 20 KB.
const MAX_DESCRIPTION_LEN: usize = 64 << 10;

/// Fields that OpenAI replaced, and their new names.
const RENAMED: [(&str, &str); 2] = [("functions", "use tools"), ("function_call", "use tool_choice")];

/// Reads the tools of a request and the rules about their use; `None` without tools.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<ToolRules>, ApiError> {
    for (name, why) in RENAMED {
        fields.refuse(name, means_no_tools, why)?;
    }
    let mut tools = Vec::new();
    let path = fields.path("tools");
    for (i, value) in fields.array("tools", MAX_TOOLS)?.unwrap_or_default().into_iter().enumerate() {
        tools.push(read_tool(format!("{path}[{i}]"), value)?);
    }
    let path = fields.path("tool_choice");
    let choice = fields.take("tool_choice").map(|value| read_choice(&path, value)).transpose()?.unwrap_or_default();
    let is_parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let has_tools = !tools.is_empty();
    let rules = ToolRules::new(tools, choice, is_parallel).map_err(|error| refusal(&error))?;
    Ok(has_tools.then_some(rules))
}

/// Whether a value of one of the [`RENAMED`] fields has no effect.
fn means_no_tools(value: &Json) -> bool {
    match value {
        Json::Array(values) => values.is_empty(),
        Json::String(word) => word == "none" || word == "auto",
        _ => false,
    }
}

/// Takes the word `type`, which must be one of `known`.
fn read_type(fields: &mut Fields, known: &[&str]) -> Result<String, ApiError> {
    let path = fields.path("type");
    let kind = fields::string(&path, fields.required("type")?, MAX_WORD_LEN)?;
    if known.contains(&kind.as_str()) {
        return Ok(kind);
    }
    let message = format!("{path}: expected {}, found {}", known.join(" or "), shown(&kind));
    Err(ApiError::field(path, message).code("unsupported_value"))
}

/// Takes the object `name`.
fn read_object(fields: &mut Fields, name: &str) -> Result<Fields, ApiError> {
    let path = fields.path(name);
    Fields::within(path, fields.required(name)?)
}

fn read_tool(path: String, value: Json) -> Result<Tool, ApiError> {
    let definition = value.clone().into_value();
    let mut fields = Fields::within(path, value)?;
    read_type(&mut fields, &["function"])?;
    let mut function = read_object(&mut fields, "function")?;
    fields.finish()?;
    let name_path = function.path("name");
    let name = fields::string(&name_path, function.required("name")?, MAX_WORD_LEN)?;
    let description = function.string("description", MAX_DESCRIPTION_LEN)?;
    let parameters = function.take("parameters").map(Json::into_value);
    let is_strict = function.boolean("strict")?.unwrap_or(false);
    function.finish()?;
    Ok(Tool { name, description, parameters, is_strict, definition: Some(definition) })
}

fn read_choice(path: &str, value: Json) -> Result<ToolChoice, ApiError> {
    if let Json::String(word) = &value {
        return match word.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            other => {
                let message = format!("{path}: expected none, auto, required or an object, found {}", shown(other));
                Err(ApiError::field(path, message).code("unsupported_value"))
            }
        };
    }
    if !matches!(value, Json::Object(_)) {
        return Err(fields::wrong_type(path, "none, auto, required or an object", &value));
    }
    let mut fields = Fields::within(path.to_owned(), value)?;
    let choice = match read_type(&mut fields, &["function", "allowed_tools"])?.as_str() {
        "function" => ToolChoice::Named(read_name(&mut fields)?),
        _ => {
            let allowed = read_object(&mut fields, "allowed_tools")?;
            read_allowed(allowed)?
        }
    };
    fields.finish()?;
    Ok(choice)
}

/// Takes the name in `"function": {"name": ...}`.
fn read_name(fields: &mut Fields) -> Result<String, ApiError> {
    let mut function = read_object(fields, "function")?;
    let path = function.path("name");
    let name = fields::string(&path, function.required("name")?, MAX_WORD_LEN)?;
    function.finish()?;
    Ok(name)
}

fn read_allowed(mut fields: Fields) -> Result<ToolChoice, ApiError> {
    let path = fields.path("mode");
    let mode = fields::string(&path, fields.required("mode")?, MAX_WORD_LEN)?;
    let is_required = match mode.as_str() {
        "auto" => false,
        "required" => true,
        other => {
            let message = format!("{path}: expected auto or required, found {}", shown(other));
            return Err(ApiError::field(path, message).code("unsupported_value"));
        }
    };
    let path = fields.path("tools");
    let tools = fields::array(&path, fields.required("tools")?, MAX_TOOLS)?;
    fields.finish()?;
    let mut names = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let mut tool = Fields::within(format!("{path}[{i}]"), tool)?;
        read_type(&mut tool, &["function"])?;
        names.push(read_name(&mut tool)?);
        tool.finish()?;
    }
    Ok(ToolChoice::Allowed { is_required, names })
}

/// Returns the error for tools that do not fit together.
fn refusal(error: &ToolError) -> ApiError {
    let param = match error {
        ToolError::TooMany(_) => "tools".into(),
        ToolError::Name { index, .. } | ToolError::Duplicate { index, .. } => format!("tools[{index}].function.name"),
        ToolError::Parameters { index, .. } => format!("tools[{index}].function.parameters"),
        ToolError::Unknown(..) | ToolError::NoTools | ToolError::NoAllowed => "tool_choice".into(),
    };
    ApiError::field(param, error.to_string())
}
