//! Products with BF16 weights with AMX: `tdpbf16ps` multiplies a tile of rows by 32 values with one of 32 values by 16
//! columns.
//!
//! x is rounded to bf16 (to nearest, ties to even), as llama.cpp and oneDNN do; products are exact in f32. A result is
//! one chain of tile instructions over ascending K, 32 values each. The instruction adds its sixteen pairs in an order
//! that the hardware fixes, the same for every row of a tile. A single row is a tile of one row, so one row and many
//! have the same bits. Other instructions cannot compute this sum; other instruction sets use f32 (see
//! `unquantized/mod.rs`) and give other bits.
//!
//! One block of rows: reading W is the bound; four panels are read at a time, because a single chain would allow only 1
//! KB in 52 cycles. Several blocks: one block by two panels at a time, two multiplications of 16 cycles for three
//! loads; [`CHUNK`] values of W stay in the first-level cache, those of x in the second.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use pellucid_tensor::quant::f32_to_bf16;

use crate::matmul::ProductPart;
use crate::matmul::input::InputRows;
use crate::matmul::result_tiles::{ResultSink, Tile};
use crate::matmul::unquantized::UnquantizedWeight;
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};
use crate::memory::{Buffer, block_stride};
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::amx::{TileConfig, release_tiles};
use crate::simd::{Simd, vectorized};

/// Values of K in a tile: 64 bytes of x.
const STEP: usize = 32;
/// Values of K that several blocks are multiplied with at a time: two panels take 16 KB.
const CHUNK: usize = 256;
/// Distance in bytes from the prefetched line of W to the one in use, for a single panel.
const PREFETCH_BYTES: usize = 8 * 1024;
/// Distance in bytes from the prefetched line of W to the one in use, for each of four panels.
const PREFETCH_EACH: usize = 2 * 1024;

/// Rows of x in bf16, in blocks of sixteen (the last one smaller): in a block of m rows, step s of row i is the 64
/// bytes at (s m + i) 64.
#[derive(Debug, Default)]
pub(in crate::matmul) struct Bf16Rows {
    num_rows: usize,
    num_steps: usize,
    /// Values from block to block.
    stride: usize,
    values: Buffer<u16>,
}

impl Bf16Rows {
    /// Rounds rows to bf16; returns the rows, computed.
    pub(in crate::matmul) fn fill<'x, S: Simd>(&mut self, simd: S, pool: &Pool, x: InputRows<'x>) -> InputRows<'x> {
        self.num_rows = x.num_rows();
        self.num_steps = x.depth().div_ceil(STEP);
        self.stride = block_stride(BLOCK_ROWS * self.num_steps * STEP * size_of::<u16>()) / size_of::<u16>();
        let (num_rows, stride) = (self.num_rows, self.stride);
        let values = SharedSlice::new(self.values.grow(self.num_blocks() * stride));
        let round = |row: usize| {
            let block = row / BLOCK_ROWS;
            let m = BLOCK_ROWS.min(num_rows - block * BLOCK_ROWS);
            let start = block * stride + row % BLOCK_ROWS * STEP;
            // SAFETY: every row is taken once.
            round_row(simd, unsafe { x.take(row..row + 1) }, m * STEP, start, values);
        };
        // For fewer rows, waking threads costs more than it saves.
        if num_rows < 8 {
            (0..num_rows).for_each(round)
        } else {
            pool.run(num_rows, &round)
        }
        // SAFETY: every row was taken once, and all tasks are done.
        unsafe { x.taken() }
    }

    fn num_blocks(&self) -> usize {
        self.num_rows.div_ceil(BLOCK_ROWS)
    }

    /// Checks that panels are at least as deep as the rows.
    fn assert_depth<const WEIGHTS: usize>(&self, weights: [&UnquantizedWeight; WEIGHTS]) {
        let bytes = self.num_steps * STEP * PANEL_COLUMNS * size_of::<u16>();
        assert!(weights.iter().all(|weight| bytes <= weight.panel_bytes()), "panels are as deep as the rows");
    }

    /// Number of rows of a block, and the start of one of its steps.
    fn block(&self, block: usize, step: usize) -> (usize, *const u16) {
        let m = BLOCK_ROWS.min(self.num_rows - block * BLOCK_ROWS);
        (m, self.values[block * self.stride + step * m * STEP..].as_ptr())
    }
}

vectorized! {
    /// Rounds a row: step s goes to `start + s * stride`, and values past the end of the row become zero.
    fn round_row<S: Simd>(x: &[f32], stride: usize, start: usize, values: SharedSlice<'_, u16>) {
        for (s, x) in x.chunks(STEP).enumerate() {
            // SAFETY: by the layout of `Bf16Rows`, only this row has these values.
            let values = unsafe { values.part(start + s * stride, STEP) };
            values[x.len()..].fill(0);
            for i in 0..x.len() {
                values[i] = f32_to_bf16(x[i]);
            }
        }
    }
}

