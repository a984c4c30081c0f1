//! Tools that a request offers to the model, and the rules about their use.
//!
//! The server and the library read them from a request; the reply plan makes a prompt, a grammar and a splitter of
//! them.

use serde_json::{Map, Value, json};

/// Maximum number of tools of a request. The OpenAI API has the same limit.
pub const MAX_TOOLS: usize = 128;
/// Maximum characters of a tool's name.
pub const MAX_TOOL_NAME: usize = 64;

/// A tool that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Name of the function: letters, digits, `_` and `-`, and `.` within it.
    pub name: String,
    /// Tells the model what the tool does.
    pub description: Option<String>,
    /// JSON schema of the arguments, which are an object. `None` stands for a tool without arguments.
    pub parameters: Option<Value>,
    /// Whether a keyword of the schema that is not enforced is an error. Otherwise it is left out, and
    /// [`ReplyPlan::not_enforced`](crate::ReplyPlan::not_enforced) names it.
    pub is_strict: bool,
    /// The tool as the request has it, which chat templates print in its order. `None` builds it from the other fields.
    pub definition: Option<Value>,
}

/// Whether the model may or must call tools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model calls none. The prompt has no tools.
    None,
    /// The model decides.
    #[default]
    Auto,
    /// The model calls at least one.
    Required,
    /// The model calls this one.
    Named(String),
    /// Only these may be called, all others stay in the prompt.
    Allowed {
        /// Whether the model calls at least one of them.
        is_required: bool,
        /// Names of the tools.
        names: Vec<String>,
    },
}

/// The tools of a request and how they may be called.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolRules {
    tools: Vec<Tool>,
    choice: ToolChoice,
    is_parallel: bool,
}

/// Reason why tools of a request are refused. Each names the field of the request that it is about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// The request has more than [`MAX_TOOLS`].
    #[error("tools: expected at most {MAX_TOOLS} tools, found {0}")]
    TooMany(usize),
    /// A name is empty, too long, or has other characters.
    #[error(
        "tools[{index}]: expected a name of 1 to {MAX_TOOL_NAME} letters, digits, \"_\", \"-\" or \".\", found {name:?}"
    )]
    Name {
        /// Index of the tool.
        index: usize,
        /// The name, or its beginning.
        name: String,
    },
    /// Two tools have one name.
    #[error("tools[{index}]: the name {name:?} is taken by tools[{first}]")]
    Duplicate {
        /// Index of the second tool of this name.
        index: usize,
        /// Index of the first.
        first: usize,
        /// The name.
        name: String,
    },
    /// The parameters are no JSON schema of an object.
    #[error("tools[{index}]: the parameters of {name:?} must be a JSON schema of an object, found {found}")]
    Parameters {
        /// Index of the tool.
        index: usize,
        /// Its name.
        name: String,
        /// The thing that was found.
        found: String,
    },
    /// `tool_choice` names a tool that the request does not have.
    #[error("tool_choice: there is no tool {0:?}; the tools are {1}")]
    Unknown(String, String),
    /// `tool_choice` asks for a call, but there are no tools.
    #[error("tool_choice: expected tools, because a call is required, found none")]
    NoTools,
    /// The list of allowed tools is empty.
    #[error("tool_choice: expected at least one allowed tool, found none")]
    NoAllowed,
}

impl Tool {
    /// Returns a tool; `parameters` is the JSON schema of its arguments, which every call satisfies.
    pub fn new(name: impl Into<String>, description: impl Into<String>, parameters: Value) -> Tool {
        Tool {
            name: name.into(),
            description: Some(description.into()),
            parameters: Some(parameters),
            is_strict: true,
            definition: None,
        }
    }

    /// Returns a tool for templates in the shape that the reference implementation gives them: the request's own
    /// object, or one with `type` and `function`.
    pub fn definition(&self) -> Value {
        if let Some(definition) = &self.definition {
            return definition.clone();
        }
        let mut function = Map::new();
        function.insert("name".into(), self.name.clone().into());
        if let Some(description) = &self.description {
            function.insert("description".into(), description.clone().into());
        }
        function.insert("parameters".into(), self.schema());
        json!({ "type": "function", "function": function })
    }

    /// Returns the schema of the arguments; that of an empty object for a tool without parameters.
    pub fn schema(&self) -> Value {
        // An empty object is how some clients write that there are no parameters.
        match &self.parameters {
            Some(Value::Object(members)) if !members.is_empty() => Value::Object(members.clone()),
            _ => json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        }
    }

    fn check(&self, index: usize) -> Result<(), ToolError> {
        let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let is_name = (1..=MAX_TOOL_NAME).contains(&self.name.len())
            && self.name.chars().all(is_inner)
            && !self.name.starts_with('.')
            && !self.name.ends_with('.');
        if !is_name {
            return Err(ToolError::Name { index, name: self.name.chars().take(MAX_TOOL_NAME).collect() });
        }
        let found = match &self.parameters {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Object(members)) => match members.get("type") {
                None => return Ok(()),
                Some(Value::String(name)) if name == "object" => return Ok(()),
                Some(other) => format!("the type {other}"),
            },
            Some(other) => match other {
                Value::Array(_) => "an array".into(),
                Value::String(_) => "a string".into(),
                other => other.to_string(),
            },
        };
        Err(ToolError::Parameters { index, name: self.name.clone(), found })
    }
}

