//! The input of one step: which tokens to compute, where their keys and values are stored, and which rows' logits are
//! wanted.
//!
//! There is no prefill flag. A whole prompt, a part of one and the next token of a reply are chunks of different
//! lengths.

use std::ops::Range;

use pellucid_tensor::{RowQuery, SequenceSpan, StateSave, StateSpan, StepIndex, TokenSource};

use crate::{DecoderConfig, Error, KvMemory};

/// The tokens of a chunk.
#[derive(Debug, Clone, Copy)]
pub enum ChunkIds<'a> {
    Tokens(&'a [u32]),
    /// One token: the one that the device assumed for this wanted row of the step launched before.
    Assumed {
        row: usize,
    },
    /// Tokens of which only the device may know some.
    Sources(&'a [TokenSource]),
}

impl ChunkIds<'_> {
    fn len(&self) -> usize {
        match self {
            ChunkIds::Tokens(tokens) => tokens.len(),
            ChunkIds::Assumed { .. } => 1,
            ChunkIds::Sources(sources) => sources.len(),
        }
    }
}

/// The recurrent states of a chunk, for models that have them. Models without ignore it.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChunkState<'a> {
    /// Slot of the state after the position before the chunk; `None` for the beginning of a sequence.
    pub from: Option<u32>,
    /// Rows of the chunk after which the state is saved, in ascending order. No other chunk of the batch uses these
    /// slots.
    pub saves: &'a [StateSave],
}

impl<'a> ChunkState<'a> {
    /// Returns the state of a chunk that begins at `first_position`, for a sequence whose state stays in the slot of
    /// `save`.
    pub fn in_place(first_position: usize, save: &'a StateSave) -> ChunkState<'a> {
        let from = (first_position > 0).then_some(save.slot);
        ChunkState { from, saves: std::slice::from_ref(save) }
    }
}

/// The next tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Chunk<'a> {
    pub ids: ChunkIds<'a>,
    /// Position of the first of `ids`; the keys and values of all earlier positions are already stored.
    pub first_position: usize,
    /// The blocks of the sequence, enough for its positions up to the end of this chunk.
    pub blocks: &'a [u32],
    /// The rows of this chunk whose logits are wanted, counted from its start.
    pub wanted: Range<usize>,
    /// The digests to compute in place of the wanted rows of logits: one query for each wanted row, or none if the rows
    /// themselves are wanted.
    pub queries: &'a [RowQuery],
    pub state: ChunkState<'a>,
}

/// The chunks of a step, flattened.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub(crate) ids: Vec<TokenSource>,
    pub(crate) positions: Vec<u32>,
    pub(crate) sequences: Vec<SequenceSpan>,
    pub(crate) block_tables: Vec<u32>,
    /// For layers with windows, if they have blocks of their own: a block for each of `block_tables`.
    pub(crate) window_tables: Vec<u32>,
    /// The states of each sequence.
    pub(crate) states: Vec<StateSpan>,
    pub(crate) saves: Vec<StateSave>,
    pub(crate) slots: Vec<u32>,
    pub(crate) window_slots: Vec<u32>,
    pub(crate) wanted: Vec<u32>,
    /// For each wanted row, the digest to compute in its place.
    pub(crate) queries: Vec<Option<RowQuery>>,
}

/// Tables of a step that depend on the decoder too.
#[derive(Debug, Default)]
pub(crate) struct StepTables {
    /// Digest queries of the wanted rows, or none.
    pub(crate) queries: Vec<RowQuery>,
    /// For each row, the slot of the position before it; empty without a predictor.
    pub(crate) previous_slots: Vec<u32>,
}

