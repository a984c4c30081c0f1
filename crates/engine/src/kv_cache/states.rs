//! Slots of recurrent states: live, of a draft, in a snapshot, or free. `docs/recurrent-state.md` is the design.
//!
//! A table of a model with states has a live slot, the state after the last position that its sequence has computed. A
//! snapshot is the state at the end of a block in a prefix index, and belongs to the block's content. For a model
//! without states there are no slots, and none of the functions here does anything.

use std::ops::Range;

use pellucid_model::ChunkState;
use pellucid_tensor::StateSave;

use super::eviction_queues::{EvictionOrder, EvictionQueues};
use super::prefix_cache::{Content, FoundBlock};
use super::prefix_index::BlockHash;
use super::{BlockId, BlockTable, KvCache, Scope};

/// A slot's number, a row of the states in `KvMemory`.
pub type StateSlot = u32;

/// The slots of a model with states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateOptions {
    /// Slots for live states: twice the number of sequences, because the beams of a step are forked before the old ones
    /// are released.
    pub num_live: usize,
    /// Slots for snapshots and drafts.
    pub num_others: usize,
    /// Blocks between two snapshots.
    pub distance: usize,
}

impl StateOptions {
    /// Returns the number of all slots.
    pub fn num_slots(&self) -> usize {
        self.num_live + self.num_others
    }
}

/// A copy of one state to another, in every layer, that the caller must make before the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateCopy {
    /// The slot to read.
    pub from: StateSlot,
    /// The slot to write.
    pub to: StateSlot,
}

/// The slots that no table holds, and the snapshots in the order of their eviction.
#[derive(Debug)]
pub(super) struct StateSlots {
    options: StateOptions,
    free: Vec<StateSlot>,
    /// Slots of drafts and of snapshots, those of blocks that are not in an index yet included.
    num_others: usize,
    snapshots: EvictionQueues,
    copies: Vec<StateCopy>,
}

/// The slots of one table.
#[derive(Debug, Default)]
pub(super) struct TableStates {
    live: Option<StateSlot>,
    /// States after the drafted tokens of the step.
    drafts: Vec<StateSlot>,
    /// States at the ends of blocks of the step, by the number of the block in the table.
    snapshots: Vec<(usize, StateSlot)>,
    /// The saves of the step.
    saves: Vec<StateSave>,
}

/// The state at the end of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Snapshot {
    slot: StateSlot,
    last_used: u64,
}

/// The positions of a sequence that a step computes, and those that later requests may find.
#[derive(Debug, Clone)]
pub struct StatePlan {
    /// Positions of the chunk.
    pub positions: Range<usize>,
    /// Drafted positions at its end.
    pub draft_len: usize,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Number of positions that may enter the prefix index.
    pub num_cacheable: usize,
}

impl BlockTable {
    /// Returns the states of a chunk that begins at `first_position`, after [`KvCache::plan_states`].
    pub fn chunk_state(&self, first_position: usize) -> ChunkState<'_> {
        ChunkState { from: self.states.live.filter(|_| first_position > 0), saves: &self.states.saves }
    }

    /// Returns all slots that the table holds.
    pub(super) fn state_slots(&self) -> impl Iterator<Item = StateSlot> {
        let TableStates { live, drafts, snapshots, .. } = &self.states;
        live.iter().chain(drafts).copied().chain(snapshots.iter().map(|(_, slot)| *slot))
    }

    /// Whether it has a live state.
    pub(super) fn has_live_state(&self) -> bool {
        self.states.live.is_some()
    }
}

impl KvCache {
    /// Gives the cache slots of states. Must be called before the first request.
    pub fn use_states(&mut self, options: StateOptions) {
        self.states = Some(StateSlots {
            options,
            free: (0..options.num_slots() as StateSlot).rev().collect(),
            num_others: 0,
            snapshots: EvictionQueues::default(),
            copies: Vec::new(),
        });
    }

    /// Whether the model has states.
    pub fn has_states(&self) -> bool {
        self.states.is_some()
    }

    /// Returns the number of snapshots in the prefix cache.
    pub fn num_snapshots(&self) -> usize {
        self.states.as_ref().map_or(0, |states| states.snapshots.len())
    }

    /// Takes the copies that must be made before the next step, in this order.
    pub fn take_state_copies(&mut self) -> Vec<StateCopy> {
        self.states.as_mut().map_or_else(Vec::new, |states| std::mem::take(&mut states.copies))
    }

    /// Returns the maximum length of a draft, if each of `num_sequences` sequences has one.
    pub fn max_draft_len(&self, num_sequences: usize) -> usize {
        self.states.as_ref().map_or(usize::MAX, |states| states.options.num_others / num_sequences.max(1))
    }

