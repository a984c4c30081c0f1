//! Settings of thinking: which variables of a chat template they set, and in which field it reads earlier thoughts.
//!
//! Templates have no common name for these. A variable is known here if published templates read it; a template that
//! reads none of them has no such setting, and a request for it is refused.

use pellucid_tokenizer::ChatTemplate;
use serde_json::{Map, Value, json};

use super::thought_formats::{THOUGHT_FIELDS, rendered_block, rendered_thought};

/// Levels of `reasoning_effort`, from none to most.
pub const REASONING_EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Variables that take a level as text.
const LEVELS: [&str; 3] = ["reasoning_effort", "thinking_effort", "reasoning_strength"];

/// Variables that turn thinking on and off, with the text for both where it is not a boolean.
const SWITCHES: [(&str, Option<[&str; 2]>); 4] = [
    ("enable_thinking", None),
    ("thinking", None),
    ("thinking_mode", Some(["enabled", "disabled"])),
    ("thinking_option", Some(["on", "off"])),
];

/// Variable that tells the model its budget.
const BUDGET: &str = "thinking_budget";

/// The settings of thinking that a chat template has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThinkingSettings {
    level: Option<&'static str>,
    /// Text of the level that turns thinking off.
    none: Option<&'static str>,
    /// Levels that the template takes; empty if it does not say.
    levels: Vec<&'static str>,
    switches: Vec<(&'static str, Option<[&'static str; 2]>)>,
    takes_budget: bool,
    history: History,
}

/// How a template reads the thoughts of earlier messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum History {
    /// It does not write them.
    #[default]
    Dropped,
    /// In this field of the message.
    Field(&'static str),
    /// As a part of the content.
    ContentPart,
}

/// Reason why a level of `reasoning_effort` is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ThinkingError {
    /// The template reads no variable for it.
    #[error("the model's chat template has no setting of its reasoning")]
    NoSetting,
    /// The template has levels, but none that turns thinking off.
    #[error("the model's chat template cannot turn its reasoning off")]
    AlwaysThinks,
    /// The template has other levels.
    #[error("the model knows the levels low, medium and high")]
    UnknownLevel,
}

impl ThinkingSettings {
    /// Returns the settings of a template.
    pub fn of(template: &ChatTemplate) -> ThinkingSettings {
        let level = LEVELS.into_iter().find(|name| template.reads(name));
        let none = ["none", "no_think"].into_iter().find(|word| level.is_some() && template.quotes(word));
        let takes = |(name, words): &(&str, Option<[&str; 2]>)| {
            template.reads(name) && words.is_none_or(|[_, off]| template.quotes(off))
        };
        // The harmony format writes any level into the prompt, and its models know three.
        let is_harmony = template.source().contains("<|channel|>analysis<|message|>");
        ThinkingSettings {
            level,
            none,
            levels: if is_harmony { vec!["low", "medium", "high"] } else { Vec::new() },
            switches: SWITCHES.into_iter().filter(takes).collect(),
            takes_budget: template.reads(BUDGET),
            history: History::of(template),
        }
    }

    /// Returns the variables of the template that set a level of [`REASONING_EFFORTS`]. A template with a switch alone
    /// knows two levels: `none`, and all others.
    pub fn variables(&self, effort: &str) -> Result<Map<String, Value>, ThinkingError> {
        let is_on = effort != "none";
        if self.level.is_none() && self.switches.is_empty() {
            return Err(ThinkingError::NoSetting);
        }
        let mut variables = Map::new();
        for (name, words) in &self.switches {
            let value = words.map_or(Value::Bool(is_on), |[on, off]| if is_on { on.into() } else { off.into() });
            variables.insert((*name).to_owned(), value);
        }
        match (self.level, self.none) {
            (Some(_), _) if is_on && !self.levels.is_empty() && !self.levels.contains(&effort) => {
                return Err(ThinkingError::UnknownLevel);
            }
            (Some(name), _) if is_on => drop(variables.insert(name.to_owned(), effort.into())),
            _ if !self.switches.is_empty() => {}
            (Some(name), Some(none)) => drop(variables.insert(name.to_owned(), none.into())),
            _ => return Err(ThinkingError::AlwaysThinks),
        }
        Ok(variables)
    }

    /// Returns the variables of the template that tell the model its budget; none if the template has no such variable.
    pub fn budget_variables(&self, num_tokens: usize) -> Map<String, Value> {
        self.takes_budget.then(|| (BUDGET.to_owned(), num_tokens.into())).into_iter().collect()
    }

    /// Puts the thoughts of an assistant's message where the template reads them. Most templates drop those of earlier
    /// turns, as the model was trained.
    pub fn set_thoughts(&self, message: &mut Value, thoughts: String) {
        match self.history {
            History::Dropped => {}
            History::Field(name) => message[name] = thoughts.into(),
            History::ContentPart => {
                let content = message["content"].take();
                let thinking = json!({ "type": "thinking", "thinking": thoughts });
                message["content"] = json!([thinking, { "type": "text", "text": content }]);
            }
        }
    }
}

impl History {
    fn of(template: &ChatTemplate) -> History {
        let field = THOUGHT_FIELDS.into_iter().find(|field| rendered_thought(template, field).is_some());
        match field {
            Some(field) => History::Field(field),
            None if rendered_block(template) => History::ContentPart,
            // A template may write them only in conversations that are not tried here.
            None if template.quotes("reasoning_content") => History::Field("reasoning_content"),
            None => History::Dropped,
        }
    }
}
