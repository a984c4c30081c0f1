//! Products with quantized weights by AMX, for many rows: `tdpbssd` multiplies a tile of 16 rows by 32 numbers with one of 32 numbers by
//! 16 columns, and adds up exactly.
//!
//! A slice's scale ends every integer sum after 32 numbers (16 for Q6_K), so a tile goes to memory after one instruction, and AVX-512 applies
//! the scales while the next tile is multiplied. Estimate for 16 x 16 x 32: multiplication 16 cycles, 40 loads of two a cycle, 16 stores
//! of one a cycle, 48 vector operations (64 with minimums, 35 for the K formats) of two a cycle.
//! Measured: these do not overlap as they should, since tile loads and stores are long sequences that keep the decoder from what follows:
//! 30 cycles for tiles alone, 50 (K formats) to 67 with the scales (2026-11-15, a core of a Xeon with AMX at 3.0 GHz).
//!
//! A few panels of W (eight) stay with a thread; for each stretch of K ([`CHUNK_LEN`]) a panel is unpacked to bytes into the first-level
//! cache and used for all rows, whose own stretch stays in the second-level cache.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::activations::{BLOCK, Quantized, RowBlock};
use super::avx512::{halves, head, integers, min_pairs, scales};
use super::packing::{COLUMNS, Layout, Mins, Packing, SLICE, Scales};
use super::weight::PackedWeight;
use crate::simd::amx::{TileConfig, release_tiles};

/// Numbers of K that are unpacked at a time: 16 KB of bytes, a third of the first-level cache.
const CHUNK_LEN: usize = 1024;
const CHUNK_SLICES: usize = CHUNK_LEN / SLICE;

/// Panels that a thread keeps together for [`MAX_BLOCKS`] blocks of rows: results take 512 KB, and the rows' stretch as much, of a
/// second-level cache of 2 MB. The more panels, the less often rows come from farther away.
const MAX_PANELS: usize = 16;
const MAX_BLOCKS: usize = 32;

/// A stretch of a panel, unpacked; and where tiles go between multiplying and scaling.
#[repr(C, align(64))]
struct Chunk {
    integers: [[u8; 512]; CHUNK_SLICES],
    scales: [[f32; COLUMNS]; 2 * CHUNK_SLICES],
    mins: [[f32; COLUMNS]; CHUNK_SLICES],
    min_pairs: [[u8; 64]; CHUNK_SLICES / 2],
    min_heads: [[f32; COLUMNS]; CHUNK_SLICES / 8],
    tiles: [[[i32; COLUMNS]; BLOCK]; 2],
}

struct Scratch {
    chunk: Box<Chunk>,
    /// `[panel][row][column]`, rows in whole blocks.
    results: Vec<[f32; COLUMNS]>,
}

thread_local! {
    /// Kept by each thread so that a step allocates nothing after the first.
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

impl Scratch {
    fn new() -> Self {
        // SAFETY: zeros are valid in every field.
        let chunk = unsafe { Box::<Chunk>::new_zeroed().assume_init() };
        Scratch { chunk, results: Vec::new() }
    }
}

/// Some panels for all rows; `put` gets (row, panel, results).
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, the program may use AMX, and rows and weight have the same number of units of F.
pub(crate) unsafe fn rows_times_panels<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &Quantized,
    put: &mut dyn FnMut(usize, usize, &[f32; COLUMNS]),
) {
    SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(Scratch::new);
        for start in panels.clone().step_by(MAX_PANELS) {
            let panels = start..panels.end.min(start + MAX_PANELS);
            for block in (0..rows.num_blocks()).step_by(MAX_BLOCKS) {
                let blocks = block..rows.num_blocks().min(block + MAX_BLOCKS);
                // SAFETY: passed on from the caller.
                unsafe { few_panels::<F>(weight, panels.clone(), rows, blocks, scratch, put) };
            }
        }
    });
}

