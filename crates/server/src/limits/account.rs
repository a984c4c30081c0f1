//! Accounting of one request: charges its tenant while tokens are generated, and records the outcome at the end.

use std::sync::Arc;
use std::time::Instant;

use pellucid_engine::Embeddings;
use pellucid_generate::Summary;

use super::permit::Permit;
use crate::http::caller::Caller;
use crate::http::drain::InFlight;
use crate::http::error::ApiError;
use crate::metrics::Outcome;
use crate::reply::Spec;
use crate::spans::request_trace::RequestTrace;
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
    trace: Option<Arc<RequestTrace>>,
    submitted: Instant,
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
    pub(crate) fn open(app: &Arc<App>, permit: Permit, model: usize, caller: &Caller, spec: &Spec) -> Account {
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
            request_id: caller.request_id.clone(),
            trace: caller.trace.clone(),
            submitted: Instant::now(),
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
        caller: &Caller,
        num_tokens: usize,
    ) -> Account {
        Account {
            app: app.clone(),
            permit,
            model,
            _in_flight: app.drain.start_request(),
            request_id: caller.request_id.clone(),
            trace: caller.trace.clone(),
            submitted: Instant::now(),
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

    /// Charges the log probabilities that a probe reports.
    pub(crate) fn charge_probe(&mut self, summary: &Summary) {
        if let Some(found) = &summary.probe {
            let reported = found.probe.layers.iter().map(|layer| layer.top.len() + 1).sum();
            self.permit.tenant.charge_output(0, reported);
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
        if let Some(trace) = &self.trace {
            self.record_spans(trace, outcome, summary);
        }
        let trace_id = self.trace.as_ref().map(|trace| trace.id());
        tracing::info!(
            request_id = self.request_id,
            trace_id,
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

    /// Records when the request waited, read its prompt and generated. Names of attributes are those of OpenTelemetry's
    /// conventions for generative models, where these have one.
    fn record_spans(&self, trace: &RequestTrace, outcome: Outcome, summary: &Summary) {
        if let Some(model) = self.app.metrics.models.name(self.model) {
            trace.set("gen_ai.request.model", model.as_str());
        }
        trace.set("gen_ai.usage.input_tokens", summary.prompt_tokens);
        trace.set("gen_ai.usage.output_tokens", summary.completion_tokens);
        trace.set("pellucid.cached_tokens", summary.cached_tokens);
        trace.set("pellucid.outcome", outcome.name());
        if matches!(outcome, Outcome::Failed | Outcome::TimedOut) {
            trace.fail(outcome.name());
        }
        let queue = summary.queue_time;
        trace.add("queue", (self.submitted, queue), Vec::new());
        if let Some(prefill) = summary.prefill_time {
            let computed = summary.prompt_tokens.saturating_sub(summary.cached_tokens);
            let tokens = vec![
                ("pellucid.computed_tokens", computed.into()),
                ("pellucid.cached_tokens", summary.cached_tokens.into()),
            ];
            trace.add("prefill", (self.submitted + queue, prefill), tokens);
        }
        if let Some(first) = summary.time_to_first_token {
            let tokens = vec![("gen_ai.usage.output_tokens", summary.completion_tokens.into())];
            trace.add("decode", (self.submitted + first, summary.decode_time), tokens);
        }
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