    /// Gives a new table its live slot. Its contents are undefined until a copy or a step writes it.
    pub(super) fn add_live_state(&mut self, table: &mut BlockTable) {
        if self.states.is_some() {
            table.states.live = Some(self.take_slot().expect("live slots for twice the sequences"));
        }
    }

    /// Gives the fork of a table a copy of its live state.
    pub(super) fn fork_state(&mut self, table: &BlockTable, fork: &mut BlockTable) {
        self.add_live_state(fork);
        if let (Some(states), Some(from), Some(to)) = (&mut self.states, table.states.live, fork.states.live) {
            states.copies.push(StateCopy { from, to });
        }
    }

    /// Takes back all slots of a table.
    pub(super) fn release_states(&mut self, table: &mut BlockTable) {
        self.end_drafts(table);
        self.drop_pending_snapshots(table);
        if let Some((states, slot)) = self.states.as_mut().zip(table.states.live.take()) {
            states.free.push(slot);
        }
    }

    /// Cuts a chain of blocks back to the last one with a snapshot, if the model has states: without one, the positions
    /// after the chain could not be computed.
    pub(super) fn cut_to_snapshot(&self, found: &mut Vec<FoundBlock>) {
        if self.states.is_some() {
            let has_snapshot = |found: &FoundBlock| self.snapshot_of(found.block).is_some();
            found.truncate(found.iter().rposition(has_snapshot).map_or(0, |last| last + 1));
        }
    }

    /// Copies the snapshot at the end of `block`, the last one that was found, to the live slot of a table.
    pub(super) fn restore(&mut self, block: BlockId, table: &BlockTable) {
        let Some(to) = table.states.live else { return };
        let from = self.snapshot_of(block).expect("the chain ends with a snapshot").slot;
        let clock = self.clock;
        self.touch_snapshot(block, clock);
        self.states.as_mut().expect("a live state").copies.push(StateCopy { from, to });
    }

    fn snapshot_of(&self, block: BlockId) -> Option<Snapshot> {
        self.blocks[block as usize].content.as_ref()?.snapshot
    }

    /// Marks a snapshot as used now.
    fn touch_snapshot(&mut self, block: BlockId, clock: u64) {
        let content = self.blocks[block as usize].content.as_mut();
        if let Some((states, content)) = self.states.as_mut().zip(content)
            && let Some(snapshot) = &mut content.snapshot
        {
            let order = |last_used: u64| EvictionOrder::new(last_used, content.depth, block);
            states.snapshots.remove(content.scope.tenant, order(snapshot.last_used));
            snapshot.last_used = clock;
            states.snapshots.add(content.scope.tenant, order(clock));
        }
    }

    /// Takes the slots of one draft. Drafts are planned before snapshots, so that they find the slots that
    /// [`KvCache::max_draft_len`] promised.
    pub fn plan_draft_states(&mut self, table: &mut BlockTable, draft_len: usize) {
        if table.has_live_state() {
            while table.states.drafts.len() < draft_len {
                let slot = self.take_other().expect("drafts were limited to the slots for them");
                table.states.drafts.push(slot);
            }
        }
    }

    /// Plans the states that a step saves of one sequence: after the last row that is no draft, after each drafted row,
    /// and at the block edges where a snapshot is wanted and a slot is free.
    pub fn plan_states(&mut self, table: &mut BlockTable, plan: &StatePlan) {
        let Some(live) = table.states.live else { return };
        table.states.saves.clear();
        let StatePlan { ref positions, draft_len, prompt_len, num_cacheable } = *plan;
        let (start, end) = (positions.start, positions.end - draft_len);
        let save = |position: usize, slot: StateSlot| StateSave { row: (position - 1 - start) as u32, slot };
        let last_of_prompt = (prompt_len - 1) / self.block_len;
        let distance = self.states.as_ref().map_or(1, |states| states.options.distance);
        for num_blocks in start / self.block_len + 1..=end.min(num_cacheable) / self.block_len {
            if !num_blocks.is_multiple_of(distance) && num_blocks != last_of_prompt {
                continue;
            }
            let Some(slot) = self.take_other() else { break };
            table.states.snapshots.push((num_blocks - 1, slot));
            table.states.saves.push(save(num_blocks * self.block_len, slot));
        }
        table.states.saves.push(save(end, live));
        let drafts = table.states.drafts.iter().take(draft_len).enumerate();
        table.states.saves.extend(drafts.map(|(i, &slot)| save(end + i + 1, slot)));
    }