/// # Safety
/// As for `rows_times_panels`.
unsafe fn few_panels<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &Quantized,
    blocks: Range<usize>,
    scratch: &mut Scratch,
    put: &mut dyn FnMut(usize, usize, &[f32; COLUMNS]),
) {
    let layout = F::LAYOUT;
    let num_units = rows.num_slices() / layout.slices;
    let units_of_chunk = CHUNK_SLICES / layout.slices;
    let panel_rows = blocks.len() * BLOCK;
    scratch.results.clear();
    scratch.results.resize(panels.len() * panel_rows, [0.0; COLUMNS]);
    let mut configured = 0;
    for first in (0..num_units).step_by(units_of_chunk) {
        let count = units_of_chunk.min(num_units - first);
        for (i, panel) in panels.clone().enumerate() {
            let units = &weight.panel(panel)[first * layout.unit_bytes()..][..count * layout.unit_bytes()];
            // SAFETY: the panel holds these units; features by the caller's promise.
            unsafe { unpack::<F>(units.as_ptr(), count, &mut scratch.chunk) };
            // What the next panel, a panel's length further on, will need, is fetched while this one is multiplied.
            let mut ahead =
                (0..units.len()).step_by(64).map(|line| units.as_ptr().wrapping_add(weight.panel_bytes() + line));
            let per_block = units.len().div_ceil(64 * blocks.len());
            for block in blocks.clone() {
                for line in ahead.by_ref().take(per_block) {
                    // SAFETY: a prefetch may go anywhere.
                    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
                }
                // SAFETY: `first` is one of its units.
                let x = unsafe { rows.block(block).at_slice(first * layout.slices, &layout) };
                if configured != x.num_rows {
                    configured = x.num_rows;
                    // SAFETY: the machine has AMX and the program may use it.
                    unsafe { tile_shapes(&layout, x.num_rows).load() };
                }
                let results = &mut scratch.results[i * panel_rows + (block - blocks.start) * BLOCK..][..BLOCK];
                // SAFETY: the chunk holds `count` units, so does the block from `first` on; the tiles are configured for both.
                unsafe { multiply::<F>(&mut scratch.chunk, count, x, results) };
            }
        }
    }
    // SAFETY: the machine has AMX.
    unsafe { release_tiles() };
    // Row by row, so that what a row gets is one stretch of memory: its panels lie side by side.
    for (i, row) in (blocks.start * BLOCK..rows.num_rows().min(blocks.end * BLOCK)).enumerate() {
        for (p, panel) in panels.clone().enumerate() {
            put(row, panel, &scratch.results[p * panel_rows + i]);
        }
    }
}

/// Tiles 0 to 3 are results, 4 and 5 rows of x, 6 and 7 of W.
fn tile_shapes(layout: &Layout, num_rows: usize) -> TileConfig {
    let len = sub_len(layout);
    let mut config = TileConfig::default();
    for tile in 0..2 {
        config.set(tile, num_rows, 4 * COLUMNS);
        config.set(2 + tile, num_rows, 4 * COLUMNS);
        config.set(4 + tile, num_rows, len);
        config.set(6 + tile, len / 4, 4 * COLUMNS);
    }
    config
}

/// Numbers that one tile multiplies: those that share a scale.
const fn sub_len(layout: &Layout) -> usize {
    if matches!(layout.scales, Scales::Halves) { SLICE / 2 } else { SLICE }
}

/// Unpacks `count` units: integers to signed bytes, scales to f32.
///
/// # Safety
/// `units` holds so many; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: Packing>(units: *const u8, count: usize, chunk: &mut Chunk) {
    let layout = F::LAYOUT;
    let offset = _mm512_set1_epi8(layout.offset_shift.map_or(0, |shift| (1u8 << shift) as i8));
    for u in 0..count {
        // SAFETY: units are whole by the caller's promise; the chunk's arrays have room for all slices of a chunk.
        unsafe {
            let unit = units.add(u * layout.unit_bytes());
            let head = head::<F>(unit);
            for slice in 0..layout.slices {
                let at = u * layout.slices + slice;
                let bytes = chunk.integers[at].as_mut_ptr();
                for (j, integers) in integers::<F>(unit, slice).into_iter().enumerate() {
                    _mm512_store_si512(bytes.add(64 * j).cast(), _mm512_sub_epi8(integers, offset));
                }
                if layout.scales == Scales::Halves {
                    for half in 0..2 {
                        let scales = scales::<F>(unit, slice, half, head);
                        _mm512_store_ps(chunk.scales[2 * at + half].as_mut_ptr(), scales);
                    }
                } else {
                    _mm512_store_ps(chunk.scales[at].as_mut_ptr(), scales::<F>(unit, slice, 0, head));
                }
                match layout.mins {
                    Mins::None => {}
                    Mins::Plain => {
                        _mm512_store_ps(chunk.mins[at].as_mut_ptr(), halves(unit.add(layout.min(slice))));
                    }
                    Mins::Slices if slice % 2 == 1 => {
                        let pairs = min_pairs::<F>(unit, slice / 2);
                        _mm512_store_si512(chunk.min_pairs[at / 2].as_mut_ptr().cast(), pairs);
                    }
                    Mins::Slices => {}
                }
            }
            if layout.mins == Mins::Slices {
                _mm512_store_ps(chunk.min_heads[u].as_mut_ptr(), halves(unit.add(layout.min_head())));
            }
        }
    }
}

