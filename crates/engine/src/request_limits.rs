//! The checks that a request must pass before it is queued. They depend only on settings that never change while the
//! engine runs, so the submitting thread makes them: a bad request is refused, and its sampler is built, without taking
//! time from the loop.

use std::collections::HashMap;
use std::time::Instant;

use pellucid_model::DecoderConfig;
use pellucid_sampling::{Sampler, SamplingParams};

use crate::queue::Place;
use crate::{EngineOptions, Error, Request, TenantId};

/// The model's configuration, the engine's options and the tenants' quotas.
#[derive(Debug, Clone)]
pub struct RequestLimits {
    pub(crate) config: DecoderConfig,
    pub(crate) options: EngineOptions,
    pub(crate) bytes_per_block: usize,
    pub(crate) quotas: HashMap<TenantId, usize>,
}

/// A request that passed the checks, with the sampler of its first choice.
#[derive(Debug)]
pub(crate) struct CheckedRequest {
    pub(crate) request: Request,
    pub(crate) sampler: Sampler,
    /// Its place in the queue, until it starts.
    pub(crate) place: Place,
    /// When it was submitted. The time until the loop takes it counts as time in the queue.
    pub(crate) arrived: Instant,
}

impl RequestLimits {
    /// Refuses a request that is invalid or could never run, and returns the sampler of its first choice.
    pub(crate) fn check(&self, request: &Request) -> Result<Sampler, Error> {
        let quota = self.quotas.get(&request.scope.tenant).copied();
        check(request, &self.config, &self.options, quota)
    }

    pub(crate) fn check_sampling(&self, params: &SamplingParams) -> Result<Sampler, Error> {
        Ok(Sampler::new(params, self.config.vocab_size)?)
    }
}

/// Refuses a request that is invalid or could never run, and returns the sampler of its first choice. `quota` is the
/// tenant's maximum number of blocks.
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
