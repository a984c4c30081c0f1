//! Blocks of layers with sliding windows, which are given back when the window has passed them. `docs/engine.md`
//! describes them.
//!
//! Layers with windows have a pool of blocks of their own. A table of a model with such layers has a window block
//! beside each of its last blocks, as far as rows that are still to be computed reach back. A prefix can be used again
//! if the window blocks before its end are there. Therefore those before the end of a prompt, before the end of a reply
//! and where a prompt left a cached one are kept. A kept window block belongs to the content of the block beside it,
//! like a snapshot. For a model without such layers there is no pool, and none of the functions here does anything.

use super::eviction_queues::{EvictionOrder, EvictionQueues};
use super::prefix_cache::FoundBlock;
use super::{BlockId, BlockTable, KvCache, OutOfBlocks, Scope};

/// A window block's number.
pub type WindowBlock = u32;

/// The pool of window blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowOptions {
    /// Number of positions that a row needs, its own included.
    pub len: usize,
    /// Number of blocks.
    pub num_blocks: usize,
    /// Maximum number of them that are kept for later requests.
    pub num_kept: usize,
}

/// The window blocks that no table holds, and those that are kept, in the order of their eviction.
#[derive(Debug)]
pub(super) struct Windows {
    options: WindowOptions,
    free: Vec<WindowBlock>,
    /// For each window block, the tables that hold it, and the content.
    num_holders: Vec<u32>,
    kept: EvictionQueues,
}

/// The window blocks of one table.
#[derive(Debug, Default)]
pub(super) struct TableWindows {
    /// A window block beside each block.
    blocks: Vec<WindowBlock>,
    /// Index of the first one that it holds; those before it are the unused block.
    first: usize,
    /// Numbers of blocks after which the window is kept once they are computed: the prompt's, and those of the cached
    /// prompt that this one left.
    kept_after: [usize; 2],
}

/// A window block that belongs to the content of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptWindow {
    block: WindowBlock,
    last_used: u64,
}

impl WindowOptions {
    /// Returns the index of the first block that a row at `position` needs.
    fn first_needed(&self, position: usize, block_len: usize) -> usize {
        (position + 1).saturating_sub(self.len) / block_len
    }
}

impl BlockTable {
    /// Returns the window blocks beside its blocks; none if the model's layers have none.
    pub fn window_blocks(&self) -> &[WindowBlock] {
        &self.windows.blocks
    }

    /// Returns the window blocks that it holds.
    pub(super) fn held_windows(&self) -> &[WindowBlock] {
        &self.windows.blocks[self.windows.first..]
    }
}

impl TableWindows {
    /// Copies another table's, which holds the same blocks. The caller counts the holders.
    fn copy(&mut self, other: &TableWindows) {
        self.blocks.extend_from_slice(&other.blocks);
        self.first = other.first;
    }
}

impl KvCache {
    /// Gives the cache window blocks. Must be called before the first request.
    pub fn use_windows(&mut self, options: WindowOptions) {
        self.windows = Some(Windows {
            options,
            free: (0..options.num_blocks as WindowBlock).rev().collect(),
            num_holders: vec![0; options.num_blocks],
            kept: EvictionQueues::default(),
        });
    }

    /// Whether layers with windows have blocks of their own.
    pub fn has_windows(&self) -> bool {
        self.windows.is_some()
    }

