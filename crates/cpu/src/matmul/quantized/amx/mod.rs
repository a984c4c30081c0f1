//! Products with quantized weights with AMX: `tdpbssd` multiplies a tile of 16 rows by 64 values with one of 64 values
//! by 16 columns, and adds exactly.
//!
//! | scales | one block of rows | several blocks |
//! |---|---|---|
//! | float | [`multiply_panels`](float_scales) | [`multiply_blocks`](float_scales) |
//! | integer: the K formats | [`byte_planes`] | [`byte_planes_many_blocks`] |
//!
//! With a float scale for every 32 values, a tile is stored to memory after one multiplication of 32 values. With
//! integer scales, the scale is multiplied into the values beforehand; the products of up to 13 bits make two tiles of
//! bytes, high and low, and a sum ends after 256 values.
//!
//! One block of rows reads panels once, in the order of memory. Several blocks: a task has up to sixteen panels, and
//! unpacks each once for all of its rows.

mod byte_planes;
mod byte_planes_many_blocks;
mod float_scales;
mod scale_rows;
mod slice_macros;
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

/// Slices in a ring of unpacked bytes: 16 KB, a third of the first-level cache.
const RING_SLICES: usize = 32;

/// Rings of unpacked slices and scales of panels, and the memory that holds tiles between multiplying and scaling.
#[repr(C, align(64))]
struct UnpackRing {
    /// Slices unpacked as `panel_layout` describes. With two planes, two slices of the high plane are followed by those
    /// of the low plane.
    integers: [[u8; 512]; RING_SLICES],
    /// Scales of each slice, for formats with float scales.
    scales: [SliceScales; RING_SLICES],
    /// Scales of each unit, for formats with integer scales.
    unit_scales: [UnitScales; byte_planes::SCALE_UNITS],
    tiles: [Tile<i32>; 4],
}

/// Scales and minimums of a slice, for sixteen columns.
#[repr(C, align(64))]
struct SliceScales {
    scale: [f32; PANEL_COLUMNS],
    min: [f32; PANEL_COLUMNS],
}

/// Float scales and minimums of a unit with integer scales, for sixteen columns.
#[repr(C, align(64))]
struct UnitScales {
    scale: [f32; PANEL_COLUMNS],
    min: [f32; PANEL_COLUMNS],
    /// Minimums of two slices each, as pairs of i16.
    min_pairs: [[u8; 64]; byte_planes::PAIRS],
}

/// Memory of a thread.
struct AmxScratch {
    ring: Box<UnpackRing>,
    group: Box<byte_planes_many_blocks::UnpackedUnits>,
}

thread_local! {
    /// Kept by each thread, so that only the first step allocates.
    static SCRATCH: RefCell<Option<AmxScratch>> = const { RefCell::new(None) };
}

impl AmxScratch {
    fn new() -> Self {
        // SAFETY: zeros are valid in every field of both.
        let (ring, group) = unsafe { (Box::new_zeroed().assume_init(), Box::new_zeroed().assume_init()) };
        AmxScratch { ring, group }
    }
}

/// Multiplies up to sixteen rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, and the program may use AMX. There is one block of rows, and rows and
/// weights have the same number of units of F. No other thread writes these panels of the output.
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

/// Multiplies any number of rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results.
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

/// Multiplies one block of rows with some panels; the task's panels go on to `end`. W is read once, sequentially, and
/// each unit is unpacked just before its use.
///
/// # Safety
/// As for [`one_block_times_panels`].
unsafe fn one_block<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    end: usize,
    rows: &QuantizedRows,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let layout = F::LAYOUT;
    // SAFETY: passed on from the caller.
    unsafe {
        tile_shapes(&layout, rows.num_rows()).load();
        if const { F::LAYOUT.scaled_by_floats() } {
            float_scales::multiply_panels::<F>(weight, panels, rows, scratch, results);
        } else {
            byte_planes::multiply_panels::<F>(weight, panels, end, rows.block(0), scratch, results);
        }
    }
}

/// Bytes that an unpacked value takes, each in its own plane.
const fn num_planes(layout: &PanelLayout) -> usize {
    if layout.scaled_by_floats() { 1 } else { 2 }
}

/// Tiles 0 to 3 are results, tile 4 is x, tile 5 is W. [`crate::simd::amx`] says why there are no more.
fn tile_shapes(layout: &PanelLayout, num_rows: usize) -> TileConfig {
    let row_bytes = 32 * num_planes(layout);
    let mut config = TileConfig::default();
    (0..4).for_each(|tile| config.set(tile, num_rows, 4 * PANEL_COLUMNS));
    config.set(4, num_rows, row_bytes);
    config.set(5, row_bytes / 4, 4 * PANEL_COLUMNS);
    config
}
