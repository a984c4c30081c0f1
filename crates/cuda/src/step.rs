//! Steps: the index tables of a step on the device, and recorded steps (CUDA graphs) that are replayed.
//!
//! The tables of a step are uploaded together, before its operations, to addresses that depend on the numbers of rows
//! alone. An operation that is given one of the step's own slices uses the table that is already there. So a recording
//! of the launches serves every later step of the same size: only the contents of the tables differ.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use pellucid_tensor::{Error, RowQuery, SequenceSpan, StateSpan, StepIndex, StepMemo, TokenSource};

use crate::backend::CudaBackend;
use crate::driver::{Device, loses_context};
use crate::gpu::{Gpu, Purpose};
use crate::kernels::attention::prefill::FLASH_TILE;
use crate::kernels::recurrence::CONVOLVED_RUN;
use crate::kernels::rows::digest::Query;
use crate::kernels::rows::elementwise;
use crate::recurrence::{SPAN_WORDS, save_words, span_words};

/// Maximum rows of a step that is recorded: with more, kernels run longer than their launches take.
pub(crate) const MAX_RECORDED_ROWS: usize = 512;
/// Maximum recordings of a model: sizes of batches times the powers of two of their longest contexts. Then the least
/// recently used one is dropped.
const MAX_RECORDINGS: usize = 256;

/// Maximum rows of a sequence whose rows attend one by one, and of a step of such sequences. With more rows, keys and
/// values that are read once for several rows save more than the distribution of tiles over blocks.
const MAX_SHORT_CHUNK: usize = 16;
const MAX_SHORT_ROWS: usize = 256;
// The convolutions of a recorded step have one run of rows for each sequence.
const _: () = assert!(MAX_SHORT_CHUNK <= CONVOLVED_RUN);

/// The lengths of a step's chunks, as far as kernels and recordings depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ChunkLen {
    /// Every sequence has one row.
    One,
    /// No sequence has more than [`MAX_SHORT_CHUNK`] rows, as when drafted tokens are verified.
    Short,
    Long,
}

impl ChunkLen {
    pub(crate) fn of(sequences: &[SequenceSpan]) -> ChunkLen {
        let longest = sequences.iter().map(|sequence| sequence.rows.len()).max().unwrap_or(1);
        let num_rows: usize = sequences.iter().map(|sequence| sequence.rows.len()).sum();
        match longest {
            0..=1 => ChunkLen::One,
            2..=MAX_SHORT_CHUNK if num_rows <= MAX_SHORT_ROWS => ChunkLen::Short,
            _ => ChunkLen::Long,
        }
    }
}

/// How kernels find the block tables of layers with windows in a step. They follow the other block tables, so their
/// address would differ among steps of the same size, but not the addresses that kernels get: those of all block
/// tables, and for each row the start of its sequence's table counted from there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowTables {
    pub(crate) block_tables: u64,
    pub(crate) first_blocks: u64,
}

/// The slices of the current step and the addresses of their copies on the device.
#[derive(Debug, Default)]
pub(crate) struct Current {
    /// (address of the slice, its length, address of its copy)
    tables: Vec<(usize, usize, u64)>,
    /// The spans that the row tables were made from: address, length, and the address of the row tables.
    spans: Option<(usize, usize, u64)>,
    /// The block tables of layers with windows: address of the slice, its length, and where kernels find its copy.
    windows: Option<(usize, usize, WindowTables)>,
    /// The states of the step's sequences: address of the slice, its length, address of their tables.
    states: Option<(usize, usize, u64)>,
    /// The tokens of the step's rows: address of the slice, its length, address of its copy.
    ids: Option<(usize, usize, u64)>,
    /// The digest queries of the step's logits: address of the slice, its length, address of its copy.
    queries: Option<(usize, usize, u64)>,
    pub(crate) is_recording: bool,
}

impl Current {
    /// Whether a step is running.
    pub(crate) fn is_step(&self) -> bool {
        !self.tables.is_empty()
    }

    /// The copy of one of the step's own slices.
    pub(crate) fn find(&self, slice: &[u32]) -> Option<u64> {
        let wanted = (slice.as_ptr().addr(), slice.len());
        self.tables.iter().find(|table| (table.0, table.1) == wanted).map(|table| table.2)
    }

    pub(crate) fn find_spans(&self, spans: &[SequenceSpan]) -> Option<u64> {
        found(self.spans, spans)
    }