impl ToolRules {
    /// Checks names, schemas and the choice. `is_parallel` says that one reply may hold several calls.
    pub fn new(tools: Vec<Tool>, choice: ToolChoice, is_parallel: bool) -> Result<ToolRules, ToolError> {
        if tools.len() > MAX_TOOLS {
            return Err(ToolError::TooMany(tools.len()));
        }
        for (index, tool) in tools.iter().enumerate() {
            tool.check(index)?;
            if let Some(first) = tools[..index].iter().position(|other| other.name == tool.name) {
                return Err(ToolError::Duplicate { index, first, name: tool.name.clone() });
            }
        }
        let known = |name: &String| {
            if tools.iter().any(|tool| tool.name == *name) {
                return Ok(());
            }
            let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            Err(ToolError::Unknown(name.chars().take(MAX_TOOL_NAME).collect(), names))
        };
        match &choice {
            ToolChoice::None | ToolChoice::Auto => {}
            ToolChoice::Required if tools.is_empty() => return Err(ToolError::NoTools),
            ToolChoice::Required => {}
            ToolChoice::Named(name) => known(name)?,
            ToolChoice::Allowed { names, .. } if names.is_empty() => return Err(ToolError::NoAllowed),
            ToolChoice::Allowed { names, .. } => names.iter().try_for_each(known)?,
        }
        Ok(ToolRules { tools, choice, is_parallel })
    }

    /// Returns the tools, in the order of the request.
    pub fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// Returns the choice.
    pub fn choice(&self) -> &ToolChoice {
        &self.choice
    }

    /// Whether one reply may hold several calls.
    pub fn is_parallel(&self) -> bool {
        self.is_parallel
    }

    /// Returns the tools that the model may call; none if it must not call any.
    pub fn callable(&self) -> Vec<&Tool> {
        let is_callable = |tool: &&Tool| match &self.choice {
            ToolChoice::None => false,
            ToolChoice::Auto | ToolChoice::Required => true,
            ToolChoice::Named(name) => tool.name == *name,
            ToolChoice::Allowed { names, .. } => names.contains(&tool.name),
        };
        self.tools.iter().filter(is_callable).collect()
    }

    /// Whether the reply must call a tool.
    pub fn is_required(&self) -> bool {
        matches!(
            self.choice,
            ToolChoice::Required | ToolChoice::Named(_) | ToolChoice::Allowed { is_required: true, .. }
        )
    }

    /// Returns the `tools` of the prompt; `None` if there are none, or none may be called.
    pub fn prompt_tools(&self) -> Option<Value> {
        let is_shown = !self.tools.is_empty() && self.choice != ToolChoice::None;
        is_shown.then(|| self.tools.iter().map(Tool::definition).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Tool {
        Tool { name: name.into(), description: None, parameters: None, is_strict: true, definition: None }
    }

    fn error(tools: Vec<Tool>, choice: ToolChoice) -> String {
        ToolRules::new(tools, choice, true).unwrap_err().to_string()
    }

    #[test]
    fn names_are_checked() {
        for name in ["a", "get_weather", "ns.get-weather", "7zip"] {
            assert!(ToolRules::new(vec![tool(name)], ToolChoice::Auto, true).is_ok(), "{name}");
        }
        for name in ["", "a b", "a\"", "é", "<tool_call>", ".a", "a.", "a/b", &"x".repeat(65)] {
            assert!(error(vec![tool(name)], ToolChoice::Auto).starts_with("tools[0]: expected a name"), "{name}");
        }
        assert_eq!(
            error(vec![tool("a"), tool("b"), tool("a")], ToolChoice::Auto),
            "tools[2]: the name \"a\" is taken by tools[0]"
        );
        assert_eq!(error(vec![tool("a"); 129], ToolChoice::Auto), "tools: expected at most 128 tools, found 129");
    }

    #[test]
    fn parameters_are_schemas_of_objects() {
        let with = |parameters: Value| Tool { parameters: Some(parameters), ..tool("f") };
        for fine in [json!({}), json!(null), json!({ "type": "object" }), json!({ "properties": {} })] {
            assert!(ToolRules::new(vec![with(fine)], ToolChoice::Auto, true).is_ok());
        }
        for (wrong, found) in [(json!([]), "an array"), (json!({ "type": "string" }), "the type \"string\"")] {
            let text = error(vec![with(wrong)], ToolChoice::Auto);
            assert!(text.starts_with("tools[0]: the parameters of \"f\"") && text.ends_with(found), "{text}");
        }
    }

    #[test]
    fn the_choice_names_known_tools() {
        let tools = || vec![tool("a"), tool("b")];
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(
            error(tools(), ToolChoice::Named("c".into())),
            "tool_choice: there is no tool \"c\"; the tools are a, b"
        );
        assert!(
            error(tools(), ToolChoice::Allowed { is_required: false, names: names(&["a", "x"]) }).contains("\"x\"")
        );
        assert!(error(tools(), ToolChoice::Allowed { is_required: false, names: vec![] }).contains("at least one"));
        assert!(error(vec![], ToolChoice::Required).contains("found none"));
        let allowed = ToolChoice::Allowed { is_required: true, names: names(&["b"]) };
        let rules = ToolRules::new(tools(), allowed, false).unwrap();
        assert_eq!(rules.callable(), [&tool("b")]);
        assert!(rules.is_required() && !rules.is_parallel());
        assert_eq!(rules.prompt_tools().unwrap().as_array().unwrap().len(), 2, "the prompt has all tools");
        let none = ToolRules::new(tools(), ToolChoice::None, true).unwrap();
        assert!(none.callable().is_empty() && none.prompt_tools().is_none());
    }

    #[test]
    fn templates_get_the_object_of_the_request() {
        let sent = json!({ "type": "function", "function": { "description": "d", "name": "f", "strict": true } });
        let tool = Tool { definition: Some(sent.clone()), ..tool("f") };
        assert_eq!(tool.definition().to_string(), sent.to_string());
    }
}
