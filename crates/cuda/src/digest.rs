//! Rows of logits in brief: the kernels' work areas, and their answers as the host wants them.

use pellucid_tensor::{Error, RowDigest, RowQuery, Tensor};

use crate::backend::{CudaBackend, Purpose, lock};
use crate::kernels::digest::{self, DigestRows, Parts, Query, RowBrief};
use crate::memory::floats;

/// What passes between host and device, kept for its memory.
#[derive(Debug, Default)]
pub(crate) struct DigestBuffers {
    queries: Vec<Query>,
    briefs: Vec<RowBrief>,
}

pub(crate) fn digest(
    backend: &CudaBackend,
    logits: &Tensor,
    queries: &[RowQuery],
    out: &mut [RowDigest],
) -> Result<(), Error> {
    let (num_rows, cols) = (logits.rows(), logits.cols());
    assert_eq!((queries.len(), out.len()), (num_rows, num_rows));
    assert!(cols <= digest::MAX_COLS, "the backend said that it digests such rows");
    let mut buffers = lock(&backend.digest_buffers);
    let DigestBuffers { queries: sent, briefs } = &mut *buffers;
    sent.clear();
    sent.extend(queries.iter().map(Query::from));
    let parts = Parts::of(cols);
    let rows = DigestRows {
        logits: floats(logits),
        queries: backend.scratch(Purpose::DigestQueries, num_rows * size_of::<Query>())?,
        maxima: backend.scratch(Purpose::DigestMaxima, num_rows * parts.num_parts * 4)?,
        sums: backend.scratch(Purpose::DigestSums, num_rows * parts.num_blocks * 8)?,
        times: backend.scratch(Purpose::DigestTimes, num_rows * parts.num_blocks * 4)?,
        out: backend.scratch(Purpose::DigestRows, num_rows * size_of::<RowBrief>())?,
        vocab_size: cols as u32,
        num_blocks: parts.num_blocks as u32,
        part_len: parts.len as u32,
        num_parts: parts.num_parts as u32,
    };
    backend.device.upload(sent, rows.queries)?;
    digest::digest(&backend.device, num_rows, &rows)?;
    briefs.resize(briefs.len().max(num_rows), RowBrief::EMPTY);
    backend.device.download(rows.out, &mut briefs[..num_rows])?;
    for (brief, digest) in briefs.iter().zip(out) {
        brief.write(digest);
    }
    Ok(())
}
