//! The times of draft steps and of the steps that verify drafts, without the engine.

use std::time::Instant;

use anyhow::Result;
use pellucid_model::{BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Decoder, KvMemory, Logits, Model};
use pellucid_tensor::{DType, RowQuery, StateSave};

/// Steps of a measurement. The first ones, in which steps are recorded, are not measured.
const NUM_STEPS: usize = 32;
const NUM_FIRST: usize = 6;

/// A model with KV memory for the sequences of a measurement.
pub(super) struct StepTimes<'a> {
    model: &'a mut Decoder,
    kv: KvMemory,
    num_sequences: usize,
    blocks_of_sequence: usize,
}

impl StepTimes<'_> {
    pub(super) fn new(
        model: &mut Decoder,
        kv_dtype: DType,
        num_sequences: usize,
        max_positions: usize,
    ) -> Result<StepTimes<'_>> {
        let blocks_of_sequence = max_positions.div_ceil(BLOCK_LEN);
        let num_blocks = num_sequences * blocks_of_sequence;
        let kv = KvMemory::new(model.config(), model.devices(), kv_dtype, num_blocks, BLOCK_LEN)?;
        let kv = kv.with_states(model.config(), model.devices(), num_blocks)?;
        Ok(StepTimes { model, kv, num_sequences, blocks_of_sequence })
    }

    /// Returns the mean seconds of a step in which every sequence has `num_rows` rows from `position` on. The keys and
    /// values before it are zeros: speed does not depend on them.
    pub(super) fn verify(&mut self, position: usize, num_rows: usize) -> Result<f64> {
        let tokens: Vec<u32> = (0..num_rows as u32).map(|row| row * 7919 % 1000).collect();
        let batch = self.batch(position, ChunkIds::Tokens(&tokens), 0);
        let mut logits = [Logits::default(), Logits::default()];
        let mut started = Instant::now();
        for step in 0..NUM_FIRST + NUM_STEPS {
            self.model.launch(&batch, &mut self.kv, &mut logits[step % 2])?;
            if step > 0 {
                self.model.finish(&mut logits[(step - 1) % 2])?;
            }
            if step + 1 == NUM_FIRST {
                // The step that was launched last is finished and measured after this.
                started = Instant::now();
            }
        }
        self.model.finish(&mut logits[(NUM_FIRST + NUM_STEPS - 1) % 2])?;
        Ok(started.elapsed().as_secs_f64() / (NUM_STEPS + 1) as f64)
    }

    /// Returns the mean seconds of a draft step at `position`, of a chain in which each takes its tokens from the one
    /// before.
    pub(super) fn draft(&mut self, position: usize) -> Result<f64> {
        let first = self.batch(position, ChunkIds::Tokens(&[1]), 0);
        let mut out = Vec::new();
        let mut started = Instant::now();
        self.model.launch_draft(&first, &mut self.kv, 0)?;
        for step in 0..NUM_FIRST + NUM_STEPS {
            if step == NUM_FIRST {
                self.model.fetch_drafts(1)?;
                self.model.read_drafts(&mut out)?;
                started = Instant::now();
            }
            let mut batch = Batch::default();
            for sequence in 0..self.num_sequences {
                self.push(&mut batch, sequence, position, ChunkIds::Assumed { row: sequence }, 0);
            }
            self.model.launch_draft(&batch, &mut self.kv, 1 + step % 4)?;
        }
        self.model.fetch_drafts(1)?;
        self.model.read_drafts(&mut out)?;
        Ok(started.elapsed().as_secs_f64() / NUM_STEPS as f64)
    }

    fn batch(&self, position: usize, ids: ChunkIds<'_>, first_wanted: usize) -> Batch {
        let mut batch = Batch::default();
        for sequence in 0..self.num_sequences {
            self.push(&mut batch, sequence, position, ids, first_wanted);
        }
        batch
    }

    fn push(&self, batch: &mut Batch, sequence: usize, position: usize, ids: ChunkIds<'_>, first_wanted: usize) {
        let first = (sequence * self.blocks_of_sequence) as u32;
        let blocks: Vec<u32> = (first..first + self.blocks_of_sequence as u32).collect();
        let num_rows = if let ChunkIds::Tokens(tokens) = ids { tokens.len() } else { 1 };
        let query = |row: usize| {
            let race = Some((sequence as u64, (position + row + 1) as u32));
            RowQuery { temperature: 1.0, race, shortlist: None }
        };
        let queries: Vec<RowQuery> = (first_wanted..num_rows).map(query).collect();
        let wanted = first_wanted..num_rows;
        // Every drafted row would have a slot of its own; the time of one save stands for them.
        let save = StateSave { row: num_rows as u32 - 1, slot: first };
        let (first_position, state) = (position, ChunkState::in_place(position, &save));
        let chunk = Chunk { ids, first_position, blocks: &blocks, wanted, queries: &queries, state };
        batch.push(chunk, BLOCK_LEN);
    }
}
