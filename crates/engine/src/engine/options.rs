//! How an engine runs: the size of its KV memory, the limits of a step and of the queue, and when requests may
//! overcommit memory.

use pellucid_model::{DecoderConfig, Devices, KvMemory};
use pellucid_tensor::{DType, Extension};

use crate::kv_cache::{StateOptions, WindowOptions};
use crate::probe::MAX_PROBE_ROWS;

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

    /// Returns the bytes of a block in all layers; on average, if layers with windows have fewer blocks.
    pub(super) fn bytes_per_block(&self, config: &DecoderConfig, devices: &Devices) -> usize {
        let bytes = KvMemory::bytes_per_block(config, self.kv_dtype, self.block_len).unwrap_or(0);
        self.windows(config, devices).map_or(bytes, |windows| {
            let windowed = KvMemory::window_bytes_per_block(config, self.kv_dtype, self.block_len);
            bytes - windowed + windowed * (windows.num_blocks + 1) / self.num_blocks
        })
    }

    /// Returns the blocks of layers with sliding windows; `None` if they have the same blocks as the other layers.
    pub(super) fn windows(&self, config: &DecoderConfig, devices: &Devices) -> Option<WindowOptions> {
        let need = window_need(config, devices, self.block_len, self.max_sequences, self.step_tokens)?;
        let num_blocks = need.num_blocks(self.num_blocks);
        let (len, num_kept) = (need.len, num_blocks - need.num_live);
        // With the same number as the others, nothing is saved.
        (num_blocks < self.num_blocks).then_some(WindowOptions { len, num_blocks, num_kept })
    }
}

/// The window blocks that an engine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowNeed {
    /// Number of positions that a row needs, its own included.
    pub len: usize,
    /// Maximum number of blocks that running sequences hold.
    pub num_live: usize,
}

/// Blocks beside each of which one window block is kept for later requests.
const BLOCKS_PER_KEPT_WINDOW: usize = 4;

impl WindowNeed {
    /// Returns the number of window blocks beside `num_blocks` blocks, if that is less.
    pub fn num_blocks(&self, num_blocks: usize) -> usize {
        self.num_live.saturating_add(num_blocks / BLOCKS_PER_KEPT_WINDOW)
    }
}

/// Returns the window blocks that an engine needs; `None` if layers with sliding windows have to keep all blocks.
pub fn window_need(
    config: &DecoderConfig,
    devices: &Devices,
    block_len: usize,
    max_sequences: usize,
    step_tokens: usize,
) -> Option<WindowNeed> {
    let len = config.kv_window().filter(|_| devices.support(Extension::WindowBlocks))?;
    // A sequence has its window from the beginning of a block; it computes one chunk, whose ends are in blocks with
    // other positions, and one position ahead. Copies are made before originals are given back.
    let of_sequence = len.div_ceil(block_len) + 4;
    let of_chunks = step_tokens.div_ceil(block_len);
    // Probes compute rows again whose windows begin earlier. With enough for one of them, some request always goes on.
    let of_probe = MAX_PROBE_ROWS.div_ceil(block_len);
    let num_live = max_sequences.saturating_mul(of_sequence).saturating_add(of_chunks + of_probe);
    Some(WindowNeed { len, num_live })
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
