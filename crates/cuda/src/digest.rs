//! Digests of rows of logits: the work areas of the kernels, and the copies of the digests to the host.

use pellucid_tensor::{DigestTicket, Error, RowDigest, RowQuery, Tensor, TokenSource};

use crate::gpu::{Gpu, Purpose};
use crate::kernels::rows::digest::{self, DigestRows, Parts, Query, RowSummary};
use crate::kernels::rows::elementwise::{NUM_KEPT, TOKEN_SLOTS};
use crate::memory::floats;
use crate::pinned::Piece;
use crate::step::MAX_RECORDED_ROWS;

/// Launches the kernels. As the last operation of a step they are recorded with it.
pub(crate) fn digest(gpu: &mut Gpu, logits: &Tensor, queries: &[RowQuery]) -> Result<(), Error> {
    let (num_rows, cols) = (logits.rows(), logits.cols());
    assert_eq!(queries.len(), num_rows);
    assert!(cols <= digest::MAX_COLS, "`digest_len` says that such rows have digests");
    let parts = Parts::of(cols);
    let rows = DigestRows {
        logits: floats(logits),
        queries: queries_on_device(gpu, queries)?,
        maxima: gpu.scratch(Purpose::DigestMaxima, num_rows * parts.num_parts * 4)?,
        sums: gpu.scratch(Purpose::DigestSums, num_rows * parts.num_blocks * 8)?,
        times: gpu.scratch(Purpose::DigestTimes, num_rows * parts.num_blocks * 4)?,
        out: gpu.scratch(Purpose::DigestRows, num_rows * size_of::<RowSummary>())?,
        assumed: assumed_tokens(gpu, num_rows)? + 4 * NUM_KEPT as u64,
        vocab_size: cols as u32,
        num_blocks: parts.num_blocks as u32,
        part_len: parts.len as u32,
        num_parts: parts.num_parts as u32,
    };
    digest::digest(&gpu.device, num_rows, &rows)
}

/// Address of the tokens that the device assumes: those in slots, then one for each row of the digests that were made
/// last. Large enough for every step that is recorded, so that none of them moves it.
pub(crate) fn assumed_tokens(gpu: &mut Gpu, num_rows: usize) -> Result<u64, Error> {
    let address = gpu.scratch(Purpose::AssumedTokens, (NUM_KEPT + num_rows.max(MAX_RECORDED_ROWS)) * 4)?;
    if gpu.assumed.address != address {
        gpu.assumed = AssumedTokens { address, ..AssumedTokens::default() };
    }
    Ok(address)
}

/// The tokens that the device assumed and that steps can take.
#[derive(Debug, Default)]
pub(crate) struct AssumedTokens {
    address: u64,
    /// The digests that were made last: the address of the KV memory of their step, and their number.
    last: (usize, usize),
    /// Number of tokens in each slot.
    kept: [usize; TOKEN_SLOTS.num_slots],
    /// Host memory into which slots are copied, and the number of slots that were copied last.
    on_host: Option<Piece<u32>>,
    num_fetched: usize,
}

impl AssumedTokens {
    /// Notes that a step made digests.
    pub(crate) fn made(&mut self, kv_address: usize, num_rows: usize) {
        self.last = (kv_address, num_rows);
    }

    /// Whether a step with this KV memory can take the token of a row.
    pub(crate) fn has(&self, id: TokenSource, kv_address: usize) -> bool {
        match id {
            TokenSource::Token(_) => true,
            TokenSource::Assumed { row } => self.last.0 == kv_address && (row as usize) < self.last.1,
            TokenSource::Kept { slot, row } => self.kept.get(slot as usize).is_some_and(|&len| (row as usize) < len),
        }
    }
}

/// Keeps the tokens of the digests that were made last in a slot.
pub(crate) fn keep_assumed(gpu: &mut Gpu, num_rows: usize, slot: usize) -> Result<(), Error> {
    assert!(slot < TOKEN_SLOTS.num_slots && num_rows <= TOKEN_SLOTS.num_rows, "a slot for the tokens");
    assert!(num_rows <= gpu.assumed.last.1, "the digests that were made last");
    let address = assumed_tokens(gpu, 0)?;
    let to = address + 4 * (slot * TOKEN_SLOTS.num_rows) as u64;
    gpu.device.copy(address + 4 * NUM_KEPT as u64, to, 4 * num_rows)?;
    gpu.assumed.kept[slot] = num_rows;
    Ok(())
}

