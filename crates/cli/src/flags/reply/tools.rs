//! Flags of tools: the functions that a reply may call, from a file. `run` and `explain` share them.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use pellucid_engine::TenantId;
use pellucid_generate::{GrammarError, GrammarSource, LoadedModel, ReplyPlan, Tool, ToolChoice, ToolRules};
use serde_json::{Map, Value};

use crate::flags::json_file;
use crate::flags::usage_error::{OrUsage, UsageError, bail_usage};
use crate::terminal::{format, log};

/// The tools that a reply may call.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ToolArgs {
    /// Let the model call the tools in this file, a JSON list as in requests
    /// to the server. Calls are shown, not made
    #[arg(long, verbatim_doc_comment, value_name = "FILE", help_heading = "Tools")]
    tools: Option<PathBuf>,

    /// Whether the model calls tools: auto, none, required, or the name of
    /// the tool to call [default: auto]
    #[arg(long, verbatim_doc_comment, value_name = "CHOICE", help_heading = "Tools", requires = "tools")]
    tool_choice: Option<String>,
}

/// The tools of the file and the choice among them, before a model is known.
#[derive(Debug, Clone)]
pub(crate) struct GivenTools {
    path: PathBuf,
    rules: ToolRules,
}

impl ToolArgs {
    /// Returns the flag that was given.
    pub(crate) fn flag(&self) -> Option<&'static str> {
        self.tools.as_ref().map(|_| "--tools")
    }

    /// Reads the file of the tools, before a model is loaded.
    pub(crate) fn read(&self) -> Result<Option<GivenTools>> {
        let Some(path) = &self.tools else { return Ok(None) };
        let tools = read_tools(json_file::read(path)?).map_err(|error| in_file(path, error)).or_usage()?;
        let choice = match self.tool_choice.as_deref() {
            None | Some("auto") => ToolChoice::Auto,
            Some("none") => ToolChoice::None,
            Some("required") => ToolChoice::Required,
            Some(name) => ToolChoice::Named(name.to_owned()),
        };
        match ToolRules::new(tools, choice, true) {
            Ok(rules) => Ok(Some(GivenTools { path: path.clone(), rules })),
            Err(error) => {
                // An error about the choice is one of the command line, not of the file.
                let text = error.to_string();
                Err(UsageError::because(match text.strip_prefix("tool_choice: ") {
                    Some(rest) => format!("--tool-choice: {rest}"),
                    None => format!("{}: {text}", path.display()),
                }))
            }
        }
    }
}

