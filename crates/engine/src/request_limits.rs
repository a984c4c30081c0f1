//! What can be served at all. Known before the loop starts and the same until it ends, so that whoever submits can ask on its own thread:
//! a bad request is refused, and its sampler built, without taking time from the loop.

use std::collections::HashMap;
use std::time::Instant;

use pellucid_model::DecoderConfig;
use pellucid_sampling::{Sampler, SamplingParams};

use crate::{EngineOptions, Error, Request, TenantId};

/// The model's shape, the engine's limits, the tenants' quotas.
#[derive(Debug, Clone)]
pub struct RequestLimits {
    pub(crate) config: DecoderConfig,
    pub(crate) options: EngineOptions,
    pub(crate) quotas: HashMap<TenantId, usize>,
}

/// A request that keeps to the limits, with the sampler of its first choice.
#[derive(Debug)]
pub(crate) struct CheckedRequest {
    pub(crate) request: Request,
    pub(crate) sampler: Sampler,
    /// When it was submitted: time on the way to the loop is time in the queue.
    pub(crate) arrived: Instant,
}

impl RequestLimits {
    pub(crate) fn check(&self, request: Request) -> Result<CheckedRequest, Error> {
        let quota = self.quotas.get(&request.scope.tenant).copied();
        let sampler = check(&request, &self.config, &self.options, quota)?;
        Ok(CheckedRequest { request, sampler, arrived: Instant::now() })
    }

    pub(crate) fn check_sampling(&self, params: &SamplingParams) -> Result<Sampler, Error> {
        Ok(Sampler::new(params, self.config.vocab_size)?)
    }
}

/// Refuses what could never run, with the numbers.
pub(crate) fn check(
    request: &Request,
    config: &DecoderConfig,
    options: &EngineOptions,
    quota: Option<usize>,
) -> Result<Sampler, Error> {
    let sampler = request.check(config, options.max_sequences)?;
    let needed = request.blocks_needed(config, options.block_len);
    let have = options.num_blocks;
    if needed > have {
        return Err(Error::ExceedsKvMemory { needed, have });
    }
    match quota {
        Some(quota) if needed > quota => Err(Error::ExceedsQuota { needed, quota }),
        _ => Ok(sampler),
    }
}
