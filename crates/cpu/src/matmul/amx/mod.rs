//! Products with quantized weights by AMX, for many rows: `tdpbssd` multiplies a tile of 16 rows by 64 numbers with one of 64 numbers by
//! 16 columns, and adds up exactly.
//!
//! Where a float scales every 32 numbers (Q4_0, Q8_0, ...), a tile of 32 goes to memory after one instruction ([`slices`]). Where integers
//! scale them (the K formats), the scale is multiplied into the numbers beforehand; the products of up to 13 bits make two tiles of
//! bytes, high and low, and a sum ends after 256 numbers ([`planes`]).
//!
//! Many rows: sixteen panels of W stay with a thread, and each is unpacked once for all of its rows ([`slices`], [`blocks`]). One block of
//! rows: as panels lie in memory, one after the other or four side by side.

mod blocks;
mod planes;
mod rows;
mod slices;
mod stream;

use std::cell::RefCell;
use std::ops::Range;

use super::Product;
use super::activations::{BLOCK, Quantized};
use super::ahead::Ahead;
use super::packing::{COLUMNS, Layout, Packing, Scales};
use super::weight::PackedWeight;
use crate::memory::Buffer;
use crate::simd::amx::{TileConfig, release_tiles};

/// Slices of which a ring holds the bytes, 16 KB: a third of the first-level cache. Half as many where a number takes two.
const CHUNK_SLICES: usize = 32;

/// Panels that a thread keeps together for [`MAX_BLOCKS`] blocks of rows: results take 512 KB, and the rows' stretch as much, of a
/// second-level cache of 2 MB. The more panels, the less often rows come from farther away.
const MAX_PANELS: usize = 16;
const MAX_BLOCKS: usize = 32;

/// Sixteen rows of sixteen columns.
type Tile<T> = [[T; COLUMNS]; BLOCK];

/// Rings of what was unpacked of a panel; and where tiles go between multiplying and scaling.
#[repr(C, align(64))]
struct Chunk {
    /// Each slice as `packing` says that it unpacks. Of two planes, two slices of the high one are followed by those of the low one.
    integers: [[u8; 512]; CHUNK_SLICES],
    /// Of each slice, where floats scale them.
    scales: [SliceScales; CHUNK_SLICES],
    /// Of each unit, where integers do.
    unit_scales: [UnitScales; planes::SCALE_UNITS],
    tiles: [Tile<i32>; 4],
}

/// What scales a slice, for sixteen columns.
#[repr(C, align(64))]
struct SliceScales {
    scale: [f32; COLUMNS],
    min: [f32; COLUMNS],
}

/// What scales a unit whose slices have integers as scales, for sixteen columns.
#[repr(C, align(64))]
struct UnitScales {
    scale: [f32; COLUMNS],
    min: [f32; COLUMNS],
    /// The minimums of two slices each, as pairs of i16.
    min_pairs: [[u8; 64]; planes::PAIRS],
}

struct Scratch {
    chunk: Box<Chunk>,
    group: Box<blocks::Group>,
    /// `[panel][block]`
    results: Buffer<Tile<f32>>,
}

thread_local! {
    /// Kept by each thread so that a step allocates nothing after the first.
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

impl Scratch {
    fn new() -> Self {
        // SAFETY: zeros are valid in every field of both.
        let (chunk, group) = unsafe { (Box::new_zeroed().assume_init(), Box::new_zeroed().assume_init()) };
        Scratch { chunk, group, results: Buffer::default() }
    }
}

/// Some panels for all rows, written to the product's output.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, the program may use AMX, and rows and weight have the same number of units of F. No other
/// thread writes these panels, and the output is alive.
pub(super) unsafe fn rows_times_panels<F: Packing>(
    product: &Product<'_>,
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &Quantized,
) {
    SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(Scratch::new);
        // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
        unsafe {
            let end = panels.end;
            if rows.num_blocks() == 1 && F::LAYOUT.scales != Scales::Plain {
                // Nobody has asked for the first panel; each of them asks for the next.
                Ahead::new(weight.panels(panels.start..end.min(panels.start + 1)), 1).fetch();
            }
            for start in panels.step_by(MAX_PANELS) {
                let panels = start..end.min(start + MAX_PANELS);
                if rows.num_blocks() == 1 {
                    one_block::<F>(weight, panels.clone(), end, rows, scratch);
                    write(product, panels, rows, 0..1, &scratch.results);
                    continue;
                }
                for block in (0..rows.num_blocks()).step_by(MAX_BLOCKS) {
                    let blocks = block..rows.num_blocks().min(block + MAX_BLOCKS);
                    match F::LAYOUT.scales {
                        Scales::Plain => {
                            slices::multiply_blocks::<F>(weight, panels.clone(), rows, blocks.clone(), scratch);
                        }
                        _ => blocks::multiply::<F>(weight, panels.clone(), rows, blocks.clone(), scratch),
                    }
                    write(product, panels.clone(), rows, blocks, &scratch.results);
                }
            }
            release_tiles();
        }
    });
}

/// Rows of one block: W is read once, from end to end, and unpacked on the way. There are more panels to come, up to `end`.
///
/// # Safety
/// As for `rows_times_panels`; there is one block.
unsafe fn one_block<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    end: usize,
    rows: &Quantized,
    scratch: &mut Scratch,
) {
    let layout = F::LAYOUT;
    // SAFETY: the machine has AMX and the program may use it; panel and block hold as many units.
    unsafe {
        tile_shapes(&layout, rows.num_rows()).load();
        match layout.scales {
            Scales::Plain => slices::multiply_panels::<F>(weight, panels, rows, scratch),
            _ => planes::multiply_panels::<F>(weight, panels, end, rows.block(0), scratch),
        }
    }
}

/// Row by row, so that what a row gets is one stretch of memory: its panels lie side by side.
///
/// # Safety
/// As for `rows_times_panels`, and `results` has a tile for every panel and block.
#[target_feature(enable = "avx512f")]
unsafe fn write(
    product: &Product<'_>,
    panels: Range<usize>,
    rows: &Quantized,
    blocks: Range<usize>,
    results: &[Tile<f32>],
) {
    for row in blocks.start * BLOCK..rows.num_rows().min(blocks.end * BLOCK) {
        let block = row / BLOCK - blocks.start;
        for (p, panel) in panels.clone().enumerate() {
            // SAFETY: passed on from the caller.
            unsafe { product.put(row, panel, &results[p * blocks.len() + block][row % BLOCK]) };
        }
    }
}

/// Bytes that a number takes, each in a tile of its own.
const fn num_planes(layout: &Layout) -> usize {
    if matches!(layout.scales, Scales::Plain) { 1 } else { 2 }
}

/// Tiles 0 to 3 are results, 4 is rows of x, 5 of W: no more than that, see [`crate::simd::amx`].
fn tile_shapes(layout: &Layout, num_rows: usize) -> TileConfig {
    let numbers = 32 * num_planes(layout);
    let mut config = TileConfig::default();
    (0..4).for_each(|tile| config.set(tile, num_rows, 4 * COLUMNS));
    config.set(4, num_rows, numbers);
    config.set(5, numbers / 4, 4 * COLUMNS);
    config
}
