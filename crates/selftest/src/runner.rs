//! Runs a model without an engine, with explicit chunks and block tables.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_model::{
    AttentionRows, BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Decoder, KvMemory, LoadOptions, Logits, Model,
    ProbeQuery,
};
use pellucid_tensor::{Backend, DType, RowQuery, StateSave};

/// A loaded model and its KV memory.
#[derive(Debug)]
pub struct Runner {
    pub model: Decoder,
    pub kv: KvMemory,
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
        let kv = KvMemory::new(model.config(), &*backend, kv_dtype, num_blocks, BLOCK_LEN)
            .and_then(|kv| kv.with_states(model.config(), &*backend, num_blocks))
            .expect("enough memory for a tiny model, in a format that fits its heads");
        Runner { model, kv }
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
            batch.push(Chunk { ids, first_position, blocks, wanted, queries, state }, BLOCK_LEN);
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
        batch.push(Chunk { ids, first_position, blocks, wanted, queries: &[], state }, BLOCK_LEN);
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
