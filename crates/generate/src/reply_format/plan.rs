//! The plan of a reply: from the tools and the grammar of a request to the tools of the prompt, the constraint on the
//! answer, and the splitter of its text. The server, the library and the command line use it in the same way:
//!
//! 1. [`ToolRules::new`](crate::ToolRules::new) checks the tools and the choice among them.
//! 2. [`LoadedModel::plan_reply`] compiles the grammar; it takes long, so it runs on the thread of the request. An
//!    error names the tool and the place in its schema.
//! 3. The prompt is rendered with [`ReplyPlan::tools`] in [`ChatPrompt::tools`](crate::ChatPrompt::tools). Messages of
//!    the conversation may have `tool_calls` and the role `tool`, as in the OpenAI API.
//! 4. [`ReplyPlan::apply`] sets the constraint and the splitter of the prompt. Thoughts are separated afterwards, since
//!    they precede the answer that this plan constrains.
//!
//! The reply then arrives as [`Delta::text`](crate::Delta::text) and [`Delta::calls`](crate::Delta::calls), and ends
//! with [`Finish::ToolCalls`](crate::Finish::ToolCalls) if it has calls.

use std::sync::Arc;

use pellucid_engine::TenantId;
use pellucid_grammar::{
    CallRules, CallSource, CallTool, CompiledGrammar, Error, GrammarSource, NotEnforced, ReplyRules,
};
use pellucid_sampling::TokenConstraint;
use serde_json::Value;

use super::calls::CallText;
use crate::{LoadedModel, PromptRequest, ToolRules};

/// The plan of the replies to one request.
#[derive(Debug, Clone, Default)]
pub struct ReplyPlan {
    tools: Option<Value>,
    constraint: Option<Arc<dyn TokenConstraint>>,
    calls: Option<CallText>,
    /// Whether an answer that is not a call has a grammar.
    has_grammar: bool,
    not_enforced: Vec<String>,
}

/// Maximum parts of schemas that a reply names as not enforced; a last entry counts the others.
const MAX_NOT_ENFORCED: usize = 64;
/// Maximum characters of the name of a part.
const MAX_PART_LEN: usize = 256;

impl ReplyPlan {
    /// Returns the tools that the prompt shows to the model.
    pub fn tools(&self) -> Option<&Value> {
        self.tools.as_ref()
    }

    /// Whether the reply may call tools.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// Whether an answer that calls no tool satisfies a grammar.
    pub fn has_grammar(&self) -> bool {
        self.has_grammar
    }

    /// Returns the parts of the tools' schemas that calls need not satisfy, such as
    /// `tools[3].function.parameters.properties.tags.uniqueItems`. Tools that are strict have none.
    pub fn not_enforced(&self) -> &[String] {
        &self.not_enforced
    }

    /// Makes the replies to a prompt follow the plan. Call it when the ids of the prompt are known: the ids of calls
    /// depend on them, so that each call of a conversation has its own.
    pub fn apply(&self, prompt: &mut PromptRequest) {
        if let Some(constraint) = &self.constraint {
            prompt.request.constraint = Some(constraint.clone());
        }
        if let Some(calls) = &self.calls {
            // FNV-1a over the ids.
            let mix = |hash: u64, id: &u32| (hash ^ u64::from(*id)).wrapping_mul(0x100_0000_01B3);
            let seed = prompt.request.prompt.iter().fold(0xCBF2_9CE4_8422_2325, mix);
            let calls = Arc::new(calls.clone().with_seed(seed));
            prompt.splitter = Some(prompt.splitter.take().unwrap_or_default().with_calls(calls));
        }
    }
}

impl LoadedModel {
    /// Plans the replies to a request. `answer` is the grammar of an answer that is not a call, such as that of
    /// `response_format`.
    pub fn plan_reply(
        &self,
        tenant: TenantId,
        rules: &ToolRules,
        answer: Option<GrammarSource>,
    ) -> Result<ReplyPlan, Error> {
        let answer = match answer {
            Some(_) if rules.is_required() => None,
            answer => answer.map(|source| self.grammar(tenant, source)).transpose()?,
        };
        let tools: Vec<CallTool> = rules
            .callable()
            .into_iter()
            .map(|tool| CallTool { name: tool.name.clone(), parameters: tool.schema(), is_strict: tool.is_strict })
            .collect();
        let shown = rules.prompt_tools();
        let has_grammar = answer.is_some();
        if tools.is_empty() {
            let constraint = answer.map(|answer| answer as Arc<dyn TokenConstraint>);
            return Ok(ReplyPlan { tools: shown, constraint, has_grammar, ..ReplyPlan::default() });
        }
        let format = self.calling().format();
        let answer_open = self.calling().answer_open().map(str::to_owned);
        let (is_parallel, is_required) = (rules.is_parallel(), rules.is_required());
        let source = CallSource { format, tools, is_parallel, is_required };
        let grammar = self.grammar(tenant, GrammarSource::Calls(source))?;
        let not_enforced = not_enforced(&grammar, rules);
        let calls = CallText::new(format, grammar.tools(), answer_open.clone())?;
        let triggers = calls.triggers().to_vec();
        let call_rules = CallRules { grammar, triggers, is_at_start: format.is_at_start, is_required };
        let constraint = self.reply_constraint(ReplyRules { answer_open, answer, calls: Some(call_rules) })?;
        let constraint: Option<Arc<dyn TokenConstraint>> = Some(Arc::new(constraint));
        Ok(ReplyPlan { tools: shown, constraint, calls: Some(calls), has_grammar, not_enforced })
    }
}

/// Returns the paths of the parts of schemas that are not enforced, in the request.
fn not_enforced(grammar: &CompiledGrammar, rules: &ToolRules) -> Vec<String> {
    let parts = grammar.not_enforced();
    let index = |name: &str| rules.tools().iter().position(|tool| tool.name == name).unwrap_or_default();
    let path = |part: &NotEnforced| format!("tools[{}].function.parameters{}", index(&part.tool), path_of(&part.place));
    let shortened = |path: String| match path.char_indices().nth(MAX_PART_LEN) {
        Some((end, _)) => format!("{}...", &path[..end]),
        None => path,
    };
    let mut paths: Vec<String> = parts.iter().take(MAX_NOT_ENFORCED).map(path).map(shortened).collect();
    if parts.len() > MAX_NOT_ENFORCED {
        paths.push(format!("{} more", parts.len() - MAX_NOT_ENFORCED));
    }
    paths
}

/// Returns a JSON pointer in the notation of fields: `#/anyOf/0/items` is `.anyOf[0].items`.
fn path_of(pointer: &str) -> String {
    let part = |name: &str| {
        let name = name.replace("~1", "/").replace("~0", "~");
        let is_word = name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '$'));
        match name.parse::<usize>() {
            Ok(index) => format!("[{index}]"),
            Err(_) if is_word && !name.is_empty() => format!(".{name}"),
            Err(_) => format!("[{}]", Value::from(name)),
        }
    };
    pointer.trim_start_matches('#').split('/').skip(1).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_become_paths_of_fields() {
        for (pointer, path) in [
            ("#/properties/tags/uniqueItems", ".properties.tags.uniqueItems"),
            ("#/anyOf/0/$ref", ".anyOf[0].$ref"),
            ("#/properties/a~1b c/not", ".properties[\"a/b c\"].not"),
            ("#", ""),
        ] {
            assert_eq!(path_of(pointer), path);
        }
    }
}
