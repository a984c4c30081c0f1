//! The sequences that a draft model knows: their tokens, and the blocks of its KV memory that they hold.
//!
//! A draft model has a KV cache of its own. Blocks that hold tokens of the target's choice enter its prefix index under
//! the scope of their request; drafted tokens never do. When blocks run out, the sequence that was used least recently
//! gives its blocks back, unless the current call uses it. Nothing here runs a model.

use std::collections::BTreeMap;

use crate::kv_cache::{BlockTable, KvCache, OutOfBlocks, Reservation, Scope, TenantId};
use crate::{Error, MAX_DRAFT_LEN, fallible};

/// One sequence with its keys and values.
#[derive(Debug)]
pub(super) struct DraftSequence {
    /// Tokens of the target and the drafted tokens after them.
    pub(super) tokens: Vec<u32>,
    /// Positions whose keys and values are stored.
    pub(super) num_computed: usize,
    pub(super) table: BlockTable,
    reservation: Reservation,
    /// Number of the last call that used it.
    last_used: u64,
}

impl DraftSequence {
    /// Returns the number of positions that are still to be computed.
    pub(super) fn num_left(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    /// Replaces the tokens by those that the target has now. Positions after the first difference are computed again,
    /// and so is the last one: its logits are needed. Fails if there is no memory for the tokens.
    fn set_tokens(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let stored = &self.tokens[..self.num_computed];
        let num_common = stored.iter().zip(tokens).take_while(|(stored, token)| stored == token).count();
        self.tokens.truncate(num_common);
        fallible::reserve(&mut self.tokens, tokens.len() + MAX_DRAFT_LEN - num_common)?;
        self.tokens.extend_from_slice(&tokens[num_common..]);
        self.num_computed = num_common.min(tokens.len() - 1);
        Ok(())
    }
}

/// The sequences by id, and the cache that their blocks come from.
#[derive(Debug)]
pub(super) struct DraftSequences {
    cache: KvCache,
    sequences: BTreeMap<u64, DraftSequence>,
    /// Number of the current call.
    call: u64,
}

impl DraftSequences {
    pub(super) fn new(cache: KvCache) -> DraftSequences {
        DraftSequences { cache, sequences: BTreeMap::new(), call: 0 }
    }

    pub(super) fn cache(&self) -> &KvCache {
        &self.cache
    }

    pub(super) fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    pub(super) fn get(&self, id: u64) -> Option<&DraftSequence> {
        self.sequences.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut DraftSequence> {
        self.sequences.get_mut(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Begins a call. Sequences that it uses are not evicted until the next one.
    pub(super) fn begin_call(&mut self) {
        self.call += 1;
    }

    /// Compares what is stored of a sequence with its tokens. Returns false if nothing is stored.
    pub(super) fn refresh(&mut self, id: u64, scope: Scope, tokens: &[u32]) -> Result<bool, Error> {
        let DraftSequences { cache, sequences, call } = self;
        let Some(sequence) = sequences.get_mut(&id) else { return Ok(false) };
        sequence.last_used = *call;
        let outcome = sequence.set_tokens(tokens);
        let next = sequence.num_computed;
        // A sequence only gets longer, so its blocks in the prefix index stay as they are. If an id was used again for
        // other tokens, it starts anew: blocks that others may find are not written to.
        let has_block = sequence.table.blocks().len() > next / cache.block_len();
        let is_same = sequence.table.scope() == scope && (!has_block || cache.is_writable(&sequence.table, next));
        if outcome.is_err() || !is_same {
            self.release(id);
        }
        outcome.map(|()| is_same)
    }

    /// Starts a sequence: finds the cached prefix of its tokens and reserves blocks for the rest and `max_len` drafted
    /// tokens.
    pub(super) fn start(&mut self, id: u64, scope: Scope, tokens: &[u32], max_len: usize) -> Result<(), NotStarted> {
        let mut copy = fallible::with_capacity(tokens.len() + MAX_DRAFT_LEN).map_err(NotStarted::Failed)?;
        copy.extend_from_slice(tokens);
        let num_blocks = self.cache.blocks_for(tokens.len() + max_len);
        let (table, reservation, num_cached) = self
            .with_eviction(scope.tenant, |cache, _| cache.admit(scope, tokens, num_blocks))
            .map_err(|_| NotStarted::OutOfBlocks)?;
        let sequence =
            DraftSequence { tokens: copy, num_computed: num_cached, table, reservation, last_used: self.call };
        self.release(id);
        self.sequences.insert(id, sequence);
        Ok(())
    }

    /// Takes the blocks for the first `num_positions` positions of a sequence. Returns false if there are none left.
    pub(super) fn grow(&mut self, id: u64, num_positions: usize) -> bool {
        let tenant = self.sequences[&id].table.scope().tenant;
        let grown = self.with_eviction(tenant, |cache, sequences| {
            let sequence = sequences.get_mut(&id).expect("a sequence that was started");
            cache.grow(&mut sequence.table, &mut sequence.reservation, num_positions)
        });
        grown.is_ok()
    }

    /// Enters the full blocks of the first `num_tokens` tokens, which the target chose, into the prefix index of their
    /// scope.
    pub(super) fn index(&mut self, id: u64, num_tokens: usize) {
        let DraftSequences { cache, sequences, .. } = self;
        let sequence = sequences.get_mut(&id).expect("a sequence that was started");
        let num_tokens = num_tokens.min(sequence.num_computed);
        cache.index_full_blocks(&mut sequence.table, &sequence.tokens[..num_tokens]);
    }

    /// Gives the blocks of a sequence back, if it has any.
    pub(super) fn release(&mut self, id: u64) {
        if let Some(DraftSequence { table, reservation, .. }) = self.sequences.remove(&id) {
            self.cache.release(table);
            self.cache.cancel(reservation);
        }
    }

    pub(super) fn release_all(&mut self) {
        while let Some((&id, _)) = self.sequences.first_key_value() {
            self.release(id);
        }
    }

    /// Takes blocks for a tenant, and evicts idle sequences while there are too few. At the tenant's quota only its own
    /// blocks are of use.
    fn with_eviction<T>(
        &mut self,
        tenant: TenantId,
        mut take: impl FnMut(&mut KvCache, &mut BTreeMap<u64, DraftSequence>) -> Result<T, OutOfBlocks>,
    ) -> Result<T, OutOfBlocks> {
        loop {
            let why = match take(&mut self.cache, &mut self.sequences) {
                Ok(taken) => return Ok(taken),
                Err(why) => why,
            };
            let is_at_quota = matches!(why, OutOfBlocks::Quota { .. });
            let is_useful = |sequence: &DraftSequence| !is_at_quota || sequence.table.scope().tenant == tenant;
            let idle =
                (self.sequences.iter()).filter(|(_, sequence)| sequence.last_used < self.call && is_useful(sequence));
            let Some((&id, _)) = idle.min_by_key(|(_, sequence)| sequence.last_used) else { return Err(why) };
            self.release(id);
        }
    }

    /// Counts the blocks again.
    pub(super) fn audit(&self) -> Result<(), String> {
        let sequences = || self.sequences.values();
        self.cache.audit(sequences().map(|sequence| &sequence.table), sequences().map(|s| &s.reservation))
    }
}

/// Why a sequence was not started.
#[derive(Debug)]
pub(super) enum NotStarted {
    /// Other sequences hold the blocks.
    OutOfBlocks,
    Failed(Error),
}

impl Drop for DraftSequences {
    /// Releases all blocks, so that the debug assertions against leaked blocks hold here too.
    fn drop(&mut self) {
        self.release_all();
    }
}