    /// Addresses by which kernels find block tables, if these are the step's own of layers with windows.
    pub(crate) fn find_windows(&self, block_tables: &[u32]) -> Option<WindowTables> {
        let (address, len, tables) = self.windows?;
        ((address, len) == (block_tables.as_ptr().addr(), block_tables.len())).then_some(tables)
    }

    pub(crate) fn find_states(&self, states: &[StateSpan]) -> Option<u64> {
        found(self.states, states)
    }

    pub(crate) fn find_ids(&self, ids: &[TokenSource]) -> Option<u64> {
        found(self.ids, ids)
    }

    pub(crate) fn find_queries(&self, queries: &[RowQuery]) -> Option<u64> {
        found(self.queries, queries)
    }
}

/// The address of the copy of a slice, if `known` has its address and length.
fn found<T>(known: Option<(usize, usize, u64)>, slice: &[T]) -> Option<u64> {
    known.filter(|known| (known.0, known.1) == (slice.as_ptr().addr(), slice.len())).map(|known| known.2)
}

/// The properties of a step that must be equal for a recording to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    chunk_len: ChunkLen,
    num_rows: usize,
    num_wanted: usize,
    /// Number of wanted rows, or 0.
    num_queries: usize,
    /// Number of sequences of a model with states, or 0.
    num_states: usize,
    /// Tiles of the longest context, rounded up to a power of two: launches depend on it.
    tiles: usize,
    kv_address: usize,
}

#[derive(Debug)]
enum Recording {
    /// The step ran once, so that every buffer it needs has its size.
    Seen,
    Ready(Graph),
    /// An operation of the step needs the host, so that the step cannot be recorded.
    Impossible,
}

#[derive(Debug)]
struct Recordings {
    by_key: HashMap<Key, Entry>,
    /// Recordings hold addresses: they are invalid once memory was allocated or freed.
    generation: u64,
    num_steps: u64,
}

#[derive(Debug)]
struct Entry {
    recording: Recording,
    /// Number of the step that used the recording last.
    last_used: u64,
}

impl Recordings {
    fn new(generation: u64) -> Recordings {
        Recordings { by_key: HashMap::new(), generation, num_steps: 0 }
    }

    /// Returns the recording of a step that runs next, if there is one.
    fn find(&mut self, key: &Key) -> Option<&Recording> {
        self.num_steps += 1;
        let entry = self.by_key.get_mut(key)?;
        entry.last_used = self.num_steps;
        Some(&entry.recording)
    }

    fn keep(&mut self, key: Key, recording: Recording) {
        if self.by_key.len() >= MAX_RECORDINGS && !self.by_key.contains_key(&key) {
            let oldest = self.by_key.iter().min_by_key(|(_, entry)| entry.last_used).map(|(&key, _)| key);
            oldest.and_then(|key| self.by_key.remove(&key));
        }
        self.by_key.insert(key, Entry { recording, last_used: self.num_steps });
    }
}

/// A recorded step.
#[derive(Debug)]
struct Graph {
    device: Arc<Device>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver lets any thread launch or destroy a graph, one at a time; the owner is one model.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: this value owns the executable. The driver waits for a launch that is running.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}

/// Maximum tokens of a run: `RUN` of attention_scores.cu.
pub(crate) const RUN: usize = 8;

/// Four tables, one after the other. For each row: the start of its sequence's block table, the first row of its
/// sequence, and the end of its rows. Then the first row of every run of tokens of a sequence.
pub(crate) fn row_tables(sequences: &[SequenceSpan], num_rows: usize) -> Vec<u32> {
    let mut tables = vec![u32::MAX; 3 * num_rows];
    for sequence in sequences {
        let numbers = [sequence.blocks.start, sequence.rows.start, sequence.rows.end];
        for (table, number) in tables.chunks_exact_mut(num_rows).zip(numbers) {
            table[sequence.rows.clone()].fill(number as u32);
        }
    }
    assert!(tables.iter().all(|&number| number != u32::MAX), "every row belongs to a sequence");
    tables.extend(sequences.iter().flat_map(|sequence| sequence.rows.clone().step_by(RUN)).map(|row| row as u32));
    tables.resize(4 * num_rows, u32::MAX);
    tables
}

/// For each row, the start of its sequence's window table, behind all other block tables; nothing without windows.
fn window_starts(index: &StepIndex<'_>) -> Vec<u32> {
    if index.window_tables.is_empty() {
        return Vec::new();
    }
    let mut starts = vec![0; index.ids.len()];
    for sequence in index.sequences {
        starts[sequence.rows.clone()].fill((index.block_tables.len() + sequence.blocks.start) as u32);
    }
    starts
}

