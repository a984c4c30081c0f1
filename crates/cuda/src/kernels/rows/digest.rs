//! Launches of `digest.cu`.

use pellucid_tensor::{Error, RowDigest, RowQuery, Shortlist};

use crate::driver::{Device, Grid};
use crate::pinned::Plain;

pub(crate) const KERNELS: &[&str] = &["digest_maxima", "digest_weights", "digest_select"];

/// `NUM_TOP`, `MAX_FINALISTS` and `NO_TOKEN` of digest.cu, and `BLOCK` and `LANES`.
pub(crate) const NUM_TOP: usize = 256;
const MAX_FINALISTS: usize = 16;
const NO_TOKEN: u32 = u32::MAX;
const BLOCK: usize = 64;
const LANES: usize = 16;
/// Maximum parts and blocks of a row: a thread of `largest_but` holds 32 maxima of parts.
const MAX_PARTS: usize = 8192;
/// Shared memory of `digest_select`: a value for each block, or MAX_GATHERED keys of 64 bits.
const SELECT_BYTES: usize = MAX_PARTS * 4;

/// Maximum logits of a row that can have a digest.
pub(crate) const MAX_COLS: usize = MAX_PARTS * BLOCK;

/// `DigestQuery` of digest.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Query {
    inverse: f32,
    races: u32,
    seed: [u32; 2],
    position: u32,
    k: u32,
    p: f32,
    min_p: f32,
}

impl Query {
    pub(crate) const WORDS: usize = size_of::<Query>() / 4;

    /// The words of the query in memory.
    pub(crate) fn words(&self) -> [u32; Self::WORDS] {
        let Query { inverse, races, seed, position, k, p, min_p } = *self;
        [inverse.to_bits(), races, seed[0], seed[1], position, k, p.to_bits(), min_p.to_bits()]
    }
}

impl From<&RowQuery> for Query {
    fn from(query: &RowQuery) -> Query {
        let unknown = Shortlist { draw: query.race.unwrap_or_default(), k: 0, p: 1.0, min_p: 0.0 };
        let Shortlist { draw: (seed, position), k, p, min_p } = query.shortlist.unwrap_or(unknown);
        Query {
            // Rounded as the sampler rounds it.
            inverse: (1.0 / query.temperature) as f32,
            races: u32::from(query.race.is_some()),
            seed: [seed as u32, (seed >> 32) as u32],
            position,
            k,
            p,
            min_p,
        }
    }
}

/// `RowSummary` of digest.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RowSummary {
    totals: [f64; 2],
    is_plain: u32,
    has_all: u32,
    num_top: u32,
    num_finalists: u32,
    assumed: u32,
    unused: u32,
    top_ids: [u32; NUM_TOP],
    top_logits: [f32; NUM_TOP],
    finalist_ids: [u32; MAX_FINALISTS],
    finalist_logits: [f32; MAX_FINALISTS],
}

// SAFETY: numbers and arrays of numbers, without padding.
unsafe impl Plain for RowSummary {}

impl RowSummary {
    /// Copies into a digest whose memory is reused from step to step.
    pub(crate) fn write(&self, digest: &mut RowDigest) {
        let pairs = |ids: &[u32], logits: &[f32], len: u32, out: &mut Vec<(u32, f32)>| {
            out.clear();
            out.extend(ids.iter().copied().zip(logits.iter().copied()).take(len as usize));
        };
        digest.is_plain = self.is_plain != 0;
        digest.has_all = self.has_all != 0;
        digest.totals = self.totals;
        digest.assumed = Some(self.assumed).filter(|&token| token != NO_TOKEN);
        pairs(&self.top_ids, &self.top_logits, self.num_top, &mut digest.top);
        pairs(&self.finalist_ids, &self.finalist_logits, self.num_finalists, &mut digest.finalists);
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct DigestRows {
    pub(crate) logits: u64,
    pub(crate) queries: u64,
    pub(crate) maxima: u64,
    pub(crate) sums: u64,
    pub(crate) times: u64,
    pub(crate) out: u64,
    pub(crate) assumed: u64,
    pub(crate) vocab_size: u32,
    pub(crate) num_blocks: u32,
    pub(crate) part_len: u32,
    pub(crate) num_parts: u32,
}

/// The parts and blocks of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) num_blocks: usize,
    /// Logits of a part: short rows have short parts, so that there are more parts than tokens on top.
    pub(crate) len: usize,
    pub(crate) num_parts: usize,
}

impl Parts {
    pub(crate) fn of(cols: usize) -> Parts {
        let num_blocks = cols.div_ceil(BLOCK);
        let len = if num_blocks < 2 * NUM_TOP { LANES } else { BLOCK };
        Parts { num_blocks, len, num_parts: cols.div_ceil(len) }
    }
}

pub(crate) fn digest(device: &Device, num_rows: usize, rows: &DigestRows) -> Result<(), Error> {
    const THREADS: u32 = 256;
    // With few rows a block of threads has one round, so that all multiprocessors take part.
    let rounds = if num_rows < 8 { 1 } else { 4 };
    let pieces = rows.num_blocks.div_ceil(rounds * THREADS / LANES as u32);
    let wide = Grid { blocks: [pieces, num_rows as u32, 1], threads: THREADS, shared_bytes: 0 };
    device.launch("digest_maxima", wide, rows)?;
    device.launch("digest_weights", wide, rows)?;
    let select = Grid { blocks: [num_rows as u32, 3, 1], threads: 1024, shared_bytes: SELECT_BYTES as u32 };
    device.launch("digest_select", select, rows)
}
