//! Runs a model without an engine, with explicit chunks and block tables.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_model::{
    AttentionRows, BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Decoder, KvMemory, LoadOptions, Logits, Model,
    ProbeQuery,
};
use pellucid_tensor::{Backend, DType, Extension, RowQuery, StateSave};

/// A loaded model and its KV memory.
#[derive(Debug)]
pub struct Runner {
    pub model: Decoder,
    pub kv: KvMemory,
    windows: Option<Windows>,
}

/// The blocks of layers with windows: as many as other blocks, and one more in which nothing is stored.
#[derive(Debug, Clone, Copy)]
struct Windows {
    num_blocks: u32,
    /// Number of positions that a row needs, its own included.
    len: usize,
}

impl Windows {
    /// The window blocks of a sequence beside its blocks. Those that rows from `position` on do not need are the one in
    /// which nothing is stored.
    fn beside(self, blocks: &[u32], position: usize) -> Vec<u32> {
        let first = (position + 1).saturating_sub(self.len) / BLOCK_LEN;
        // Another order than that of the blocks, so that a table that is taken for the other is noticed.
        let beside = |(i, &block): (usize, &u32)| if i < first { self.num_blocks } else { self.num_blocks - 1 - block };
        blocks.iter().enumerate().map(beside).collect()
    }
}

/// A sequence: its block table, and the number of stored positions.
#[derive(Debug, Clone)]
pub struct TestSequence {
    pub blocks: Vec<u32>,
    pub len: usize,
}

impl Runner {
    /// Loads a model with keys and values in f32, like the reference.
    pub fn load(path: &Path, backend: Arc<dyn Backend>, context_len: Option<usize>, num_blocks: usize) -> Runner {
        Runner::load_with(path, backend, context_len, num_blocks, DType::F32)
    }

    /// Loads a model from a file or folder. Quantized weights of folders are rounded as by the package of their scheme.
    pub fn load_with(
        path: &Path,
        backend: Arc<dyn Backend>,
        context_len: Option<usize>,
        num_blocks: usize,
        kv_dtype: DType,
    ) -> Runner {
        let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let checkpoint = checkpoint.with_reference_rounding();
        Runner::of(&checkpoint, backend, context_len, num_blocks, kv_dtype)
    }

    /// Loads a model from an open checkpoint, which may be in memory.
    pub fn of(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        context_len: Option<usize>,
        num_blocks: usize,
        kv_dtype: DType,
    ) -> Runner {
        let model = Decoder::load(
            checkpoint,
            backend.clone(),
            LoadOptions { context_len, ..LoadOptions::default() },
            &mut |_, _| (),
        )
        .unwrap_or_else(|error| panic!("{error}"));
        let window = model.config().kv_window().filter(|_| backend.supports(Extension::WindowBlocks));
        let windows = window.map(|len| Windows { num_blocks: num_blocks as u32, len });
        let blocks = (num_blocks, windows.map(|_| num_blocks));
        let kv = KvMemory::with_windows(model.config(), &*backend, kv_dtype, blocks, BLOCK_LEN)
            .and_then(|kv| kv.with_states(model.config(), &*backend, num_blocks))
            .expect("enough memory for a tiny model, in a format that fits its heads");
        Runner { model, kv, windows }
    }

    /// A runner of a model whose layers with windows share the blocks of the others.
    pub fn with_kv(model: Decoder, kv: KvMemory) -> Runner {
        Runner { model, kv, windows: None }
    }

    /// Returns the window blocks beside a sequence's blocks for rows from `position` on; none if layers with windows
    /// have no blocks of their own.
    pub fn window_blocks(&self, blocks: &[u32], position: usize) -> Vec<u32> {
        self.windows.map(|windows| windows.beside(blocks, position)).unwrap_or_default()
    }

    /// Runs one step of several chunks and returns the logits of all their rows.
    pub fn step(&mut self, chunks: &mut [(&mut TestSequence, &[u32])]) -> Vec<Vec<f32>> {
        let logits = self.step_with_queries(chunks, &vec![&[][..]; chunks.len()]);
        (0..logits.num_rows()).map(|row| logits.row(row).to_vec()).collect()
    }

    /// Runs one step of several chunks; a chunk with queries, one for each row, may get digests instead of rows.
    pub fn step_with_queries(&mut self, chunks: &mut [(&mut TestSequence, &[u32])], queries: &[&[RowQuery]]) -> Logits {
        let mut batch = Batch::default();
        for ((sequence, ids), &queries) in chunks.iter_mut().zip(queries) {
            let (first_position, blocks, num_rows) = (sequence.len, &sequence.blocks, ids.len());
            let wanted = 0..num_rows;
            // A sequence's first block is its own, and so is the slot with the block's number.
            let save = StateSave { row: num_rows as u32 - 1, slot: blocks[0] };
            let (ids, state) = (ChunkIds::Tokens(ids), ChunkState::in_place(first_position, &save));
            let windows = self.window_blocks(blocks, first_position);
            let chunk = Chunk { ids, first_position, blocks, wanted, queries, state };
            batch.push_with_windows(chunk, &windows, BLOCK_LEN);
            sequence.len += num_rows;
        }
        let mut logits = Logits::default();
        self.model.forward(&batch, &mut self.kv, &mut logits).expect("the batch is valid");
        logits
    }

    /// Probes the last `num_rows` positions of a sequence whose keys and values are stored.
    pub fn probe(
        &mut self,
        ids: &[u32],
        num_rows: usize,
        blocks: &[u32],
        query: &ProbeQuery,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Option<AttentionRows> {
        let (first_position, wanted) = (ids.len() - num_rows, num_rows - 1..num_rows);
        let (ids, state) = (ChunkIds::Tokens(&ids[first_position..]), ChunkState::default());
        let mut batch = Batch::default();
        let windows = self.window_blocks(blocks, first_position);
        let chunk = Chunk { ids, first_position, blocks, wanted, queries: &[], state };
        batch.push_with_windows(chunk, &windows, BLOCK_LEN);
        self.model.probe(&batch, &mut self.kv, query, on_layer).expect("a decoder can be probed")
    }

    /// Returns the logits at every position of a prompt, computed in chunks of the given sizes; the last size repeats.
    pub fn prompt(&mut self, prompt: &[u32], chunk_sizes: &[usize], blocks: Vec<u32>) -> Vec<f32> {
        let mut sequence = TestSequence { blocks, len: 0 };
        let mut logits = Vec::new();
        let mut sizes =
            chunk_sizes.iter().copied().chain(std::iter::repeat(*chunk_sizes.last().expect("a chunk size")));
        while sequence.len < prompt.len() {
            let size = sizes.next().expect("endless").min(prompt.len() - sequence.len);
            let ids = &prompt[sequence.len..sequence.len + size];
            logits.extend(self.step(&mut [(&mut sequence, ids)]).concat());
        }
        logits
    }
}
