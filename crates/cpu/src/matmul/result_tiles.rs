//! Results of some panels and blocks of rows at a time, as AVX-512 and tiles compute them: joined where two products make one, written row by row.

use std::arch::x86_64::{_mm_sfence, _mm512_loadu_ps, _mm512_stream_ps};
use std::cell::RefCell;
use std::ops::Range;

use super::{Product, ProductPart};
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};
use crate::memory::Buffer;

/// Sixteen rows of sixteen columns.
pub(super) type Tile<T> = [[T; PANEL_COLUMNS]; BLOCK_ROWS];

/// Results that a thread keeps together: 512 KB, and the rows' stretch takes as much, of a second-level cache of 2 MB. That is sixteen panels
/// for as many blocks of rows as it takes at most; the more panels, the less often rows come from farther away.
const MAX_TILES: usize = 512;
const MAX_BLOCKS: usize = 32;

/// Outputs from this many bytes on go to memory past the caches, which would not hold them until they are read: else every line is read
/// from memory first, only to be overwritten.
const STREAMED_BYTES: usize = 1 << 20;

thread_local! {
    /// Kept by each thread so that a step allocates nothing after the first.
    static RESULTS: RefCell<[Buffer<Tile<f32>>; 2]> = RefCell::default();
}

/// Where results go: a part of a product that has so many rows in all.
pub(super) struct ResultSink<'a> {
    pub(super) part: ProductPart<'a>,
    pub(super) num_rows: usize,
}

impl ResultSink<'_> {
    /// Has `multiply` compute the results of one weight, or of two, which `join` makes one in the place of the first. It is told which, and
    /// for which panels and blocks; results are `[panel][block]`.
    ///
    /// # Safety
    /// The machine has AVX-512. No other thread writes this part, and the product's output is alive.
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
                            // What lies beyond the last row is nobody's, and must not be computed with again and again: it would come to
                            // numbers so small that arithmetic with them is slow.
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
            // SAFETY: every machine of this family has the instruction. What was written past the caches is there before whoever waits for
            // this thread goes on.
            unsafe { _mm_sfence() };
        }
    }
}

/// Row by row, so that what a row gets is one stretch of memory: its panels lie side by side.
///
/// # Safety
/// As for `fill`, and `results` has a tile for every panel and block.
#[target_feature(enable = "avx512f")]
unsafe fn write<const STREAMS: bool>(
    product: &Product<'_>,
    panels: Range<usize>,
    num_rows: usize,
    blocks: Range<usize>,
    results: &[Tile<f32>],
) {
    let num_columns = product.num_columns();
    // Such stores take whole lines alone.
    let lines = product.out.address(0).addr().is_multiple_of(64) && num_columns.is_multiple_of(PANEL_COLUMNS);
    for row in blocks.start * BLOCK_ROWS..num_rows.min(blocks.end * BLOCK_ROWS) {
        let block = row / BLOCK_ROWS - blocks.start;
        for (p, panel) in panels.clone().enumerate() {
            let results = &results[p * blocks.len() + block][row % BLOCK_ROWS];
            // SAFETY: passed on from the caller; sixteen numbers of a line of their own.
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