impl Gpu {
    /// Copies the tables of a step to the device, all at once: their offsets depend on the numbers of rows, wanted
    /// rows, queries and states; the block tables and saves come last.
    fn begin_step(&mut self, index: &StepIndex<'_>) -> Result<(), Error> {
        // By the first step all weights are on the device.
        self.staging.clear();
        if let Some(id) = index.ids.iter().find(|&&id| !self.assumed.has(id, index.kv_address)) {
            let why = format!("{id:?} is not a token that the device has: launch the step that makes it right before");
            return Err(self.device.refuse("taking an assumed token", why));
        }
        let ids: Vec<u32> = index.ids.iter().map(|&id| elementwise::token_code(id)).collect();
        let row_tables = row_tables(index.sequences, index.ids.len());
        let queries: Vec<u32> = index.queries.iter().flat_map(|query| Query::from(query).words()).collect();
        // The saves lie after the block tables, because steps of the same size differ in their number.
        let saves_at = index.states.len() * SPAN_WORDS + index.block_tables.len() + index.window_tables.len();
        let spans = span_words(index.sequences, index.states, saves_at);
        let saves = if index.states.is_empty() { Vec::new() } else { save_words(index.saves) };
        let window_starts = window_starts(index);
        let parts = [
            &ids,
            index.positions,
            index.slots,
            index.wanted,
            &row_tables,
            index.window_slots,
            &window_starts,
            index.previous_slots,
            &queries,
            &spans,
            index.block_tables,
            index.window_tables,
            &saves,
        ];
        let mut offsets = [0; 13];
        let mut len = 0;
        for (part, offset) in parts.iter().zip(&mut offsets) {
            *offset = len;
            len += part.len();
        }
        // A power of two, so that the tables seldom move: recordings end when they do.
        let base = self.scratch(Purpose::Index, (len * 4).next_power_of_two())?;
        let piece = self.step_tables.next(&self.device, len)?;
        let mut rest = piece.values_mut()?;
        for part in parts {
            let (to, after) = rest.split_at_mut(part.len());
            to.copy_from_slice(part);
            rest = after;
        }
        piece.upload(len, base)?;
        let at = |i: usize| base + 4 * offsets[i] as u64;
        let slices = [
            (index.positions, 1),
            (index.slots, 2),
            (index.wanted, 3),
            (index.window_slots, 5),
            (index.previous_slots, 7),
            (index.block_tables, 10),
            (index.window_tables, 11),
        ];
        let windows = WindowTables { block_tables: at(10), first_blocks: at(6) };
        self.current = Current {
            tables: slices.iter().map(|&(slice, i)| (slice.as_ptr().addr(), slice.len(), at(i))).collect(),
            ids: Some((index.ids.as_ptr().addr(), index.ids.len(), at(0))),
            spans: Some((index.sequences.as_ptr().addr(), index.sequences.len(), at(4))),
            windows: Some((index.window_tables.as_ptr().addr(), index.window_tables.len(), windows)),
            queries: Some((index.queries.as_ptr().addr(), index.queries.len(), at(8))),
            states: Some((index.states.as_ptr().addr(), index.states.len(), at(9))),
            is_recording: false,
        };
        Ok(())
    }
}

impl CudaBackend {
    pub(crate) fn run_step(
        &self,
        index: &StepIndex<'_>,
        memo: &mut StepMemo,
        run: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.gpu().begin_step(index)?;
        let result = self.replay_or_run(index, memo, &mut || {
            self.gpu().row_maxima.are_clear = false;
            self.device.begin_run();
            run()
        });
        let mut gpu = self.gpu();
        gpu.current = Current::default();
        if result.is_ok() && !index.queries.is_empty() {
            gpu.assumed.made(index.kv_address, index.queries.len());
        }
        result
    }

    fn replay_or_run(
        &self,
        index: &StepIndex<'_>,
        memo: &mut StepMemo,
        run: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let chunk_len = ChunkLen::of(index.sequences);
        if chunk_len == ChunkLen::Long || index.ids.len() > MAX_RECORDED_ROWS || index.ids.is_empty() {
            return run();
        }
        let longest = index.positions.iter().max().map_or(0, |&position| position as usize + 1);
        let key = Key {
            chunk_len,
            num_rows: index.ids.len(),
            num_wanted: index.wanted.len(),
            num_queries: index.queries.len(),
            num_states: index.states.len(),
            tiles: longest.div_ceil(FLASH_TILE).next_power_of_two(),
            kv_address: index.kv_address,
        };
        let recordings = self.recordings(memo);
        match recordings.find(&key) {
            Some(Recording::Ready(graph)) => return graph.launch(),
            Some(Recording::Impossible) => return run(),
            Some(Recording::Seen) => {}
            None => {
                run()?;
                recordings.keep(key, Recording::Seen);
                return Ok(());
            }
        }
        match self.record(run)? {
            Some(graph) => {
                graph.launch()?;
                recordings.keep(key, Recording::Ready(graph));
                Ok(())
            }
            None => {
                recordings.keep(key, Recording::Impossible);
                run()
            }
        }
    }

