//! How an engine runs: the size of its KV memory, the limits of a step and of the queue, and when requests may
//! overcommit memory.

use pellucid_model::{DecoderConfig, KvMemory};
use pellucid_tensor::DType;

use crate::kv_cache::StateOptions;

/// Settings of an [`Engine`](crate::Engine), fixed when it is created.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Number of blocks of KV memory.
    pub num_blocks: usize,
    /// Positions in each block.
    pub block_len: usize,
    /// Format in which keys and values are stored.
    pub kv_dtype: DType,
    /// Maximum sequences that decode at once.
    pub max_sequences: usize,
    /// Maximum rows of a step, at least `max_sequences`.
    pub step_tokens: usize,
    /// Maximum tokens of one prompt in a step. A longer chunk delays the next token of the other requests by more.
    pub chunk_len: usize,
    /// Maximum requests in the queue.
    pub max_waiting: usize,
    /// Which requests may start with less memory reserved than they could need.
    pub overcommit: Overcommit,
    /// Key of the prefix cache's hashes.
    pub secret: [u8; 32],
    /// Blocks between two snapshots of recurrent states, for models that have them. `None`: the number of blocks whose
    /// keys and values are as large as one state, at least one.
    pub snapshot_distance: Option<usize>,
}

/// Minimum number of slots for snapshots and drafts.
const MIN_OTHER_STATES: usize = 16;

impl EngineOptions {
    /// Returns the slots of recurrent states; `None` for a model without them.
    pub(super) fn states(&self, config: &DecoderConfig) -> Result<Option<StateOptions>, pellucid_model::Error> {
        if !config.has_state() {
            return Ok(None);
        }
        let block = KvMemory::bytes_per_block(config, self.kv_dtype, self.block_len)?;
        let distance = distance(config, block, self.snapshot_distance);
        let num_others = (self.num_blocks / distance).max(MIN_OTHER_STATES);
        Ok(Some(StateOptions { num_live: num_live(self.max_sequences), num_others, distance }))
    }
}

/// Returns the bytes of the recurrent states of an engine: of the snapshots for each block of `bytes_per_block`, and of
/// all others together. Both are 0 for a model without states.
pub fn state_need(
    config: &DecoderConfig,
    bytes_per_block: usize,
    max_sequences: usize,
    snapshot_distance: Option<usize>,
) -> (u64, u64) {
    if !config.has_state() {
        return (0, 0);
    }
    let bytes = config.state_bytes();
    let num_fixed = num_live(max_sequences).saturating_add(MIN_OTHER_STATES);
    let per_block = bytes.div_ceil(distance(config, bytes_per_block, snapshot_distance));
    (per_block as u64, (bytes as u64).saturating_mul(num_fixed as u64))
}

fn num_live(max_sequences: usize) -> usize {
    2 * max_sequences
}

/// Returns the blocks between two snapshots.
fn distance(config: &DecoderConfig, bytes_per_block: usize, given: Option<usize>) -> usize {
    given.unwrap_or_else(|| config.state_bytes().div_ceil(bytes_per_block.max(1))).max(1)
}

/// Which requests may start with less KV memory reserved than they could need in the end. When memory runs out, one of
/// them is preempted and computed again later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overcommit {
    /// No request: each reserves its maximum length.
    Never,
    /// Requests without `max_tokens`, whose maximum is a whole context for each reply. They reserve the tokens that
    /// they have and `growth` more each time that they start.
    Unbounded {
        /// Tokens to reserve beyond those that a request has.
        growth: usize,
    },
    /// Every request reserves only the tokens that it has.
    Always,
}
