//! How an engine runs: the size of its KV memory, the limits of a step and of the queue, and when requests may
//! overcommit memory.

use pellucid_tensor::DType;

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