    /// Makes the state after drafted token `i` the live one.
    pub fn accept_draft(&mut self, table: &mut BlockTable, i: usize) {
        if let (Some(live), Some(draft)) = (&mut table.states.live, table.states.drafts.get_mut(i)) {
            std::mem::swap(live, draft);
        }
    }

    /// Takes back the slots of a draft.
    pub fn end_drafts(&mut self, table: &mut BlockTable) {
        for slot in table.states.drafts.drain(..) {
            self.free_other(slot);
        }
    }

    /// Moves the snapshot that a step took at the end of block `i` of a table to the block's content in the index.
    pub(super) fn keep_snapshot(
        &mut self,
        table: &mut BlockTable,
        i: usize,
        (scope, hash): (Scope, BlockHash),
        tokens: &[u32],
    ) {
        let Some(at) = table.states.snapshots.iter().position(|(block, _)| *block == i) else { return };
        let (_, slot) = table.states.snapshots.swap_remove(at);
        // Another sequence may have entered a block with the same tokens first, or with others of the same hash.
        let holder = self.indexes.get(&scope).and_then(|index| index.get(hash));
        let content = holder.and_then(|holder| self.blocks[holder as usize].content.as_mut());
        let takes_it = |content: &&mut Content| {
            content.snapshot.is_none() && *content.tokens == *tokens && content.depth == i as u32
        };
        let clock = self.clock;
        match (content.filter(takes_it), &mut self.states, holder) {
            (Some(content), Some(states), Some(holder)) => {
                content.snapshot = Some(Snapshot { slot, last_used: clock });
                states.snapshots.add(content.scope.tenant, EvictionOrder::new(clock, content.depth, holder));
            }
            _ => self.free_other(slot),
        }
    }

    /// Takes back the snapshots of blocks that did not enter an index.
    pub(super) fn drop_pending_snapshots(&mut self, table: &mut BlockTable) {
        for (_, slot) in table.states.snapshots.drain(..) {
            self.free_other(slot);
        }
    }

    /// Takes back the snapshot of a block that is evicted.
    pub(super) fn forget_snapshot(&mut self, scope: Scope, depth: u32, block: BlockId, snapshot: Option<Snapshot>) {
        if let Some((states, Snapshot { slot, last_used })) = self.states.as_mut().zip(snapshot) {
            states.snapshots.remove(scope.tenant, EvictionOrder::new(last_used, depth, block));
            self.free_other(slot);
        }
    }

    fn free_other(&mut self, slot: StateSlot) {
        let states = self.states.as_mut().expect("the slot came from here");
        states.num_others -= 1;
        states.free.push(slot);
    }

    /// Takes a slot for a draft or a snapshot; the least recently used snapshot gives one up if there is no other.
    fn take_other(&mut self) -> Option<StateSlot> {
        let states = self.states.as_ref()?;
        if states.num_others == states.options.num_others {
            self.evict_snapshot()?;
        }
        let slot = self.take_slot()?;
        self.states.as_mut()?.num_others += 1;
        Some(slot)
    }

    fn take_slot(&mut self) -> Option<StateSlot> {
        let slot = self.states.as_mut()?.free.pop();
        slot.or_else(|| {
            self.evict_snapshot()?;
            self.states.as_mut()?.free.pop()
        })
    }

    /// Takes a snapshot away from its block, which stays in its index.
    fn evict_snapshot(&mut self) -> Option<()> {
        let states = self.states.as_mut()?;
        let block = states.snapshots.pop(states.snapshots.next_tenant()?)?;
        let content = self.blocks[block as usize].content.as_mut().expect("a block with a snapshot has content");
        let slot = content.snapshot.take().expect("it was queued").slot;
        self.free_other(slot);
        Some(())
    }

    /// Counts the slots again, which the tables and the contents of blocks hold.
    pub(super) fn audit_states(&self, of_tables: &[StateSlot]) -> Result<(), String> {
        let Some(states) = &self.states else {
            return if of_tables.is_empty() { Ok(()) } else { Err("a table holds a state, but there are none".into()) };
        };
        let contents = self.blocks.iter().filter_map(|block| block.content.as_ref()?.snapshot);
        let mut all: Vec<StateSlot> = contents.map(|snapshot| snapshot.slot).collect();
        if all.len() != states.snapshots.len() {
            return Err(format!("{} snapshots are queued, but {} blocks have one", states.snapshots.len(), all.len()));
        }
        all.extend(states.free.iter().chain(of_tables));
        all.sort_unstable();
        let expected: Vec<StateSlot> = (0..states.options.num_slots() as StateSlot).collect();
        if all == expected { Ok(()) } else { Err(format!("slots of states are lost or held twice: {all:?}")) }
    }
}
