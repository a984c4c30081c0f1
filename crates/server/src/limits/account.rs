//! Accounting of one request: charges its tenant while tokens are generated, and records the outcome at the end.

use std::sync::Arc;

use pellucid_engine::Embeddings;
use pellucid_generate::Summary;

use super::tenants::Permit;
use crate::http::drain::InFlight;
use crate::http::error::ApiError;
use crate::metrics::Outcome;
use crate::reply::Spec;
use crate::state::App;

/// Exists while a reply is generated. An account that is dropped without `close` records a cancelled request.
#[derive(Debug)]
pub(crate) struct Account {
    app: Arc<App>,
    permit: Permit,
    /// Index of the model.
    model: usize,
    _in_flight: InFlight,
    request_id: String,
    /// Log probabilities reported for each token of the output.
    logprobs_per_token: usize,
    /// Log probabilities of the prompt that were charged at admission.
    prompt_logprobs: usize,
    num_charged: usize,
    latest: Summary,
    is_closed: bool,
}

impl Account {
    /// Opens the account of a request that was admitted and charged for its prompt.
    pub(crate) fn open(app: &Arc<App>, permit: Permit, model: usize, request_id: &str, spec: &Spec) -> Account {
        let num_prompt = spec.num_prompt_tokens();
        let is_scored = spec.prompts.iter().any(|prompt| prompt.request.score_prompt);
        let logprobs_per_token = spec.logprobs_per_token();
        // A scored prompt reports the same number of log probabilities for each token as the output.
        let prompt_logprobs = if is_scored { num_prompt * logprobs_per_token } else { 0 };
        permit.tenant.charge_output(0, prompt_logprobs);
        Account {
            app: app.clone(),
            permit,
            model,
            _in_flight: app.drain.start_request(),
            request_id: request_id.to_owned(),
            logprobs_per_token,
            prompt_logprobs,
            num_charged: 0,
            latest: Summary { prompt_tokens: num_prompt, ..Summary::default() },
            is_closed: false,
        }
    }

    /// Id of the request in the log.
    pub(crate) fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Opens the account of a request for vectors that was admitted and charged for its texts.
    pub(crate) fn open_for_vectors(
        app: &Arc<App>,
        permit: Permit,
        model: usize,
        request_id: &str,
        num_tokens: usize,
    ) -> Account {
        Account {
            app: app.clone(),
            permit,
            model,
            _in_flight: app.drain.start_request(),
            request_id: request_id.to_owned(),
            logprobs_per_token: 0,
            prompt_logprobs: 0,
            num_charged: 0,
            latest: Summary { prompt_tokens: num_tokens, ..Summary::default() },
            is_closed: false,
        }
    }

    /// Records how a request for vectors ended.
    pub(crate) fn close_for_vectors(&mut self, outcome: Outcome, found: Option<&Embeddings>) {
        let mut summary = std::mem::take(&mut self.latest);
        if let Some(found) = found {
            (summary.queue_time, summary.total_time) = (found.queue_time, found.total_time);
        }
        self.close(outcome, &summary);
    }

    /// Takes more memory if the request holds less than `bytes`.
    pub(crate) fn hold_at_least(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.permit.hold_at_least(bytes)
    }

    /// Charges for `num_output` tokens in all, those that were charged before included.
    pub(crate) fn charge(&mut self, num_output: usize) {
        let new = num_output.saturating_sub(self.num_charged);
        if new > 0 {
            self.permit.tenant.charge_output(new, new * self.logprobs_per_token);
            self.num_charged += new;
            self.latest.completion_tokens = num_output;
        }
    }

    /// Closes the account of a request that the engine refused: refunds its prompt and records `outcome`, if any.
    pub(crate) fn refuse(&mut self, error: &ApiError, outcome: Option<Outcome>) {
        self.permit.refund_prompt(self.latest.prompt_tokens, self.prompt_logprobs);
        self.permit.refuse(error);
        if let Some(outcome) = outcome {
            self.close(outcome, &Summary::default());
        }
        self.is_closed = true;
    }

    /// Records how the request ended, in the metrics and the log, unless an earlier call did.
    pub(crate) fn close(&mut self, outcome: Outcome, summary: &Summary) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        self.app.metrics.observe(&self.permit.tenant.config.name, self.model, outcome, summary);
        tracing::info!(
            request_id = self.request_id,
            tenant = self.permit.tenant.config.name,
            outcome = outcome.name(),
            prompt_tokens = summary.prompt_tokens,
            cached_tokens = summary.cached_tokens,
            output_tokens = summary.completion_tokens,
            queue_ms = summary.queue_time.as_millis() as u64,
            first_token_ms = summary.time_to_first_token.map(|time| time.as_millis() as u64),
            total_ms = summary.total_time.as_millis() as u64,
            "reply"
        );
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if !self.is_closed {
            let latest = std::mem::take(&mut self.latest);
            self.close(Outcome::Cancelled, &latest);
        }
    }
}