/// Returns the plan of a model's replies: tools that they may call, and the grammar of an answer. Compiles both.
pub(crate) fn plan_reply(
    tools: Option<&GivenTools>,
    grammar: Option<&(&'static str, GrammarSource)>,
    model: &LoadedModel,
) -> Result<ReplyPlan> {
    if tools.is_some() && model.template.is_none() {
        bail_usage!("--tools: this model has no chat template, so there is no place for tools");
    }
    let rules = tools.map_or_else(ToolRules::default, |tools| tools.rules.clone());
    let plan = model.plan_reply(TenantId(0), &rules, grammar.map(|(_, source)| source.clone()));
    if let Ok(plan) = &plan {
        note_not_enforced(plan.not_enforced());
    }
    plan.map_err(|error| {
        let place = match (&error, tools, grammar) {
            (GrammarError::Tool { name, .. }, Some(tools), _) => {
                let index = tools.rules.tools().iter().position(|tool| tool.name == *name).unwrap_or(0);
                format!("{}: tools[{index}].function.parameters", tools.path.display())
            }
            (_, _, Some((flag, _))) => (*flag).to_owned(),
            (_, tools, None) => tools.map_or_else(String::new, |tools| tools.path.display().to_string()),
        };
        UsageError::because(format!("{place}: {error}"))
    })
}

/// Says which parts of the tools' schemas calls need not satisfy.
fn note_not_enforced(parts: &[String]) {
    if !parts.is_empty() {
        let parts: Vec<String> = parts.iter().map(|part| format::escaped(part)).collect();
        log::note(&format!("note: calls need not satisfy {}", parts.join(", ")));
    }
}

fn in_file(path: &Path, error: anyhow::Error) -> anyhow::Error {
    anyhow!("{}: {error}", path.display())
}

/// Returns the tools of a list like that of a request.
fn read_tools(values: Value) -> Result<Vec<Tool>> {
    let Value::Array(values) = values else { bail!("expected a list of tools, found {}", kind(&values)) };
    if values.is_empty() {
        bail!("expected at least one tool, found an empty list");
    }
    values.into_iter().enumerate().map(|(i, value)| read_tool(&format!("tools[{i}]"), value)).collect()
}

fn read_tool(place: &str, definition: Value) -> Result<Tool> {
    let fields = object(place, &definition, &["type", "function"])?;
    if fields.get("type").and_then(Value::as_str) != Some("function") {
        bail!("{place}.type: expected \"function\"");
    }
    let place = format!("{place}.function");
    let function = object(&place, &definition["function"], &["name", "description", "parameters", "strict"])?;
    let Some(name) = text(&place, function, "name")? else { bail!("{place}.name: expected the name of the tool") };
    let description = text(&place, function, "description")?;
    let parameters = function.get("parameters").cloned();
    if let Some(other) = function.get("strict").filter(|value| !value.is_boolean() && !value.is_null()) {
        bail!("{place}.strict: expected true or false, found {}", kind(other));
    }
    let is_strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
    Ok(Tool { name, description, parameters, is_strict, definition: Some(definition) })
}

/// Returns the members of an object that has no others than `known`.
fn object<'v>(place: &str, value: &'v Value, known: &[&str]) -> Result<&'v Map<String, Value>> {
    let Value::Object(members) = value else { bail!("{place}: expected an object, found {}", kind(value)) };
    match members.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => bail!("{place}: unknown field {name:?}; the fields are {}", known.join(", ")),
        None => Ok(members),
    }
}

fn text(place: &str, members: &Map<String, Value>, name: &str) -> Result<Option<String>> {
    match members.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => bail!("{place}.{name}: expected a text, found {}", kind(other)),
    }
}

/// Names the kind of a JSON value.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tools_are_read_as_in_requests() {
        let definition = json!({ "type": "function", "function": { "name": "f", "description": "d", "strict": true,
            "parameters": { "type": "object" } } });
        let tools = read_tools(json!([definition])).unwrap();
        assert_eq!((tools[0].name.as_str(), tools[0].description.as_deref()), ("f", Some("d")));
        assert_eq!(tools[0].definition(), definition);
    }

    #[test]
    fn errors_name_the_place() {
        let tool = |function: Value| json!([{ "type": "function", "function": function }]);
        for (wrong, expected) in [
            (json!({}), "expected a list of tools, found an object"),
            (json!([]), "expected at least one tool, found an empty list"),
            (json!([1]), "tools[0]: expected an object, found a number"),
            (json!([{ "type": "custom", "function": {} }]), "tools[0].type: expected \"function\""),
            (json!([{ "name": "f" }]), "tools[0]: unknown field \"name\"; the fields are type, function"),
            (json!([{ "type": "function" }]), "tools[0].function: expected an object, found nothing"),
            (tool(json!({})), "tools[0].function.name: expected the name of the tool"),
            (tool(json!({ "name": 1 })), "tools[0].function.name: expected a text, found a number"),
            (
                tool(json!({ "name": "f", "description": [] })),
                "tools[0].function.description: expected a text, found a list",
            ),
            (
                tool(json!({ "name": "f", "strict": "x" })),
                "tools[0].function.strict: expected true or false, found a text",
            ),
        ] {
            assert_eq!(read_tools(wrong).unwrap_err().to_string(), expected);
        }
    }
}