    /// Returns the number of window blocks.
    pub fn num_window_blocks(&self) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.options.num_blocks)
    }

    /// Returns the number of window blocks that tables hold or that are kept, and of those that are kept.
    pub fn num_taken_windows(&self) -> (usize, usize) {
        let Some(windows) = &self.windows else { return (0, 0) };
        (windows.options.num_blocks - windows.free.len(), windows.kept.len())
    }

    fn kept_windows(&self) -> impl Iterator<Item = KeptWindow> {
        self.blocks.iter().filter_map(|block| block.content.as_ref()?.window)
    }

    /// The entry of a table for a block that fell out of the window. Nothing is stored in it.
    fn unused_window(&self) -> WindowBlock {
        self.windows.as_ref().map_or(0, |windows| windows.options.num_blocks as WindowBlock)
    }

    /// Cuts a chain of blocks back to the last end before which the whole window is kept: without it, the positions
    /// after the chain could not be computed. Returns the length of the chain before.
    pub(super) fn cut_to_window(&self, found: &mut Vec<FoundBlock>) -> usize {
        let num_found = found.len();
        let Some(Windows { options, .. }) = &self.windows else { return num_found };
        let (mut best, mut run) = (0, 0);
        for (i, found) in found.iter().enumerate() {
            run = if self.kept_window_of(found.block).is_some() { run + 1 } else { 0 };
            let end = i + 1;
            if end - run <= options.first_needed(end * self.block_len, self.block_len) {
                best = end;
            }
        }
        found.truncate(best);
        num_found
    }

    fn kept_window_of(&self, block: BlockId) -> Option<KeptWindow> {
        self.blocks[block as usize].content.as_ref()?.window
    }

    /// Gives a table that begins with the blocks that were found the window before their end.
    pub(super) fn use_found_windows(&mut self, table: &mut BlockTable) {
        let Some(options) = self.windows.as_ref().map(|windows| windows.options) else { return };
        let num_found = table.blocks().len();
        let first = options.first_needed(num_found * self.block_len, self.block_len).min(num_found);
        table.windows.blocks = vec![self.unused_window(); first];
        table.windows.first = first;
        for i in first..num_found {
            let block = table.blocks()[i];
            let kept = self.kept_window_of(block).expect("the chain was cut to a window").block;
            self.touch_window(block);
            self.windows.as_mut().expect("just seen").num_holders[kept as usize] += 1;
            table.windows.blocks.push(kept);
        }
    }

    /// Sets after which blocks of a prompt the window is kept, once they are computed: its last whole block, and
    /// `num_found`, at which it left a cached one.
    pub(super) fn keep_windows_of(&self, table: &mut BlockTable, prompt_len: usize, num_found: usize) {
        table.windows.kept_after = [prompt_len.saturating_sub(1) / self.block_len, num_found];
    }

    /// Marks a kept window block as used now.
    fn touch_window(&mut self, block: BlockId) {
        let clock = self.clock;
        let content = self.blocks[block as usize].content.as_mut();
        if let Some((windows, content)) = self.windows.as_mut().zip(content)
            && let Some(kept) = &mut content.window
        {
            let order = |last_used: u64| EvictionOrder::new(last_used, content.depth, block);
            windows.kept.remove(content.scope.tenant, order(kept.last_used));
            kept.last_used = clock;
            windows.kept.add(content.scope.tenant, order(clock));
        }
    }

    /// Gives back the window blocks that no row from the beginning of the block of `position` on needs: a later request
    /// may go on from there.
    pub fn slide_window(&mut self, table: &mut BlockTable, position: usize) {
        let Some(Windows { options, .. }) = &self.windows else { return };
        let edge = position - position % self.block_len;
        let first = options.first_needed(edge, self.block_len).min(table.windows.blocks.len());
        let unused = self.unused_window();
        while table.windows.first < first {
            let dropped = std::mem::replace(&mut table.windows.blocks[table.windows.first], unused);
            table.windows.first += 1;
            self.drop_holder(dropped);
        }
    }

    /// Takes a window block beside each block of a table that has none.
    pub(super) fn grow_windows(&mut self, table: &mut BlockTable) -> Result<(), OutOfBlocks> {
        while self.windows.is_some() && table.windows.blocks.len() < table.blocks().len() {
            let block = self.take_window_block()?;
            table.windows.blocks.push(block);
        }
        Ok(())
    }

    /// Replaces the window block beside block `i` of a table by `to`. Returns the copy that the caller must make.
    pub(super) fn replace_window(&mut self, table: &mut BlockTable, i: usize, to: WindowBlock) -> [WindowBlock; 2] {
        let from = std::mem::replace(&mut table.windows.blocks[i], to);
        self.drop_holder(from);
        [from, to]
    }

    /// Gives the fork of a table the same window blocks.
    pub(super) fn fork_windows(&mut self, table: &BlockTable, fork: &mut BlockTable) {
        let Some(windows) = &mut self.windows else { return };
        fork.windows.copy(&table.windows);
        for &block in fork.held_windows() {
            windows.num_holders[block as usize] += 1;
        }
    }

    /// Takes back the window blocks of a table.
    pub(super) fn release_windows(&mut self, table: &mut BlockTable) {
        let windows = std::mem::take(&mut table.windows);
        windows.blocks[windows.first..].iter().for_each(|&block| self.drop_holder(block));
    }

    /// Keeps the windows of a prompt whose last blocks have just entered the index: those after more than `before`
    /// blocks.
    pub(super) fn keep_windows(&mut self, table: &BlockTable, before: usize, tokens: &[u32]) {
        for num_blocks in table.windows.kept_after {
            if before < num_blocks && num_blocks <= table.num_hashed() {
                self.keep_window(table, num_blocks, tokens);
            }
        }
    }

    /// Keeps the window before the end of the first `num_blocks` blocks of a table, which have entered the index, as
    /// far as the table still has it.
    pub(super) fn keep_window(&mut self, table: &BlockTable, num_blocks: usize, tokens: &[u32]) {
        let Some(options) = self.windows.as_ref().map(|windows| windows.options) else { return };
        let first = options.first_needed(num_blocks * self.block_len, self.block_len);
        if first < table.windows.first {
            return;
        }
        for i in first..num_blocks {
            let tokens = &tokens[i * self.block_len..(i + 1) * self.block_len];
            self.keep_window_block(table, i, tokens);
        }
        let num_kept = options.num_kept;
        while self.windows.as_ref().is_some_and(|windows| windows.kept.len() > num_kept) {
            self.evict_window();
        }
    }

    fn keep_window_block(&mut self, table: &BlockTable, i: usize, tokens: &[u32]) {
        // Another sequence may have entered a block with the same tokens first, or with others of the same hash.
        let hash = table.hashes()[i];
        let holder = [table.scope(), Scope::SHARED].into_iter().find_map(|scope| self.indexes.get(&scope)?.get(hash));
        let Some(holder) = holder else { return };
        let clock = self.clock;
        let content = self.blocks[holder as usize].content.as_mut().expect("a block in an index has content");
        let is_same = *content.tokens == *tokens && content.depth == i as u32;
        match &mut self.windows {
            Some(_) if content.window.is_some() => self.touch_window(holder),
            Some(windows) if is_same => {
                let block = table.windows.blocks[i];
                content.window = Some(KeptWindow { block, last_used: clock });
                windows.num_holders[block as usize] += 1;
                windows.kept.add(content.scope.tenant, EvictionOrder::new(clock, content.depth, holder));
            }
            _ => {}
        }
    }

    /// Forgets the window block of a block that is evicted.
    pub(super) fn forget_window(&mut self, scope: Scope, depth: u32, block: BlockId, kept: Option<KeptWindow>) {
        if let Some((windows, kept)) = self.windows.as_mut().zip(kept) {
            windows.kept.remove(scope.tenant, EvictionOrder::new(kept.last_used, depth, block));
            self.drop_holder(kept.block);
        }
    }

    pub(super) fn drop_holder(&mut self, block: WindowBlock) {
        let windows = self.windows.as_mut().expect("the block came from here");
        let num_holders = &mut windows.num_holders[block as usize];
        *num_holders -= 1;
        if *num_holders == 0 {
            windows.free.push(block);
        }
    }

    /// Takes a free window block; the least recently used of those that are kept give way if there is none.
    pub(super) fn take_window_block(&mut self) -> Result<WindowBlock, OutOfBlocks> {
        loop {
            let windows = self.windows.as_mut().expect("asked for by a table with windows");
            if let Some(block) = windows.free.pop() {
                windows.num_holders[block as usize] = 1;
                return Ok(block);
            }
            // A table may hold it as well; then it does not become free.
            self.evict_window().ok_or(OutOfBlocks::Memory { needed: 1, available: 0 })?;
        }
    }

    /// Takes a window block away from the content of its block, which stays in its index.
    fn evict_window(&mut self) -> Option<()> {
        let windows = self.windows.as_mut()?;
        let block = windows.kept.pop(windows.kept.next_tenant()?)?;
        let content = self.blocks[block as usize].content.as_mut().expect("a block with a window has content");
        let kept = content.window.take().expect("it was queued");
        self.drop_holder(kept.block);
        Some(())
    }

    /// Counts the window blocks again, which the tables and the contents of blocks hold.
    pub(super) fn audit_windows<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), String> {
        let Some(windows) = &self.windows else { return Ok(()) };
        let mut num_holders = vec![0; windows.options.num_blocks];
        for table in tables {
            let TableWindows { blocks, first, .. } = &table.windows;
            if blocks.len() > table.blocks().len() || blocks[..*first].iter().any(|&b| b != self.unused_window()) {
                return Err(format!("a table of {} blocks has the windows {blocks:?}", table.blocks().len()));
            }
            table.held_windows().iter().for_each(|&block| num_holders[block as usize] += 1);
        }
        self.kept_windows().for_each(|kept| num_holders[kept.block as usize] += 1);
        if num_holders != windows.num_holders {
            return Err(format!("window blocks have the holders {num_holders:?}, not {:?}", windows.num_holders));
        }
        let num_free = num_holders.iter().filter(|&&num| num == 0).count();
        let are_free = windows.free.iter().all(|&block| num_holders[block as usize] == 0);
        if num_free != windows.free.len() || !are_free {
            return Err(format!("{num_free} window blocks are free, but the list has {:?}", windows.free));
        }
        let num_kept = self.kept_windows().count();
        if num_kept != windows.kept.len() || num_kept > windows.options.num_kept {
            return Err(format!("{num_kept} window blocks are kept, but {} are queued", windows.kept.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MissReason, PrefixMiss, Reservation, TenantId};
    use super::*;

    const TENANT: Scope = Scope::of(TenantId(1));
    const BLOCK_LEN: usize = 4;

    /// 32 blocks, and 12 of a window of 6 positions.
    fn cache(num_kept: usize) -> KvCache {
        let mut cache = KvCache::new(32, BLOCK_LEN, [7; 32]);
        cache.use_windows(WindowOptions { len: 6, num_blocks: 12, num_kept });
        cache
    }

    /// Computes positions of a sequence in chunks of three.
    fn compute(
        cache: &mut KvCache,
        table: &mut BlockTable,
        reservation: &mut Reservation,
        tokens: &[u32],
        from: usize,
    ) {
        for start in (from..tokens.len()).step_by(3) {
            let end = tokens.len().min(start + 3);
            cache.grow(table, reservation, end).expect("enough blocks");
            assert!(table.window_blocks()[start / BLOCK_LEN..end.div_ceil(BLOCK_LEN)].iter().all(|&block| block < 12));
            cache.index_full_blocks(table, &tokens[..end]);
            cache.slide_window(table, end);
        }
    }

    /// Runs a request whose prompt has `prompt_len` of the tokens. Returns the number of tokens that were found.
    fn serve(cache: &mut KvCache, tokens: &[u32], prompt_len: usize) -> usize {
        let (mut table, mut reservation, found) = cache.admit(TENANT, &tokens[..prompt_len], 0).expect("enough blocks");
        compute(cache, &mut table, &mut reservation, tokens, found);
        cache.audit([&table].into_iter(), [&reservation].into_iter()).unwrap();
        cache.end(table, tokens);
        cache.cancel(reservation);
        cache.audit([].into_iter(), [].into_iter()).unwrap();
        found
    }

    fn tokens(len: usize, change: Option<usize>) -> Vec<u32> {
        (0..len).map(|i| i as u32 + change.filter(|&from| i >= from).map_or(0, |_| 1000)).collect()
    }

    #[test]
    fn blocks_that_fell_out_of_the_window_are_given_back() {
        let mut cache = cache(0);
        let tokens = tokens(17, None);
        let (mut table, mut reservation, _) = cache.admit(TENANT, &tokens, 0).unwrap();
        compute(&mut cache, &mut table, &mut reservation, &tokens, 0);
        // A row at 16, the beginning of the block of the last position, needs the positions from 11 on.
        let windows = table.window_blocks();
        assert_eq!(
            (&windows[..2], windows.len()),
            (&[12, 12][..], 5),
            "the unused block has the number after the last"
        );
        assert_eq!((table.held_windows().len(), cache.num_taken_windows()), (3, (3, 0)));
        cache.release(table);
        cache.cancel(reservation);
        assert_eq!(cache.num_taken_windows(), (0, 0));
    }

    #[test]
    fn a_prefix_is_found_where_its_window_is_kept() {
        let mut cache = cache(9);
        // The windows before 12, the end of the prompt, and before 20, the end of the reply, are kept.
        assert_eq!(serve(&mut cache, &tokens(21, None), 14), 0);
        assert_eq!(cache.num_taken_windows(), (4, 4));
        let miss = cache.explain_miss(TENANT, &tokens(10, None), 0);
        assert_eq!(miss, Some(PrefixMiss { reused: 0, reason: MissReason::NoWindow }));
        assert_eq!(serve(&mut cache, &tokens(30, None), 30), 20, "a further turn of the conversation");
        assert_eq!(serve(&mut cache, &tokens(16, None), 14), 12, "another reply to the prompt");
        // Others with the same beginning find it from the second on.
        let beginning = |change| tokens(20, Some(change));
        assert_eq!(serve(&mut cache, &beginning(8), 18), 0);
        assert_eq!(serve(&mut cache, &beginning(9), 18), 8);
    }

    #[test]
    fn windows_are_kept_for_those_who_came_last() {
        let mut cache = cache(4);
        let beginning = |change| tokens(14, Some(change));
        for change in [0, 1, 2] {
            // Two blocks before 12.
            assert_eq!(serve(&mut cache, &beginning(change), 13), 0);
        }
        assert_eq!(cache.num_taken_windows(), (4, 4));
        let found = [2, 1, 0].map(|change| serve(&mut cache, &beginning(change), 13));
        assert_eq!(found, [12, 12, 0]);
    }

    #[test]
    fn kept_windows_make_room_for_running_sequences() {
        let mut cache = cache(12);
        for change in [0, 1, 2, 3, 4] {
            serve(&mut cache, &tokens(14, Some(change)), 13);
        }
        assert_eq!(cache.num_taken_windows(), (10, 10));
        let tokens = tokens(13, Some(5));
        let (mut table, mut reservation, _) = cache.admit(TENANT, &tokens, 0).unwrap();
        cache.grow(&mut table, &mut reservation, 13).expect("kept ones give way");
        assert_eq!(cache.num_taken_windows(), (12, 8));
        cache.audit([&table].into_iter(), [&reservation].into_iter()).unwrap();
        cache.release(table);
        cache.cancel(reservation);
    }

    #[test]
    fn a_copy_has_a_window_block_of_its_own() {
        let mut cache = cache(0);
        let tokens = tokens(6, None);
        let (mut first, mut reservation, _) = cache.admit(TENANT, &tokens, 5).unwrap();
        compute(&mut cache, &mut first, &mut reservation, &tokens, 0);
        let mut second = cache.fork(&first).unwrap();
        let copy = cache.make_writable(&mut second, &mut reservation, 6).unwrap().expect("a shared block");
        assert_eq!(copy.windows, Some([first.window_blocks()[1], second.window_blocks()[1]]));
        assert_eq!(first.window_blocks()[0], second.window_blocks()[0]);
        assert_ne!(first.window_blocks()[1], second.window_blocks()[1]);
        cache.audit([&first, &second].into_iter(), [&reservation].into_iter()).unwrap();
        cache.release(first);
        cache.release(second);
        cache.cancel(reservation);
        assert_eq!(cache.num_taken_windows(), (0, 0));
    }
}