    /// The model's recordings, cleared if memory was allocated or freed since.
    fn recordings<'m>(&self, memo: &'m mut StepMemo) -> &'m mut Recordings {
        let generation = self.device.generation();
        if !memo.0.as_ref().is_some_and(|memo| memo.is::<Recordings>()) {
            memo.0 = Some(Box::new(Recordings::new(generation)));
        }
        let recordings: &mut Recordings = memo.0.as_mut().and_then(|memo| memo.downcast_mut()).expect("inserted above");
        if recordings.generation != generation {
            *recordings = Recordings::new(generation);
        }
        recordings
    }

    /// Records what `run` launches instead of running it. `None` when something in it cannot be recorded.
    fn record(&self, run: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Graph>, Error> {
        let device = &self.device;
        let failed = |error| device.error("recording a step", error);
        let generation = device.generation();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the device, and recording ends below in every case.
        unsafe { result::stream::begin_capture(device.stream(), mode) }.map_err(failed)?;
        self.gpu().current.is_recording = true;
        let outcome = run();
        self.gpu().current.is_recording = false;
        // SAFETY: this stream is being recorded.
        let graph = unsafe { result::stream::end_capture(device.stream()) };
        let Some(graph) = graph.ok().filter(|graph| !graph.is_null()) else { return Ok(None) };
        let serves = outcome.is_ok() && generation == device.generation();
        let mut executable = std::ptr::null_mut();
        // SAFETY: `graph` is the recording that has just ended; it is destroyed here, and the executable is owned by
        // the result.
        let status = unsafe {
            let status = serves.then(|| sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result());
            let _ = result::graph::destroy(graph);
            status
        };
        match status {
            Some(Ok(())) => Ok(Some(Graph { device: device.clone(), executable })),
            // The step can run without a recording, for instance if memory is short.
            Some(Err(error)) if loses_context(error.0) => Err(failed(error)),
            Some(Err(_)) | None => Ok(None),
        }
    }
}

impl Graph {
    fn launch(&self) -> Result<(), Error> {
        self.device.bind()?;
        // SAFETY: executable and stream live as long as this value, and its addresses are those of live buffers:
        // recordings are dropped when memory is allocated or freed.
        unsafe { result::graph::launch(self.executable, self.device.stream()) }
            .map_err(|error| self.device.error("replaying a step", error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_chunks() {
        let of = |lens: &[usize]| {
            let mut start = 0;
            let spans: Vec<SequenceSpan> = (lens.iter())
                .map(|len| {
                    start += len;
                    SequenceSpan { rows: start - len..start, blocks: 0..1 }
                })
                .collect();
            ChunkLen::of(&spans)
        };
        assert_eq!(of(&[1; 400]), ChunkLen::One);
        assert_eq!(of(&[1, 5, 16]), ChunkLen::Short);
        assert_eq!(of(&[16; 16]), ChunkLen::Short);
        assert_eq!(of(&[16; 17]), ChunkLen::Long);
        assert_eq!(of(&[1, 17]), ChunkLen::Long);
    }

    #[test]
    fn the_least_recently_used_recording_is_dropped() {
        let key = |num_rows| Key {
            chunk_len: ChunkLen::One,
            num_rows,
            num_wanted: num_rows,
            num_queries: 0,
            num_states: 0,
            tiles: 1,
            kv_address: 0,
        };
        let mut recordings = Recordings::new(0);
        for num_rows in 0..MAX_RECORDINGS {
            assert!(recordings.find(&key(num_rows)).is_none());
            recordings.keep(key(num_rows), Recording::Seen);
        }
        assert!(recordings.find(&key(0)).is_some());
        recordings.keep(key(0), Recording::Impossible);
        recordings.keep(key(MAX_RECORDINGS), Recording::Seen);
        assert_eq!(recordings.by_key.len(), MAX_RECORDINGS);
        assert!(recordings.find(&key(1)).is_none());
        assert!((2..=MAX_RECORDINGS).chain([0]).all(|num_rows| recordings.find(&key(num_rows)).is_some()));
    }
}
