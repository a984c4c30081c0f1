//! Computes the size of the KV memory, once at start. Pure: the program passes in the budget and the free memory.

use crate::engine::WindowNeed;

/// The source of the KV memory's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// The operator's number of bytes, all of which is used: memory beyond the need of `num_contexts` keeps prefixes
    /// cached.
    Bytes(u64),
    /// Memory for `num_contexts`, but at most four fifths of this number of free bytes.
    OutOf(u64),
    /// Memory for `num_contexts`; the amount of free memory is unknown.
    Unknown,
}

/// The contexts that the KV memory must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvNeed {
    /// Bytes of one block, in all layers.
    pub bytes_per_block: u64,
    /// Blocks of the layers with sliding windows, if these can have fewer.
    pub windows: Option<WindowBytes>,
    /// Bytes of one block of the draft model, which has the same number of blocks; 0 without a draft model.
    pub draft_bytes_per_block: u64,
    /// Bytes of snapshots of recurrent states for each block; 0 for a model without them.
    pub snapshot_bytes_per_block: u64,
    /// Bytes of the recurrent states of running sequences, and of a minimum of snapshots.
    pub state_bytes: u64,
    /// Positions in a block.
    pub block_len: usize,
    /// Tokens of a whole context.
    pub context_len: usize,
    /// Number of whole contexts that should fit at once.
    pub num_contexts: usize,
}

/// The memory of layers with sliding windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowBytes {
    /// Part of the bytes of one block that belongs to these layers.
    pub bytes_per_block: u64,
    /// Number of blocks that they need.
    pub need: WindowNeed,
}

/// The size of the KV memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The need that it was made for.
    pub need: KvNeed,
    /// The budget that it was made from.
    pub budget: KvBudget,
    /// Number of blocks to allocate.
    pub num_blocks: usize,
}

/// The budget is too small for one whole context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "KV memory: a context of {context_len} tokens takes {needed} bytes, but only {available} are available, which \
     hold {fits} tokens"
)]
pub struct ContextDoesNotFit {
    /// Tokens of a whole context.
    pub context_len: usize,
    /// Bytes of one context.
    pub needed: u64,
    /// Bytes of the budget.
    pub available: u64,
    /// Tokens that the budget holds.
    pub fits: usize,
}

impl KvNeed {
    /// Returns the number of blocks of a whole context.
    pub fn blocks_per_context(&self) -> u64 {
        self.context_len.div_ceil(self.block_len) as u64
    }

    /// Returns the bytes of a block of the model with its share of snapshots, and of one of its draft model.
    fn bytes_of_both(&self) -> u64 {
        self.bytes_per_block.saturating_add(self.draft_bytes_per_block).saturating_add(self.snapshot_bytes_per_block)
    }

    /// Returns the number of blocks of layers with windows beside `num_blocks` blocks, if these have fewer.
    fn num_window_blocks(&self, num_blocks: u64) -> Option<u64> {
        let num = self.windows?.need.num_blocks(num_blocks as usize) as u64;
        (num < num_blocks).then_some(num)
    }

    /// Returns the bytes that layers with windows do not take, because they have fewer than `num_blocks` blocks.
    fn saved_by_windows(&self, num_blocks: u64) -> u64 {
        let Some((windows, num)) = self.windows.zip(self.num_window_blocks(num_blocks)) else { return 0 };
        // Nothing is stored in one more block.
        windows.bytes_per_block.saturating_mul(num_blocks - num - 1)
    }

    /// Returns the bytes of `num_blocks` blocks and of recurrent states.
    pub fn bytes(&self, num_blocks: u64) -> u64 {
        let blocks = self.bytes_of_both().saturating_mul(num_blocks) - self.saved_by_windows(num_blocks);
        blocks.saturating_add(self.state_bytes)
    }

    /// Returns the maximum number of blocks that take at most `bytes`.
    pub fn affordable(&self, bytes: u64) -> u64 {
        // The bytes grow with the number of blocks.
        let (mut fits, mut beyond) = (0, (bytes / self.min_bytes_per_block()).saturating_add(1));
        if self.bytes(0) > bytes {
            return 0;
        }
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            if self.bytes(middle) <= bytes { fits = middle } else { beyond = middle }
        }
        fits
    }

    /// Returns a number of bytes that every further block takes at least.
    fn min_bytes_per_block(&self) -> u64 {
        let windowed = self.windows.map_or(0, |windows| windows.bytes_per_block);
        self.bytes_of_both().saturating_sub(windowed).max(1)
    }
}

impl MemoryPlan {
    /// Maximum part of the free memory that becomes KV memory if the operator gave no size. The rest is for
    /// activations, for the system's caches, and for errors of this estimate.
    pub const SHARE_OF_FREE: f64 = 0.8;

    /// Computes the number of blocks. Returns an error if the budget does not hold one whole context.
    pub fn new(need: KvNeed, budget: KvBudget) -> Result<MemoryPlan, ContextDoesNotFit> {
        let per_context = need.blocks_per_context();
        let wanted = per_context.saturating_mul(need.num_contexts.max(1) as u64);
        let available = match budget {
            KvBudget::Bytes(bytes) => bytes,
            KvBudget::OutOf(free) => (free as f64 * MemoryPlan::SHARE_OF_FREE) as u64,
            KvBudget::Unknown => u64::MAX,
        };
        let num_blocks = match budget {
            KvBudget::Bytes(bytes) => need.affordable(bytes),
            _ => wanted.min(need.affordable(available)),
        };
        if num_blocks < per_context {
            return Err(ContextDoesNotFit {
                context_len: need.context_len,
                needed: need.bytes(per_context),
                available,
                fits: (num_blocks as usize).saturating_mul(need.block_len),
            });
        }
        Ok(MemoryPlan { need, budget, num_blocks: num_blocks as usize })
    }

