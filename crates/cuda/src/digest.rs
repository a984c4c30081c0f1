//! Rows of logits in brief: the kernels' work areas, and their answers as the host wants them.

use pellucid_tensor::{Error, RowDigest, RowQuery, Tensor};

use crate::backend::{CudaBackend, Purpose, lock};
use crate::kernels::digest::{self, DigestRows, Parts, Query, RowBrief};
use crate::memory::floats;
use crate::pinned::Pinned;

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
        vocab_size: cols as u32,
        num_blocks: parts.num_blocks as u32,
        part_len: parts.len as u32,
        num_parts: parts.num_parts as u32,
    };
    digest::digest(&backend.device, num_rows, &rows)
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

/// Waits for the digests of the last rows, and copies them into memory that is used again from step to step.
pub(crate) fn read(backend: &CudaBackend, out: &mut [RowDigest]) -> Result<(), Error> {
    let from = backend.scratch(Purpose::DigestRows, out.len() * size_of::<RowBrief>())?;
    let mut briefs = lock(&backend.briefs);
    drop(briefs.take_if(|briefs| briefs.len() < out.len()));
    let briefs = match &mut *briefs {
        Some(briefs) => briefs,
        none => none.insert(Pinned::new(&backend.device, out.len().next_power_of_two())?),
    };
    let found = &mut briefs.values_mut()[..out.len()];
    backend.device.download(from, found)?;
    for (brief, digest) in found.iter().zip(out) {
        brief.write(digest);
    }
    Ok(())
}
