//! Times of steps on machines of different kinds, for tests.

use super::Work;

/// A CPU: weights in 4 ms, rows of 0.6 ms, tiles of 16 rows, long contexts expensive.
pub(crate) fn cpu(work: Work) -> f64 {
    let tiles = if work.num_rows > 1 { work.num_rows.div_ceil(16) as f64 * 16.0 } else { 1.0 };
    4e-3 + 6e-4 * tiles.min(work.num_rows as f64 * 3.0)
        + 1.1e-6 * work.num_read as f64
        + 2.3e-7 * work.num_compared as f64
}

/// A GPU: the first 128 rows are free.
pub(crate) fn gpu(work: Work) -> f64 {
    8e-3 + 4e-5 * work.num_rows.saturating_sub(128) as f64 + 1e-8 * work.num_compared as f64
}