/// Evaluates a block for each row of a block with the row as a constant: sixteen sums stay in registers only when nothing indexes them
/// by a variable.
macro_rules! for_each_row {
    ($r:ident => $body:block) => {
        for_each_row!($r => $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($r:ident => $body:block, $($row:literal)*) => {
        $({
            const $r: usize = $row;
            $body
        })*
    };
}

/// A block of rows times a chunk, added to `results`.
///
/// # Safety
/// The chunk holds `count` units, the block as many; tiles are configured for both; the machine has AMX and AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply<F: Packing>(chunk: &mut Chunk, count: usize, x: RowBlock, results: &mut [[f32; COLUMNS]]) {
    let layout = F::LAYOUT;
    let results: &mut [[f32; COLUMNS]; BLOCK] = results.try_into().expect("a block of rows");
    // Two tiles make a step: two slices, or both halves of one.
    let steps_of_unit = layout.slices * SLICE / (2 * sub_len(&layout));
    let num_steps = count * steps_of_unit;
    let m = x.num_rows;
    // SAFETY: see the promises of the function; every index below is within the block's and the chunk's arrays, of which those of sums and
    // scales can be read for a whole block even where it has fewer rows.
    unsafe {
        // Of the whole row where activations have a scale for each slice, else of the unit.
        let mut sums = [_mm512_setzero_ps(); BLOCK];
        if layout.group == 1 {
            for_each_row!(R => { sums[R] = _mm512_loadu_ps(results[R].as_ptr()); });
        }
        for next in 0..=num_steps {
            if next < num_steps {
                multiply_tiles::<F>(chunk, x, next);
            }
            let Some(step) = next.checked_sub(1) else { continue };
            store_tiles(chunk, step);
            let tiles = &chunk.tiles;
            let scales = [0, 1].map(|i| _mm512_load_ps(chunk.scales[2 * step + i].as_ptr()));
            let product = |i: usize, r: usize| _mm512_cvtepi32_ps(_mm512_load_si512(tiles[i][r].as_ptr().cast()));
            if layout.group == 1 {
                let x_scales = [x.scales.add(2 * step * m), x.scales.add((2 * step + 1) * m)];
                let row_sums = [x.sums.add(2 * step * m), x.sums.add((2 * step + 1) * m)];
                let mins = [0, 1].map(|i| _mm512_load_ps(chunk.mins[2 * step + i].as_ptr()));
                for_each_row!(R => {
                    for i in 0..2 {
                        let mut part = _mm512_fmadd_ps(product(i, R), scales[i], _mm512_setzero_ps());
                        if layout.mins == Mins::Plain {
                            part = _mm512_fmadd_ps(_mm512_set1_ps(*row_sums[i].add(R)), mins[i], part);
                        }
                        sums[R] = _mm512_fmadd_ps(part, _mm512_set1_ps(*x_scales[i].add(R)), sums[R]);
                    }
                });
                continue;
            }
            for_each_row!(R => {
                sums[R] = _mm512_fmadd_ps(product(0, R), scales[0], sums[R]);
                sums[R] = _mm512_fmadd_ps(product(1, R), scales[1], sums[R]);
            });
            if !next.is_multiple_of(steps_of_unit) {
                continue;
            }
            let unit = step / steps_of_unit;
            if layout.mins == Mins::Slices {
                let dmin = _mm512_load_ps(chunk.min_heads[unit].as_ptr());
                let pairs_of_unit = layout.slices / 2;
                let mins: [__m512i; 4] = std::array::from_fn(|i| {
                    _mm512_load_si512(chunk.min_pairs[unit * pairs_of_unit + i].as_ptr().cast())
                });
                let pairs = x.pairs.add(unit * pairs_of_unit * m).cast::<i32>();
                for_each_row!(R => {
                    let mut minimums = _mm512_setzero_si512();
                    for (i, &mins) in mins.iter().enumerate() {
                        let pair = pairs.add(i * m + R).read_unaligned();
                        minimums = _mm512_dpwssd_epi32(minimums, mins, _mm512_set1_epi32(pair));
                    }
                    sums[R] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minimums), dmin, sums[R]);
                });
            }
            let x_scales = x.scales.add(unit * m);
            for_each_row!(R => {
                let result = _mm512_loadu_ps(results[R].as_ptr());
                let result = _mm512_fmadd_ps(sums[R], _mm512_set1_ps(*x_scales.add(R)), result);
                _mm512_storeu_ps(results[R].as_mut_ptr(), result);
                sums[R] = _mm512_setzero_ps();
            });
        }
        if layout.group == 1 {
            for_each_row!(R => { _mm512_storeu_ps(results[R].as_mut_ptr(), sums[R]); });
        }
    }
}

