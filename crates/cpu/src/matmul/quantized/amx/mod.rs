//! Products with quantized weights by AMX, for many rows: `tdpbssd` multiplies a tile of 16 rows by 64 numbers with one of 64 numbers by
//! 16 columns, and adds up exactly.
//!
//! Where a float scales every 32 numbers (Q4_0, Q8_0, ...), a tile of 32 goes to memory after one instruction ([`float_scales`]). Where integers
//! scale them (the K formats), the scale is multiplied into the numbers beforehand; the products of up to 13 bits make two tiles of
//! bytes, high and low, and a sum ends after 256 numbers ([`byte_planes`]).
//!
//! Many rows: sixteen panels of W stay with a thread, and each is unpacked once for all of its rows ([`float_scales`], [`byte_planes_many_blocks`]). One block of
//! rows: as panels lie in memory, one after the other or four side by side.

mod byte_planes;
mod byte_planes_many_blocks;
mod float_scales;
mod scale_rows;
mod slice_pipeline;

use std::cell::RefCell;
use std::ops::Range;

use crate::matmul::ProductPart;
use crate::matmul::prefetch::PacedPrefetch;
use crate::matmul::quantized::activations::QuantizedRows;
use crate::matmul::quantized::panel_layout::{PanelLayout, QuantizedFormat};
use crate::matmul::result_tiles::{ResultSink, Tile};
use crate::matmul::weight::PackedWeight;
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};
use crate::simd::amx::{TileConfig, release_tiles};

/// Slices of which a ring holds the bytes, 16 KB: a third of the first-level cache. Half as many where a number takes two.
const CHUNK_SLICES: usize = 32;

/// Rings of what was unpacked of a panel; and where tiles go between multiplying and scaling.
#[repr(C, align(64))]
struct UnpackRing {
    /// Each slice as `packing` says that it unpacks. Of two planes, two slices of the high one are followed by those of the low one.
    integers: [[u8; 512]; CHUNK_SLICES],
    /// Of each slice, where floats scale them.
    scales: [SliceScales; CHUNK_SLICES],
    /// Of each unit, where integers do.
    unit_scales: [UnitScales; byte_planes::SCALE_UNITS],
    tiles: [Tile<i32>; 4],
}

/// What scales a slice, for sixteen columns.
#[repr(C, align(64))]
struct SliceScales {
    scale: [f32; PANEL_COLUMNS],
    min: [f32; PANEL_COLUMNS],
}

/// What scales a unit whose slices have integers as scales, for sixteen columns.
#[repr(C, align(64))]
struct UnitScales {
    scale: [f32; PANEL_COLUMNS],
    min: [f32; PANEL_COLUMNS],
    /// The minimums of two slices each, as pairs of i16.
    min_pairs: [[u8; 64]; byte_planes::PAIRS],
}

struct AmxScratch {
    chunk: Box<UnpackRing>,
    group: Box<byte_planes_many_blocks::UnpackedUnits>,
}

thread_local! {
    /// Kept by each thread so that a step allocates nothing after the first.
    static SCRATCH: RefCell<Option<AmxScratch>> = const { RefCell::new(None) };
}

impl AmxScratch {
    fn new() -> Self {
        // SAFETY: zeros are valid in every field of both.
        let (chunk, group) = unsafe { (Box::new_zeroed().assume_init(), Box::new_zeroed().assume_init()) };
        AmxScratch { chunk, group }
    }
}

/// Multiplies up to sixteen rows with some panels of one weight, or of two whose results `join` combines, and writes the results.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, and the program may use AMX. There is one block of rows, and rows and weights have the same
/// number of units of F. No other thread writes these panels of the output.
pub(in crate::matmul) unsafe fn one_block_times_panels<F: QuantizedFormat, const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &QuantizedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    assert_eq!(rows.num_blocks(), 1, "rows of one block");
    SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(AmxScratch::new);
        let Range { start, end } = part.panels.clone();
        let sink = ResultSink { part, num_rows: rows.num_rows() };
        // SAFETY: passed on from the caller; there is a tile of results for every panel.
        unsafe {
            sink.fill::<WEIGHTS>(
                |i, panels, _, results| {
                    if !F::LAYOUT.scaled_by_floats() && panels.start == start {
                        // Each panel prefetches the next one; nothing has prefetched the first.
                        PacedPrefetch::new(weights[i].panels(start..end.min(start + 1)), 1).fetch();
                    }
                    one_block::<F>(weights[i], panels, end, rows, scratch, results);
                },
                join,
            );
            release_tiles();
        }
    });
}

/// Multiplies any number of rows with some panels of one weight, or of two whose results `join` combines, and writes the results.
///
/// # Safety
/// As for [`one_block_times_panels`], for any number of blocks.
pub(in crate::matmul) unsafe fn many_blocks_times_panels<F: QuantizedFormat, const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &QuantizedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(AmxScratch::new);
        let sink = ResultSink { part, num_rows: rows.num_rows() };
        // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
        unsafe {
            sink.fill::<WEIGHTS>(
                |i, panels, blocks, results| {
                    if const { F::LAYOUT.scaled_by_floats() } {
                        float_scales::multiply_blocks::<F>(weights[i], panels, rows, blocks, scratch, results);
                    } else {
                        byte_planes_many_blocks::multiply::<F>(weights[i], panels, rows, blocks, scratch, results);
                    }
                },
                join,
            );
            release_tiles();
        }
    });
}

/// Rows of one block: W is read once, from end to end, and unpacked on the way. There are more panels to come, up to `end`.
///
/// # Safety
/// As for `rows_times_panels`; there is one block.
unsafe fn one_block<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    end: usize,
    rows: &QuantizedRows,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let layout = F::LAYOUT;
    // SAFETY: the machine has AMX and the program may use it; panel and block hold as many units.
    unsafe {
        tile_shapes(&layout, rows.num_rows()).load();
        if const { F::LAYOUT.scaled_by_floats() } {
            float_scales::multiply_panels::<F>(weight, panels, rows, scratch, results);
        } else {
            byte_planes::multiply_panels::<F>(weight, panels, end, rows.block(0), scratch, results);
        }
    }
}

/// Bytes that a number takes, each in a tile of its own.
const fn num_planes(layout: &PanelLayout) -> usize {
    if layout.scaled_by_floats() { 1 } else { 2 }
}

/// Tiles 0 to 3 are results, 4 is rows of x, 5 of W: no more than that, see [`crate::simd::amx`].
fn tile_shapes(layout: &PanelLayout, num_rows: usize) -> TileConfig {
    let numbers = 32 * num_planes(layout);
    let mut config = TileConfig::default();
    (0..4).for_each(|tile| config.set(tile, num_rows, 4 * PANEL_COLUMNS));
    config.set(4, num_rows, numbers);
    config.set(5, numbers / 4, 4 * PANEL_COLUMNS);
    config
}