/// Multiplies up to sixteen rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results.
///
/// # Safety
/// The machine has AMX, and the program may use it. There is one block of rows, and rows and weights have the same
/// depth. No other thread writes these panels of the output.
pub(in crate::matmul) unsafe fn one_block_times_panels<const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&UnquantizedWeight; WEIGHTS],
    rows: &Bf16Rows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    assert_eq!(rows.num_blocks(), 1, "rows of one block");
    rows.assert_depth(weights);
    let sink = ResultSink { part, num_rows: rows.num_rows };
    // SAFETY: passed on from the caller; there is a tile of results for every panel.
    unsafe {
        sink.fill::<WEIGHTS>(|i, panels, _, results| one_block(weights[i], panels, rows, results), join);
        release_tiles();
    }
}

/// Multiplies any number of rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results.
///
/// # Safety
/// As for [`one_block_times_panels`], for any number of blocks.
pub(in crate::matmul) unsafe fn many_blocks_times_panels<const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&UnquantizedWeight; WEIGHTS],
    rows: &Bf16Rows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    rows.assert_depth(weights);
    let sink = ResultSink { part, num_rows: rows.num_rows };
    // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
    unsafe {
        sink.fill::<WEIGHTS>(|i, panels, blocks, results| many_blocks(weights[i], panels, rows, blocks, results), join);
        release_tiles();
    }
}

/// Multiplies one block with panels, four at a time as long as there are four: four streams of memory and four chains
/// of sums.
///
/// # Safety
/// As for [`one_block_times_panels`].
unsafe fn one_block(weight: &UnquantizedWeight, panels: Range<usize>, rows: &Bf16Rows, results: &mut [Tile<f32>]) {
    let (m, x) = rows.block(0, 0);
    // SAFETY: the machine has AMX and the program may use it.
    unsafe { tile_shapes(m).load() };
    for (first, results) in panels.clone().step_by(4).zip(results.chunks_mut(4)) {
        let count = results.len().min(panels.end - first);
        let w = |panel: usize| weight.panel(panel).as_ptr();
        // SAFETY: panels and block have `num_steps` steps.
        unsafe {
            match results {
                [a, b, c, d] if count == 4 => {
                    one_by_four(x, m, w(first), weight.panel_bytes(), rows.num_steps, [a, b, c, d]);
                }
                _ => {
                    for (panel, result) in (first..first + count).zip(results) {
                        one_by_one(x, m, w(panel), rows.num_steps, result, true);
                    }
                }
            }
        }
    }
}

/// Multiplies some blocks with some panels; results are `[panel][block]`.
///
/// # Safety
/// As for [`many_blocks_times_panels`].
unsafe fn many_blocks(
    weight: &UnquantizedWeight,
    panels: Range<usize>,
    rows: &Bf16Rows,
    blocks: Range<usize>,
    results: &mut [Tile<f32>],
) {
    let num_blocks = blocks.len();
    let mut configured = 0;
    for step in (0..rows.num_steps).step_by(CHUNK / STEP) {
        let count = (CHUNK / STEP).min(rows.num_steps - step);
        for (first, results) in panels.clone().step_by(2).zip(results.chunks_mut(2 * num_blocks)) {
            let w = |panel: usize| weight.panel(panel)[step * STEP * PANEL_COLUMNS * 2..].as_ptr();
            // The next two panels are prefetched while these are multiplied.
            let next = w(first).wrapping_add(2 * weight.panel_bytes());
            let per_block = (count * 1024).div_ceil(64 * num_blocks);
            let mut ahead = (0..count * 1024).step_by(64);
            let (ones, others) = results.split_at_mut(num_blocks);
            for (i, block) in blocks.clone().enumerate() {
                for line in ahead.by_ref().take(per_block) {
                    // SAFETY: a prefetch may use any address.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line).cast());
                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(weight.panel_bytes() + line).cast());
                    }
                }
                let (m, x) = rows.block(block, step);
                // SAFETY: panels and block have `count` steps from this one on; tiles are configured for the block.
                unsafe {
                    if std::mem::replace(&mut configured, m) != m {
                        tile_shapes(m).load();
                    }
                    if first + 1 < panels.end {
                        let tiles = [&mut ones[i], &mut others[i]];
                        one_by_two(x, m, [w(first), w(first + 1)], count, tiles, step == 0);
                    } else {
                        one_by_one(x, m, w(first), count, &mut ones[i], step == 0);
                    }
                }
            }
        }
    }
}

