//! From the tools of a request to a plan of its replies.

use pellucid_generate::{GrammarError, LoadedModel, ReplyPlan, ToolRules};

use crate::http::error::{ApiError, RETRY_SOON_S};
use crate::limits::tenants::Tenant;
use crate::openai::structured_output::StructuredOutput;

/// Plans replies that may call tools; `output` is the grammar of an answer that calls none. Takes long, because it
/// compiles a grammar.
pub(crate) fn plan(
    rules: &ToolRules,
    output: Option<&StructuredOutput>,
    model: &LoadedModel,
    tenant: &Tenant,
    beam_width: Option<usize>,
) -> Result<ReplyPlan, ApiError> {
    if beam_width.is_some() {
        return Err(ApiError::field("tools", "tools: beam search cannot be combined with tools"));
    }
    let source = output.map(|output| output.source.clone());
    model.plan_reply(tenant.id, rules, source).map_err(|error| {
        let param = match &error {
            GrammarError::NoThread => return ApiError::unavailable("no_thread", error.to_string(), RETRY_SOON_S),
            GrammarError::Tool { name, .. } => {
                let index = rules.tools().iter().position(|tool| tool.name == *name);
                index.map_or("tools".into(), |index| format!("tools[{index}].function.parameters"))
            }
            _ => output.map_or("tools".into(), |output| output.param.clone()),
        };
        ApiError::field(&param, format!("{param}: {error}")).code("invalid_grammar")
    })
}
