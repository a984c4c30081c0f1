//! Guards at the border of the server: prompts are judged before they are charged and submitted, refusals become
//! errors, and what was blocked is logged with the rule, which clients are not told.

use std::time::Instant;

use pellucid_generate::{Finish, LoadedModel, Refusal, Summary};

use crate::http::body::Admission;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, RETRY_SOON_S};
use crate::limits::account::Account;
use crate::limits::client_memory::out_of_memory;
use crate::reply::{Dialect, Spec};

/// Lets the guards judge the prompts of a request, on threads of theirs.
pub(crate) async fn judge(
    caller: &Caller,
    admission: &Admission<LoadedModel>,
    mut spec: Spec,
) -> Result<Spec, ApiError> {
    if admission.model.guards.is_empty() {
        return Ok(spec);
    }
    let started = Instant::now();
    let mut prompts = std::mem::take(&mut spec.prompts);
    for prompt in &mut prompts {
        prompt.traceparent = caller.trace.as_ref().map(|trace| trace.header().into());
    }
    let judged = admission.model.judge_apart(prompts).await;
    if let Some(trace) = &caller.trace {
        let verdict = if judged.is_ok() { "pass" } else { "refuse" };
        trace.add("guard", (started, started.elapsed()), vec![("pellucid.verdict", verdict.into())]);
    }
    match judged {
        Ok(prompts) => Ok(Spec { prompts, ..spec }),
        Err(refusal) => {
            tracing::warn!(request_id = caller.request_id, tenant = caller.tenant.config.name, "{refusal}");
            let error = error_of(&refusal, spec.dialect);
            admission.permit.refuse(&error);
            Err(error)
        }
    }
}

fn error_of(refusal: &Refusal, dialect: Dialect) -> ApiError {
    let param = match dialect {
        Dialect::Chat => "messages",
        Dialect::Completions => "prompt",
    };
    match refusal {
        Refusal::Blocked { .. } => {
            ApiError::field(param, "the prompt was blocked by the content filter of this server").code("content_filter")
        }
        Refusal::Failed { .. } => {
            let message = "the content filter of this server could not judge the prompt; try again later";
            ApiError::unavailable("content_filter_failed", message, RETRY_SOON_S)
        }
        Refusal::OutOfMemory => out_of_memory(),
    }
}

/// Logs the choices that a guard blocked.
pub(crate) fn log_blocked(account: &Account, summary: &Summary) {
    for (choice, finish) in summary.finishes.iter().enumerate() {
        if let Some(Finish::ContentFilter { guard, rule }) = finish {
            tracing::warn!(
                request_id = account.request_id(),
                choice,
                guard,
                rule,
                "a guard blocked the rest of a reply"
            );
        }
    }
}