/// Tiles 0 to 3 are results, tile 4 is x, tile 5 is W. [`crate::simd::amx`] says why there are no more.
fn tile_shapes(m: usize) -> TileConfig {
    let mut config = TileConfig::default();
    (0..5).for_each(|tile| config.set(tile, m, 64));
    config.set(5, STEP / 2, 64);
    config
}

/// Multiplies one block with one panel, over `count` steps; adds to `result` unless `fresh`.
///
/// # Safety
/// Block and panel have `count` steps, and tiles are configured for the block's `m` rows; the machine has AMX.
unsafe fn one_by_one(x: *const u16, m: usize, w: *const u8, count: usize, result: &mut Tile<f32>, fresh: bool) {
    // SAFETY: tiles read whole steps of 64 m and 1024 bytes, and at most sixteen rows of the result; a prefetch may use
    // any address; no compiled code uses tile registers.
    unsafe {
        if fresh {
            asm!("tilezero tmm0", options(nostack, preserves_flags, nomem));
        } else {
            let from = result.as_ptr();
            asm!(
                "tileloadd tmm0, [{} + {}]",
                in(reg) from,
                in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            );
        }
        for step in 0..count {
            let w = w.add(step * 1024);
            for line in (0..1024).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(PREFETCH_BYTES + line).cast());
            }
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm5, [{w} + {stride}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                x = in(reg) x.add(step * m * STEP),
                w = in(reg) w,
                stride = in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            );
        }
        let to = result.as_mut_ptr();
        asm!("tilestored [{} + {}], tmm0", in(reg) to, in(reg) 64usize, options(nostack, preserves_flags));
    }
}

/// Multiplies one block with four adjacent panels.
///
/// # Safety
/// As for [`one_by_one`], for panels of `panel_bytes` from `w` on.
unsafe fn one_by_four(
    x: *const u16,
    m: usize,
    w: *const u8,
    panel_bytes: usize,
    count: usize,
    results: [&mut Tile<f32>; 4],
) {
    // SAFETY: see `one_by_one`.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, preserves_flags, nomem)
        );
        for step in 0..count {
            let w = w.add(step * 1024);
            // At the end of a panel, prefetching goes on in the next four panels.
            let over = step * 1024 + PREFETCH_EACH >= panel_bytes;
            let ahead = w.wrapping_add(PREFETCH_EACH + if over { 3 * panel_bytes } else { 0 });
            for line in (0..1024).step_by(64) {
                for panel in 0..4 {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(panel * panel_bytes + line).cast());
                }
            }
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm5, [{w0} + {stride}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm5, [{w1} + {stride}]",
                "tdpbf16ps tmm1, tmm4, tmm5",
                "tileloadd tmm5, [{w2} + {stride}]",
                "tdpbf16ps tmm2, tmm4, tmm5",
                "tileloadd tmm5, [{w3} + {stride}]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                x = in(reg) x.add(step * m * STEP),
                w0 = in(reg) w,
                w1 = in(reg) w.add(panel_bytes),
                w2 = in(reg) w.add(2 * panel_bytes),
                w3 = in(reg) w.add(3 * panel_bytes),
                stride = in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            );
        }
        let [a, b, c, d] = results;
        asm!(
            "tilestored [{0} + {4}], tmm0",
            "tilestored [{1} + {4}], tmm1",
            "tilestored [{2} + {4}], tmm2",
            "tilestored [{3} + {4}], tmm3",
            in(reg) a, in(reg) b, in(reg) c, in(reg) d, in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}

/// Multiplies one block with two panels, which are in the cache; adds to `results` unless `fresh`.
///
/// # Safety
/// As for [`one_by_one`], for both panels.
unsafe fn one_by_two(
    x: *const u16,
    m: usize,
    w: [*const u8; 2],
    count: usize,
    results: [&mut Tile<f32>; 2],
    fresh: bool,
) {
    // SAFETY: see `one_by_one`.
    unsafe {
        if fresh {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags, nomem));
        } else {
            asm!(
                "tileloadd tmm0, [{0} + {2}]",
                "tileloadd tmm1, [{1} + {2}]",
                in(reg) results[0], in(reg) results[1], in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            );
        }
        for step in 0..count {
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm5, [{w0} + {stride}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm5, [{w1} + {stride}]",
                "tdpbf16ps tmm1, tmm4, tmm5",
                x = in(reg) x.add(step * m * STEP),
                w0 = in(reg) w[0].add(step * 1024),
                w1 = in(reg) w[1].add(step * 1024),
                stride = in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            );
        }
        let [a, b] = results;
        asm!(
            "tilestored [{0} + {2}], tmm0",
            "tilezero tmm0",
            "tilestored [{1} + {2}], tmm1",
            "tilezero tmm1",
            in(reg) a, in(reg) b, in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}
