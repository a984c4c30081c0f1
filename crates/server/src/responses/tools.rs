//! Functions that the model may call, and the choice among them.

use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::translation::ChatBody;

const MAX_TOOLS: usize = 1024;
const MAX_WORD_LEN: usize = 512;
/// Maximum bytes of a description, of a function and of its namespace.
const MAX_DESCRIPTION_LEN: usize = 64 << 10;

/// The functions of a request that belong to a namespace. The model knows them by full names, `namespace.function`;
/// items of calls have both names apart.
#[derive(Debug, Default)]
pub(super) struct Namespaces(Vec<(String, String)>);

impl Namespaces {
    /// Returns the full name of a function.
    pub(super) fn join(namespace: Option<&str>, name: &str) -> String {
        namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}.{name}"))
    }

    /// Returns the namespace of the function that the model called, if it has one, and its name there.
    pub(super) fn split(&self, called: String) -> (Option<String>, String) {
        let is_called = |(namespace, name): &&(String, String)| Namespaces::join(Some(namespace), name) == called;
        match self.0.iter().find(is_called) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, called),
        }
    }
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`, and repeats them in `echo`.
pub(super) fn read(
    fields: &mut Fields,
    body: &mut ChatBody,
    echo: &mut Map<String, Value>,
) -> Result<Namespaces, ApiError> {
    let mut shown_tools = Vec::new();
    let mut namespaces = Namespaces::default();
    if let Some(values) = fields.array("tools", MAX_TOOLS)? {
        let mut tools = Vec::new();
        for (i, value) in values.into_iter().enumerate() {
            let path = format!("tools[{i}]");
            shown_tools.push(value.clone().into_value());
            let mut fields = Fields::within(path.clone(), value)?;
            if check_kind(&mut fields, &["function", "namespace"])? == "namespace" {
                read_namespace(fields, &mut tools, &mut namespaces, body)?;
            } else {
                body.rename(&format!("tools[{}].function", tools.len()), &path);
                tools.push(read_function(fields)?.into_json());
            }
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
    Ok(namespaces)
}

/// A function that was read.
struct Function {
    name: String,
    description: Option<String>,
    /// The other fields, which have the same names in a chat request.
    rest: Vec<(String, Json)>,
}

impl Function {
    fn into_json(self) -> Json {
        let description = self.description.map(|text| ("description".to_owned(), Json::String(text)));
        let name = ("name".to_owned(), Json::String(self.name));
        function_json([name].into_iter().chain(description).chain(self.rest).collect())
    }
}

/// Reads functions that share a name and a description, and adds them under their full names.
fn read_namespace(
    mut fields: Fields,
    tools: &mut Vec<Json>,
    namespaces: &mut Namespaces,
    body: &mut ChatBody,
) -> Result<(), ApiError> {
    let namespace = required_word(&mut fields, "name")?;
    let about = fields.string("description", MAX_DESCRIPTION_LEN)?;
    let path = fields.path("tools");
    let values = fields::array(&path, fields.required("tools")?, MAX_TOOLS)?;
    fields.finish()?;
    for (i, value) in values.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        let mut fields = Fields::within(path.clone(), value)?;
        check_kind(&mut fields, &["function"])?;
        let mut function = read_function(fields)?;
        namespaces.0.push((namespace.clone(), function.name.clone()));
        function.name = Namespaces::join(Some(&namespace), &function.name);
        // Chat templates have no place for the description of a group.
        let both = [about.clone(), function.description.take()];
        function.description = both.into_iter().flatten().reduce(|about, own| format!("{about}\n{own}"));
        body.rename(&format!("tools[{}].function", tools.len()), &path);
        tools.push(function.into_json());
    }
    Ok(())
}

fn required_word(fields: &mut Fields, name: &str) -> Result<String, ApiError> {
    let path = fields.path(name);
    fields::string(&path, fields.required(name)?, MAX_WORD_LEN)
}

fn read_function(mut fields: Fields) -> Result<Function, ApiError> {
    let name = required_word(&mut fields, "name")?;
    let description = fields.string("description", MAX_DESCRIPTION_LEN)?;
    let mut rest = Vec::new();
    for name in ["parameters", "strict"] {
        rest.extend(fields.take(name).map(|value| (name.to_owned(), value)));
    }
    let is_false = |value: &Json| *value == Json::Bool(false);
    fields.refuse("defer_loading", is_false, "all functions are shown to the model")?;
    let is_direct =
        |value: &Json| matches!(value, Json::Array(callers) if callers.as_slice() == [Json::String("direct".into())]);
    fields.refuse("allowed_callers", is_direct, "only the model itself calls functions here")?;
    fields.refuse("output_schema", |_| false, "chat templates do not write it")?;
    fields.finish()?;
    Ok(Function { name, description, rest })
}

/// Takes `type`, which must be one of `known`.
fn check_kind(fields: &mut Fields, known: &[&str]) -> Result<String, ApiError> {
    let path = fields.path("type");
    let kind = fields::string(&path, fields.required("type")?, MAX_WORD_LEN)?;
    if known.contains(&kind.as_str()) {
        return Ok(kind);
    }
    let (expected, found) = (known.join(" or "), shown(&kind));
    let message = format!("{path}: this server runs no tools of its own; expected {expected}, found {found}");
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
                check_kind(&mut tool, &["function"])?;
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