impl Batch {
    pub fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.sequences.clear();
        self.block_tables.clear();
        self.window_tables.clear();
        self.states.clear();
        self.saves.clear();
        self.slots.clear();
        self.window_slots.clear();
        self.wanted.clear();
        self.queries.clear();
    }

    /// Adds a chunk of a sequence whose blocks hold `block_len` positions each.
    pub fn push(&mut self, chunk: Chunk<'_>, block_len: usize) {
        self.push_with_windows(chunk, &[], block_len);
    }

    /// [`Batch::push`] for a memory in which layers with windows have blocks of their own. `window_blocks` has an entry
    /// for each of the chunk's blocks. Those of blocks that fell out of the window name a block that nothing is stored
    /// in.
    pub fn push_with_windows(&mut self, chunk: Chunk<'_>, window_blocks: &[u32], block_len: usize) {
        assert!(window_blocks.is_empty() || window_blocks.len() == chunk.blocks.len(), "a block for each block");
        let positions = chunk.first_position..chunk.first_position + chunk.ids.len();
        assert!(positions.end <= chunk.blocks.len() * block_len, "the blocks hold the chunk's positions");
        assert!(chunk.wanted.end <= chunk.ids.len(), "wanted rows are rows of the chunk");
        let first_row = self.ids.len();
        let first_block = self.block_tables.len();
        let first_save = self.saves.len();
        assert!(chunk.state.saves.is_sorted_by_key(|save| save.row), "states are saved in the order of the rows");
        self.saves.extend_from_slice(chunk.state.saves);
        self.states.push(StateSpan { from: chunk.state.from, saves: first_save..self.saves.len() });
        match chunk.ids {
            ChunkIds::Tokens(tokens) => self.ids.extend(tokens.iter().map(|&token| TokenSource::Token(token))),
            ChunkIds::Assumed { row } => self.ids.push(TokenSource::Assumed { row: row as u32 }),
            ChunkIds::Sources(sources) => self.ids.extend_from_slice(sources),
        }
        self.block_tables.extend_from_slice(chunk.blocks);
        self.window_tables.extend_from_slice(window_blocks);
        let slot = |blocks: &[u32], position: usize| {
            (blocks[position / block_len] as usize * block_len + position % block_len) as u32
        };
        for position in positions {
            self.positions.push(position as u32);
            self.slots.push(slot(chunk.blocks, position));
            if !window_blocks.is_empty() {
                self.window_slots.push(slot(window_blocks, position));
            }
        }
        assert!(chunk.queries.is_empty() || chunk.queries.len() == chunk.wanted.len(), "a query for each wanted row");
        self.queries.extend((0..chunk.wanted.len()).map(|row| chunk.queries.get(row).copied()));
        self.wanted.extend(chunk.wanted.map(|row| (first_row + row) as u32));
        self.sequences
            .push(SequenceSpan { rows: first_row..self.ids.len(), blocks: first_block..self.block_tables.len() });
    }

    /// Returns the token of each row, or its source.
    pub fn ids(&self) -> &[TokenSource] {
        &self.ids
    }

    /// Returns the position of each row in its sequence.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Returns the slot of each row's keys and values: `block * block_len + offset`.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Returns the rows and blocks of each sequence. The blocks are a range of [`Batch::block_tables`].
    pub fn sequences(&self) -> &[SequenceSpan] {
        &self.sequences
    }

    pub fn block_tables(&self) -> &[u32] {
        &self.block_tables
    }

    /// Returns the blocks of layers with windows, one for each of [`Batch::block_tables`]; none if they have no blocks
    /// of their own.
    pub fn window_tables(&self) -> &[u32] {
        &self.window_tables
    }

    /// Returns the slot of each row's keys and values in layers with windows, if they have blocks of their own.
    pub fn window_slots(&self) -> &[u32] {
        &self.window_slots
    }

    /// Returns the slots of the rows and the block tables of the sequences, of layers with windows if `is_windowed`.
    pub(crate) fn places(&self, is_windowed: bool) -> (&[u32], &[u32]) {
        if is_windowed { (&self.window_slots, &self.window_tables) } else { (&self.slots, &self.block_tables) }
    }

    /// Returns the rows whose logits are wanted.
    pub fn wanted(&self) -> &[u32] {
        &self.wanted
    }

    /// Returns, for each wanted row, the digest to compute in its place.
    pub fn queries(&self) -> &[Option<RowQuery>] {
        &self.queries
    }

    /// Returns the number of rows to compute.
    pub fn num_rows(&self) -> usize {
        self.ids.len()
    }

    /// Returns the number of wanted rows.
    pub fn num_wanted(&self) -> usize {
        self.wanted.len()
    }

    /// Writes the digest query of each wanted row; none if no row has one. If some rows have none, a digest is computed
    /// for them as well, and ignored.
    pub(crate) fn write_queries(&self, queries: &mut Vec<RowQuery>) {
        queries.clear();
        if self.queries.iter().any(Option::is_some) {
            let ignored = RowQuery { temperature: 1.0, race: None, shortlist: None };
            queries.extend(self.queries.iter().map(|query| query.unwrap_or(ignored)));
        }
    }

    /// Writes, for each row, the slot of the position before it, for a predictor whose row of zeros is in the slot
    /// `before_first`.
    pub(crate) fn write_previous_slots(&self, block_len: usize, before_first: usize, out: &mut Vec<u32>) {
        out.clear();
        for sequence in &self.sequences {
            for row in sequence.rows.clone() {
                out.push(match self.positions[row] as usize {
                    0 => before_first as u32,
                    _ if row > sequence.rows.start => self.slots[row - 1],
                    position => {
                        let block = self.block_tables[sequence.blocks.start + (position - 1) / block_len] as usize;
                        (block * block_len + (position - 1) % block_len) as u32
                    }
                });
            }
        }
    }

    /// Returns the description of the step that a backend gets before its operations.
    pub(crate) fn index<'a>(&'a self, kv: &KvMemory, tables: &'a StepTables) -> StepIndex<'a> {
        StepIndex {
            ids: &self.ids,
            positions: &self.positions,
            slots: &self.slots,
            wanted: &self.wanted,
            sequences: &self.sequences,
            block_tables: &self.block_tables,
            window_slots: &self.window_slots,
            window_tables: &self.window_tables,
            states: if kv.has_states() { &self.states } else { &[] },
            saves: &self.saves,
            previous_slots: &tables.previous_slots,
            queries: &tables.queries,
            kv_address: kv.layers.as_ptr().addr(),
        }
    }

    /// Refuses ids and positions outside the model's tables, and tokens from rows beyond the `num_digests` of the step
    /// before.
    pub(crate) fn check(&self, config: &DecoderConfig, num_digests: usize) -> Result<(), Error> {
        for (row, &id) in self.ids.iter().enumerate() {
            match id {
                TokenSource::Token(id) if id as usize >= config.vocab_size => {
                    return Err(Error::IdOutsideVocabulary { id, row, vocab_size: config.vocab_size });
                }
                TokenSource::Assumed { row: digest } if digest as usize >= num_digests => {
                    return Err(Error::NoSuchDigest { digest: digest as usize, row, num_digests });
                }
                _ => {}
            }
        }
        match self.positions.iter().find(|&&position| position as usize >= config.context_len) {
            Some(&position) => {
                Err(Error::PositionOutsideContext { position: position as usize, context_len: config.context_len })
            }
            None => Ok(()),
        }
    }
}