/// Multiplies the two tiles of a step, into result tiles 0 and 1 for even steps and 2 and 3 for odd ones.
///
/// A tile store right behind its multiplication holds everything up until that is done; with the results of two steps alive, a step is
/// stored while the next one is multiplied. That halved the time of the whole kernel.
///
/// # Safety
/// As for `multiply`; the step is one of the chunk's.
#[inline(always)]
unsafe fn multiply_tiles<F: Packing>(chunk: &Chunk, x: RowBlock, step: usize) {
    let half = F::LAYOUT.scales == Scales::Halves;
    let (slices, bytes) = if half { ([step, step], [0, 256]) } else { ([2 * step, 2 * step + 1], [0, 0]) };
    macro_rules! multiply {
        ($first:literal, $second:literal) => {
            asm!(
                concat!("tilezero tmm", $first),
                "tileloadd tmm4, [{x0} + {x_stride}]",
                "tileloadd tmm6, [{w0} + {stride}]",
                concat!("tdpbssd tmm", $first, ", tmm4, tmm6"),
                concat!("tilezero tmm", $second),
                "tileloadd tmm5, [{x1} + {x_stride}]",
                "tileloadd tmm7, [{w1} + {stride}]",
                concat!("tdpbssd tmm", $second, ", tmm5, tmm7"),
                x0 = in(reg) x.quants.add(slices[0] * x.num_rows * SLICE + bytes[0] / COLUMNS),
                x1 = in(reg) x.quants.add(slices[1] * x.num_rows * SLICE + bytes[1] / COLUMNS),
                w0 = in(reg) chunk.integers[slices[0]].as_ptr().add(bytes[0]),
                w1 = in(reg) chunk.integers[slices[1]].as_ptr().add(bytes[1]),
                x_stride = in(reg) SLICE,
                stride = in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            )
        };
    }
    // SAFETY: the tiles read whole slices of the block and of the chunk (or halves: 16 of 32 numbers, 256 of 512 bytes); nothing else
    // of the program uses tile registers.
    unsafe {
        if step.is_multiple_of(2) {
            multiply!("0", "1");
        } else {
            multiply!("2", "3");
        }
    }
}

/// Stores the results of a step.
///
/// # Safety
/// As for `multiply`.
#[inline(always)]
unsafe fn store_tiles(chunk: &mut Chunk, step: usize) {
    macro_rules! store {
        ($first:literal, $second:literal) => {
            asm!(
                concat!("tilestored [{to0} + {stride}], tmm", $first),
                concat!("tilestored [{to1} + {stride}], tmm", $second),
                to0 = in(reg) chunk.tiles[0].as_mut_ptr(),
                to1 = in(reg) chunk.tiles[1].as_mut_ptr(),
                stride = in(reg) 64usize,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: each store writes sixteen lines, or fewer, of an array of as many.
    unsafe {
        if step.is_multiple_of(2) {
            store!("0", "1");
        } else {
            store!("2", "3");
        }
    }
}
