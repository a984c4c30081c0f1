//! Rows of logits in brief: the kernels' work areas, and their answers as the host wants them.

use pellucid_tensor::{DigestTicket, Error, RowDigest, RowQuery, Tensor};

use crate::backend::{CudaBackend, Purpose, lock};
use crate::kernels::digest::{self, DigestRows, Parts, Query, RowBrief};
use crate::memory::floats;
use crate::pinned::Piece;
use crate::step::MAX_RECORDED_ROWS;

/// Launches the kernels; as the last part of a step it is recorded with it.
pub(crate) fn digest(backend: &CudaBackend, logits: &Tensor, queries: &[RowQuery]) -> Result<(), Error> {
    let (num_rows, cols) = (logits.rows(), logits.cols());
    assert_eq!(queries.len(), num_rows);
    assert!(cols <= digest::MAX_COLS, "the backend said that it digests such rows");
    let parts = Parts::of(cols);
    let rows = DigestRows {
        logits: floats(logits),
        queries: queries_on_device(backend, queries)?,
        maxima: backend.scratch(Purpose::DigestMaxima, num_rows * parts.num_parts * 4)?,
        sums: backend.scratch(Purpose::DigestSums, num_rows * parts.num_blocks * 8)?,
        times: backend.scratch(Purpose::DigestTimes, num_rows * parts.num_blocks * 4)?,
        out: backend.scratch(Purpose::DigestRows, num_rows * size_of::<RowBrief>())?,
        chosen: chosen(backend, num_rows)?,
        vocab_size: cols as u32,
        num_blocks: parts.num_blocks as u32,
        part_len: parts.len as u32,
        num_parts: parts.num_parts as u32,
    };
    digest::digest(&backend.device, num_rows, &rows)
}

/// Where the tokens stand that rows are taken to have led to. Room for every step that is recorded, so that it moves with none of them.
pub(crate) fn chosen(backend: &CudaBackend, num_rows: usize) -> Result<u64, Error> {
    backend.scratch(Purpose::Chosen, num_rows.max(MAX_RECORDED_ROWS) * 4)
}

/// The step's own, or a copy made now.
fn queries_on_device(backend: &CudaBackend, queries: &[RowQuery]) -> Result<u64, Error> {
    let current = lock(&backend.current);
    if let Some(address) = current.find_queries(queries) {
        return Ok(address);
    }
    backend.refuse_while_recording(&current)?;
    let words: Vec<u32> = queries.iter().flat_map(|query| Query::from(query).words()).collect();
    let address = backend.scratch(Purpose::DigestQueries, words.len() * 4)?;
    backend.device.upload(&words, address)?;
    Ok(address)
}

/// Digests on their way to the host: those of one step may still be looked at while the next ones come.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    pieces: [Option<Piece<RowBrief>>; 2],
    num_fetched: u64,
}

impl Arrivals {
    fn piece(&mut self, ticket: DigestTicket) -> &mut Option<Piece<RowBrief>> {
        &mut self.pieces[(ticket.0 % 2) as usize]
    }
}

/// Begins to copy the digests that were made last.
pub(crate) fn fetch(backend: &CudaBackend, num_rows: usize) -> Result<DigestTicket, Error> {
    let from = backend.scratch(Purpose::DigestRows, num_rows * size_of::<RowBrief>())?;
    let mut arrivals = lock(&backend.arrivals);
    let ticket = DigestTicket(arrivals.num_fetched);
    arrivals.num_fetched += 1;
    Piece::of_len(arrivals.piece(ticket), &backend.device, num_rows)?.download(num_rows, from)?;
    Ok(ticket)
}

/// Waits for digests, and copies them into memory that is used again from step to step.
pub(crate) fn read(backend: &CudaBackend, ticket: DigestTicket, out: &mut [RowDigest]) -> Result<(), Error> {
    let mut arrivals = lock(&backend.arrivals);
    assert!(arrivals.num_fetched - ticket.0 <= 2, "others took the place of these digests");
    let piece = arrivals.piece(ticket).as_mut().expect("it was fetched");
    for (brief, digest) in piece.values_mut()?.iter().zip(out) {
        brief.write(digest);
    }
    Ok(())
}