/// Replaces the tokens in a slot.
pub(crate) fn replace_kept(gpu: &mut Gpu, slot: usize, tokens: &[u32]) -> Result<(), Error> {
    assert!(slot < TOKEN_SLOTS.num_slots && tokens.len() <= gpu.assumed.kept[slot], "tokens that are kept");
    let to = assumed_tokens(gpu, 0)? + 4 * (slot * TOKEN_SLOTS.num_rows) as u64;
    let piece = gpu.step_tables.next(&gpu.device, tokens.len())?;
    piece.values_mut()?[..tokens.len()].copy_from_slice(tokens);
    piece.upload(tokens.len(), to)
}

/// Starts to copy the first slots to the host.
pub(crate) fn fetch_kept(gpu: &mut Gpu, num_slots: usize) -> Result<(), Error> {
    assert!(num_slots <= TOKEN_SLOTS.num_slots);
    let from = assumed_tokens(gpu, 0)?;
    let len = num_slots * TOKEN_SLOTS.num_rows;
    gpu.assumed.num_fetched = num_slots;
    Piece::of_len(&mut gpu.assumed.on_host, &gpu.device, NUM_KEPT)?.download(len, from)
}

/// Waits for the slots that were fetched last.
pub(crate) fn read_kept(gpu: &mut Gpu, out: &mut Vec<u32>) -> Result<(), Error> {
    let len = gpu.assumed.num_fetched * TOKEN_SLOTS.num_rows;
    let piece = gpu.assumed.on_host.as_mut().expect("they were fetched");
    out.extend_from_slice(&piece.values_mut()?[..len]);
    Ok(())
}

/// The device's copy of the queries: the step's own, or one made now.
fn queries_on_device(gpu: &mut Gpu, queries: &[RowQuery]) -> Result<u64, Error> {
    if let Some(address) = gpu.current.find_queries(queries) {
        return Ok(address);
    }
    gpu.refuse_while_recording()?;
    let words: Vec<u32> = queries.iter().flat_map(|query| Query::from(query).words()).collect();
    let address = gpu.scratch(Purpose::DigestQueries, words.len() * 4)?;
    gpu.device.upload(&words, address)?;
    Ok(address)
}

/// Fetches of digests that can be in progress: of two models, each with a look-ahead step.
const NUM_ARRIVALS: usize = 4;

/// Digests that are being copied to the host: those of one step can be read while the next ones arrive.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    pieces: [Option<Piece<RowSummary>>; NUM_ARRIVALS],
    num_fetched: u64,
}

impl Arrivals {
    fn piece(&mut self, ticket: DigestTicket) -> &mut Option<Piece<RowSummary>> {
        &mut self.pieces[ticket.0 as usize % NUM_ARRIVALS]
    }
}

/// Starts to copy the digests that were made last.
pub(crate) fn fetch(gpu: &mut Gpu, num_rows: usize) -> Result<DigestTicket, Error> {
    let from = gpu.scratch(Purpose::DigestRows, num_rows * size_of::<RowSummary>())?;
    let arrivals = &mut gpu.arrivals;
    let ticket = DigestTicket(arrivals.num_fetched);
    arrivals.num_fetched += 1;
    Piece::of_len(arrivals.piece(ticket), &gpu.device, num_rows)?.download(num_rows, from)?;
    Ok(ticket)
}

/// Waits for digests, and copies them into `out`, whose memory is reused from step to step.
pub(crate) fn read(gpu: &mut Gpu, ticket: DigestTicket, out: &mut [RowDigest]) -> Result<(), Error> {
    let arrivals = &mut gpu.arrivals;
    assert!(arrivals.num_fetched - ticket.0 <= NUM_ARRIVALS as u64, "at most four fetches later");
    let piece = arrivals.piece(ticket).as_mut().expect("it was fetched");
    for (summary, digest) in piece.values_mut()?.iter().zip(out) {
        summary.write(digest);
    }
    Ok(())
}