    /// Returns the bytes of all blocks together, those of the draft model and the recurrent states included.
    pub fn bytes(&self) -> u64 {
        self.need.bytes(self.num_blocks as u64)
    }

    /// Returns the number of blocks of layers with windows, and their bytes; `None` if these layers have as many blocks
    /// as the others.
    pub fn windows(&self) -> Option<(usize, u64)> {
        let num_blocks = self.need.num_window_blocks(self.num_blocks as u64)?;
        let bytes_per_block = self.need.windows?.bytes_per_block;
        Some((num_blocks as usize, bytes_per_block * (num_blocks + 1)))
    }

    /// Returns the bytes of recurrent states, those of snapshots included.
    pub fn state_bytes(&self) -> u64 {
        self.need.snapshot_bytes_per_block * self.num_blocks as u64 + self.need.state_bytes
    }

    /// Returns the bytes of the draft model's blocks.
    pub fn draft_bytes(&self) -> u64 {
        self.need.draft_bytes_per_block * self.num_blocks as u64
    }

    /// Returns the number of positions of all blocks together.
    pub fn num_tokens(&self) -> usize {
        self.num_blocks * self.need.block_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: KvNeed = KvNeed {
        bytes_per_block: 1000,
        windows: None,
        draft_bytes_per_block: 0,
        snapshot_bytes_per_block: 0,
        state_bytes: 0,
        block_len: 32,
        context_len: 100,
        num_contexts: 3,
    };

    #[test]
    fn a_budget_in_bytes_is_used_whole() {
        let plan = MemoryPlan::new(NEED, KvBudget::Bytes(50_999)).expect("it holds a context");
        assert_eq!((plan.num_blocks, plan.bytes(), plan.num_tokens()), (50, 50_000, 1600));
    }

    #[test]
    fn without_a_budget_the_need_is_limited_by_free_memory() {
        let blocks = |budget| MemoryPlan::new(NEED, budget).map(|plan| plan.num_blocks);
        assert_eq!(blocks(KvBudget::OutOf(1_000_000)), Ok(12), "three contexts of four blocks");
        assert_eq!(blocks(KvBudget::OutOf(10_000)), Ok(8), "four fifths of the free memory");
        assert_eq!(blocks(KvBudget::Unknown), Ok(12));
    }

    #[test]
    fn a_draft_model_takes_its_blocks_from_the_same_budget() {
        let need = KvNeed { draft_bytes_per_block: 250, ..NEED };
        let plan = MemoryPlan::new(need, KvBudget::Bytes(50_000)).expect("it holds a context");
        assert_eq!((plan.num_blocks, plan.bytes(), plan.draft_bytes()), (40, 50_000, 10_000));
        let refused = ContextDoesNotFit { context_len: 100, needed: 5000, available: 4999, fits: 96 };
        assert_eq!(MemoryPlan::new(need, KvBudget::Bytes(4999)), Err(refused));
        assert_eq!(MemoryPlan::new(need, KvBudget::Unknown).map(|plan| plan.bytes()), Ok(15_000));
    }

    #[test]
    fn recurrent_states_come_out_of_the_same_budget() {
        let need = KvNeed { snapshot_bytes_per_block: 250, state_bytes: 10_000, ..NEED };
        let plan = MemoryPlan::new(need, KvBudget::Bytes(60_000)).expect("it holds a context");
        assert_eq!((plan.num_blocks, plan.bytes(), plan.state_bytes()), (40, 60_000, 20_000));
        let refused = ContextDoesNotFit { context_len: 100, needed: 15_000, available: 14_999, fits: 96 };
        assert_eq!(MemoryPlan::new(need, KvBudget::Bytes(14_999)), Err(refused));
        assert_eq!(MemoryPlan::new(need, KvBudget::Unknown).map(|plan| plan.bytes()), Ok(25_000));
    }

    #[test]
    fn layers_with_windows_take_fewer_blocks() {
        // Four fifths of the bytes belong to them.
        let windows = WindowBytes { bytes_per_block: 800, need: WindowNeed { len: 64, num_live: 10 } };
        let need = KvNeed { windows: Some(windows), ..NEED };
        // 200 bytes for each of 100 blocks, and 800 for 10, a quarter of the 100, and the unused one.
        let plan = MemoryPlan::new(need, KvBudget::Bytes(48_800)).expect("it holds a context");
        assert_eq!((plan.num_blocks, plan.bytes(), plan.windows()), (100, 48_800, Some((35, 28_800))));
        assert_eq!(MemoryPlan::new(need, KvBudget::Bytes(48_799)).map(|plan| plan.num_blocks), Ok(99));
        // With the same number of window blocks as of others, nothing is saved.
        let plan = MemoryPlan::new(need, KvBudget::Bytes(12_000)).expect("it holds a context");
        assert_eq!((plan.num_blocks, plan.bytes(), plan.windows()), (12, 12_000, None));
        assert_eq!(MemoryPlan::new(need, KvBudget::Unknown).map(|plan| plan.bytes()), Ok(12_000));
    }

    #[test]
    fn one_whole_context_must_fit() {
        let refused = ContextDoesNotFit { context_len: 100, needed: 4000, available: 3999, fits: 96 };
        assert_eq!(MemoryPlan::new(NEED, KvBudget::Bytes(3999)), Err(refused));
        assert!(MemoryPlan::new(NEED, KvBudget::Bytes(4000)).is_ok());
        assert!(MemoryPlan::new(NEED, KvBudget::OutOf(4999)).is_err());
        let huge = KvNeed { bytes_per_block: u64::MAX, context_len: usize::MAX, ..NEED };
        assert!(MemoryPlan::new(huge, KvBudget::Bytes(u64::MAX)).is_err());
    }
}
