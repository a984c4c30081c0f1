//! Digests of rows of logits: the work areas of the kernels, and the copies of the digests to the host.

use pellucid_tensor::{DigestTicket, Error, RowDigest, RowQuery, Tensor};

use crate::gpu::{Gpu, Purpose};
use crate::kernels::rows::digest::{self, DigestRows, Parts, Query, RowSummary};
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
        assumed: assumed_tokens(gpu, num_rows)?,
        vocab_size: cols as u32,
        num_blocks: parts.num_blocks as u32,
        part_len: parts.len as u32,
        num_parts: parts.num_parts as u32,
    };
    digest::digest(&gpu.device, num_rows, &rows)
}

/// Address of the token that the device assumes for each row. Large enough for every step that is recorded, so that
/// none of them moves it.
pub(crate) fn assumed_tokens(gpu: &mut Gpu, num_rows: usize) -> Result<u64, Error> {
    gpu.scratch(Purpose::AssumedTokens, num_rows.max(MAX_RECORDED_ROWS) * 4)
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

/// Digests that are being copied to the host: those of one step can be read while the next ones arrive.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    pieces: [Option<Piece<RowSummary>>; 2],
    num_fetched: u64,
}

impl Arrivals {
    fn piece(&mut self, ticket: DigestTicket) -> &mut Option<Piece<RowSummary>> {
        &mut self.pieces[(ticket.0 % 2) as usize]
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
    assert!(arrivals.num_fetched - ticket.0 <= 2, "at most two fetches later");
    let piece = arrivals.piece(ticket).as_mut().expect("it was fetched");
    for (summary, digest) in piece.values_mut()?.iter().zip(out) {
        summary.write(digest);
    }
    Ok(())
}
