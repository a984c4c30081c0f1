//! A request that was admitted: charges its tenant, and holds its memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::StatusCode;

use super::client_memory::HeldMemory;
use super::tenants::{Budgets, Tenant, check};
use crate::http::error::ApiError;

/// One of a tenant's concurrent requests; released when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    pub(crate) tenant: Arc<Tenant>,
    /// Memory that the request takes, from its body to the last byte of its reply.
    memory: Option<HeldMemory>,
}

impl Permit {
    pub(super) fn new(tenant: Arc<Tenant>) -> Permit {
        Permit { tenant, memory: None }
    }

    /// Charges a request for its prompt and its probes, or names the limit that refuses it. Output is charged as it is
    /// generated.
    pub(crate) fn charge_prompt(
        &self,
        num_prompt: usize,
        reports_logprobs: bool,
        num_probes: usize,
    ) -> Result<(), ApiError> {
        let mut budgets = self.tenant.budgets();
        let Budgets { tokens, logprobs, probes, .. } = &mut *budgets;
        // Checked again, because other requests may have been charged since this one was admitted.
        check(tokens.as_mut(), "tokens per minute", "tokens_per_minute")?;
        check(logprobs.as_mut().filter(|_| reports_logprobs), "log probabilities per minute", "logprob_budget")?;
        check(probes.as_mut().filter(|_| num_probes > 0), "probes per minute", "probe_budget")?;
        if let Some(limit) = probes {
            limit.charge(num_probes);
        }
        if let Some(limit) = tokens {
            limit.charge(num_prompt);
        }
        Ok(())
    }

    /// Keeps memory until the request has ended.
    pub(crate) fn keep(&mut self, memory: HeldMemory) {
        match &mut self.memory {
            Some(kept) => kept.merge(memory),
            None => self.memory = Some(memory),
        }
    }

    /// Takes more memory, or gives some back, so that the request holds `bytes`.
    pub(crate) fn hold(&mut self, bytes: usize) -> Result<(), ApiError> {
        let Some(memory) = &mut self.memory else { return Ok(()) };
        memory.shrink_to(bytes);
        memory.grow_to(bytes)
    }

    /// Takes more memory if the request holds less than `bytes`.
    pub(crate) fn hold_at_least(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.memory.as_mut().map_or(Ok(()), |memory| memory.grow_to(bytes))
    }

    /// Refunds the charge for a prompt that is not computed.
    pub(crate) fn refund_prompt(&self, num_prompt: usize, num_logprobs: usize) {
        let mut budgets = self.tenant.budgets();
        let Budgets { tokens, logprobs, .. } = &mut *budgets;
        for (limit, amount) in [(tokens, num_prompt), (logprobs, num_logprobs)] {
            if let Some(limit) = limit {
                limit.refund(amount);
            }
        }
    }

    /// Refunds an admitted request that is refused for lack of capacity or by an internal error. A request that is
    /// itself wrong has cost work and stays charged.
    pub(crate) fn refuse(&self, error: &ApiError) {
        if error.status != StatusCode::TOO_MANY_REQUESTS && !error.status.is_server_error() {
            return;
        }
        if let Some(limit) = &mut self.tenant.budgets().requests {
            limit.refund(1);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.tenant.usage.num_running.fetch_sub(1, Ordering::SeqCst);
    }
}
