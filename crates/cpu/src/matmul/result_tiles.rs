//! Results of the kernels for AVX-512 and AMX on their way to the output: tiles of sixteen rows by sixteen columns. The
//! two results of a gated pair are combined here, and rows are written one after the other.

use std::arch::x86_64::{_mm_sfence, _mm512_loadu_ps, _mm512_stream_ps};
use std::cell::RefCell;
use std::ops::Range;

use super::{Product, ProductPart};
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};
use crate::memory::Buffer;

/// Results of a block of rows and a panel.
pub(super) type Tile<T> = [[T; PANEL_COLUMNS]; BLOCK_ROWS];

/// Maximum tiles that a thread computes before it writes them: 512 KB. The rows of x that they need take another 512 KB
/// of a second-level cache of 2 MB.
const MAX_TILES: usize = 512;
/// Maximum blocks of rows among them, which leaves sixteen panels: with more panels, rows are read from the third-level
/// cache less often.
const MAX_BLOCKS: usize = 32;

/// Outputs from this number of bytes on are written past the caches, which would not hold them until they are read. An
/// ordinary store would first read each line from memory, only to overwrite it.
const STREAMED_BYTES: usize = 1 << 20;

thread_local! {
    /// Kept by each thread, so that only the first step allocates.
    static RESULTS: RefCell<[Buffer<Tile<f32>>; 2]> = RefCell::default();
}

/// Writes the results of a part of a product, which has `num_rows` rows in all.
pub(super) struct ResultSink<'a> {
    pub(super) part: ProductPart<'a>,
    pub(super) num_rows: usize,
}

impl ResultSink<'_> {
    /// Calls `multiply(weight, panels, blocks, results)` until all results are computed, and writes them; results are
    /// `[panel][block]`. With two weights, `join(first, second)` combines their results into the first.
    ///
    /// # Safety
    /// The machine has AVX-512. No other thread writes this part of the output.
    pub(super) unsafe fn fill<const WEIGHTS: usize>(
        self,
        mut multiply: impl FnMut(usize, Range<usize>, Range<usize>, &mut [Tile<f32>]),
        join: impl Fn(&mut [f32], &[f32]),
    ) {
        let ResultSink { part: ProductPart { product, panels, blocks: all_blocks, .. }, num_rows } = self;
        let streams = product.bias.is_none() && num_rows * product.num_columns() * size_of::<f32>() >= STREAMED_BYTES;
        let at_once = MAX_TILES / all_blocks.len().clamp(1, MAX_BLOCKS) / WEIGHTS;
        RESULTS.with_borrow_mut(|results| {
            let end = panels.end;
            for start in panels.step_by(at_once) {
                let panels = start..end.min(start + at_once);
                for block in all_blocks.clone().step_by(MAX_BLOCKS) {
                    let blocks = block..all_blocks.end.min(block + MAX_BLOCKS);
                    let count = panels.len() * blocks.len();
                    for (i, results) in results.iter_mut().enumerate().take(WEIGHTS) {
                        multiply(i, panels.clone(), blocks.clone(), &mut results.grow(count)[..count]);
                    }
                    let [first, second] = &mut *results;
                    let first = &mut first.grow(count)[..count];
                    if WEIGHTS == 2 {
                        for (i, (first, second)) in first.iter_mut().zip(&second[..count]).enumerate() {
                            // Only existing rows: values beyond the last row would be combined again and again, and
                            // become denormal floats, with which arithmetic is slow.
                            let rows = BLOCK_ROWS.min(num_rows - (blocks.start + i % blocks.len()) * BLOCK_ROWS);
                            join(first[..rows].as_flattened_mut(), second[..rows].as_flattened());
                        }
                    }
                    // SAFETY: passed on from the caller.
                    unsafe {
                        if streams {
                            write::<true>(product, panels.clone(), num_rows, blocks, first);
                        } else {
                            write::<false>(product, panels.clone(), num_rows, blocks, first);
                        }
                    }
                }
            }
        });
        if streams {
            // SAFETY: every x86-64 processor has the instruction. It makes the stores past the caches visible before
            // this thread reports that its task is done.
            unsafe { _mm_sfence() };
        }
    }
}

/// Writes row by row: the results of a row are contiguous in the output.
///
/// # Safety
/// As for [`ResultSink::fill`], and `results` has a tile for every panel and block.
#[target_feature(enable = "avx512f")]
unsafe fn write<const STREAMS: bool>(
    product: &Product<'_>,
    panels: Range<usize>,
    num_rows: usize,
    blocks: Range<usize>,
    results: &[Tile<f32>],
) {
    let num_columns = product.num_columns();
    // Stores past the caches need whole cache lines.
    let lines = product.out.address(0).addr().is_multiple_of(64) && num_columns.is_multiple_of(PANEL_COLUMNS);
    for row in blocks.start * BLOCK_ROWS..num_rows.min(blocks.end * BLOCK_ROWS) {
        let block = row / BLOCK_ROWS - blocks.start;
        for (p, panel) in panels.clone().enumerate() {
            let results = &results[p * blocks.len() + block][row % BLOCK_ROWS];
            // SAFETY: passed on from the caller; the sixteen values are one cache line.
            unsafe {
                if STREAMS && lines {
                    let out = product.out.part(row * num_columns + panel * PANEL_COLUMNS, PANEL_COLUMNS);
                    _mm512_stream_ps(out.as_mut_ptr(), _mm512_loadu_ps(results.as_ptr()));
                } else {
                    product.put(row, panel, results);
                }
            }
        }
    }
}
