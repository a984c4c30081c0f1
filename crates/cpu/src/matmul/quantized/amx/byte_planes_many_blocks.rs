//! K formats, several blocks of rows: a tile of x is multiplied with two panels of W, whose unpacked values stay in the
//! first-level cache.
//!
//! For each unit of 256 values, two panels are unpacked to [`byte_planes`]; then block after block is multiplied with
//! both. While one block is multiplied, the tiles of the block before it are scaled.
//!
//! A product of 16 x 16 x 32 takes 16 cycles of tile multiplication and 12 of vectors. In this order it takes 27 cycles
//! when the program has the core for itself, and 38 to 50 while another program uses the second hardware thread
//! (2026-11-16, Xeon with AMX).

use std::arch::asm;
use std::ops::Range;

use super::scale_rows::{ROWS_AT_ONCE, ScaledRows, UnitScaleRegisters, plain_row, row_with_min, scale_four};
use super::{AmxScratch, BLOCK_ROWS, Tile, UnitScales, byte_planes};
use crate::matmul::prefetch::NextPanelsPrefetch;
use crate::matmul::quantized::activations::{QuantizedRows, RowBlock};
use crate::matmul::quantized::panel_layout::{QuantizedFormat, Scales};
use crate::matmul::weight::PackedWeight;
use crate::simd::amx::TileConfig;

/// Tiles of x in a unit: 64 values each.
const QUAD: usize = 4;
/// Panels that are unpacked together: they take 16 KB, and their results four tiles.
const PANELS: usize = 2;

/// One unit of up to [`PANELS`] panels, unpacked, and the memory that holds tiles between multiplying and scaling.
#[repr(C, align(64))]
pub(super) struct UnpackedUnits {
    /// `[panel][pair of slices][high, low][slice]`
    bytes: [[u8; 512]; PANELS * QUAD * 4],
    scales: [UnitScales; PANELS],
    /// `[panel][high, low]`
    tiles: [[Tile<i32>; 2]; PANELS],
}

/// One unit of some blocks with the same number of rows, and where their results go.
struct BlockRange<'a> {
    rows: &'a QuantizedRows,
    blocks: Range<usize>,
    unit: usize,
    /// The tile of the first block and the first panel, followed by those of the other blocks; the next panel's are
    /// `distance` tiles on.
    results: *mut Tile<f32>,
    distance: usize,
    /// Tiles from `results` to the end of the memory that holds them.
    num_results: usize,
    num_panels: usize,
}

/// Multiplies the blocks `blocks` of x with the panels `panels` of W; `results` is `[panel][block]`.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, and the program may use AMX.
///
/// # Panics
/// When rows and weight have not the same number of units of F, when a block or a panel does not exist, or when
/// `results` is too short.
pub(super) unsafe fn multiply<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &QuantizedRows,
    blocks: Range<usize>,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let layout = F::LAYOUT;
    assert_eq!(rows.num_slices(), weight.num_units * layout.slices, "rows and weight have the same number of units");
    assert!(!blocks.is_empty() && blocks.end <= rows.num_blocks() && panels.end <= weight.num_panels());
    assert!(panels.len() * blocks.len() <= results.len(), "a tile of results for every panel and block");
    let num_results = results.len();
    let group = &mut scratch.group;
    let results = results.as_mut_ptr();
    // The last block may have fewer rows, and then needs tiles of another shape.
    let whole = if rows.block(blocks.end - 1).num_rows < BLOCK_ROWS { blocks.end - 1 } else { blocks.end };
    let mut configured = 0;
    for unit in 0..weight.num_units {
        let bytes = unit * layout.unit_bytes()..(unit + 1) * layout.unit_bytes();
        for start in panels.clone().step_by(PANELS) {
            let few = start..panels.end.min(start + PANELS);
            for (i, panel) in few.clone().enumerate() {
                // SAFETY: it is a whole unit of F; the caller guarantees the features.
                unsafe { unpack::<F>(&weight.panel(panel)[bytes.clone()], i, group) };
            }
            // Unpacked next: the same unit of the next panels, or the next unit of the first ones.
            let next = if few.end < panels.end { (few.end, bytes.start) } else { (panels.start, bytes.end) };
            let next = weight.panel(next.0).as_ptr().wrapping_add(next.1);
            for part in [blocks.start..whole, whole..blocks.end] {
                if part.is_empty() {
                    continue;
                }
                let num_rows = rows.block(part.start).num_rows;
                if std::mem::replace(&mut configured, num_rows) != num_rows {
                    // SAFETY: the machine has AMX and the program may use it.
                    unsafe { tile_shapes(num_rows).load() };
                }
                let mut ahead = NextPanelsPrefetch::new(next, weight.panel_bytes(), bytes.len(), part.len());
                let first_result = (few.start - panels.start) * blocks.len() + part.start - blocks.start;
                let work = BlockRange {
                    rows,
                    unit,
                    results: results.wrapping_add(first_result),
                    num_results: num_results - first_result,
                    distance: blocks.len(),
                    num_panels: few.len(),
                    blocks: part,
                };
                // SAFETY: the group holds these panels; tiles are configured for the blocks; by the assertions above,
                // blocks and unit exist, and there is a tile of results for every panel and block.
                unsafe { multiply_units::<F>(group, &work, &mut ahead) };
            }
        }
    }
}

/// Unpacks a unit of a panel into `group`.
///
/// # Safety
/// `unit` is a whole unit of F; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: QuantizedFormat>(unit: &[u8], panel: usize, group: &mut UnpackedUnits) {
    debug_assert!(panel < PANELS && unit.len() == F::LAYOUT.unit_bytes());
    for pair in 0..QUAD {
        let to = group.bytes[(panel * QUAD + pair) * 4..].as_mut_ptr();
        for second in 0..2 {
            // SAFETY: passed on from the caller.
            unsafe { byte_planes::unpack_slice::<F>(unit.as_ptr(), pair, second, to, &mut group.scales[panel]) };
        }
    }
}

/// Tiles 0 to 3 are results of two panels, tile 4 is x, tile 5 is W. [`crate::simd::amx`] says why there are no more.
fn tile_shapes(num_rows: usize) -> TileConfig {
    let mut config = TileConfig::default();
    (0..5).for_each(|tile| config.set(tile, num_rows, 64));
    config.set(5, 16, 64);
    config
}

/// Multiplies the tile of x with two slices of a panel, in the high and in the low plane.
macro_rules! multiply_pair {
    ([$dot_high:literal, $dot_low:literal], $w:expr, $high:literal, $low:literal) => {
        asm!(
            "tileloadd tmm5, [{w} + {stride}]",
            concat!($dot_high, " tmm", $high, ", tmm4, tmm5"),
            "tileloadd tmm5, [{w} + {stride} + 1024]",
            concat!($dot_low, " tmm", $low, ", tmm4, tmm5"),
            w = in(reg) $w,
            stride = in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        )
    };
}

/// Like `multiply_pair`, and scales four rows of the previous block between the tile instructions.
macro_rules! multiply_and_scale {
    (
        [$dot_high:literal, $dot_low:literal], $w:expr, $high:literal, $low:literal,
        $scales:expr, $registers:expr, $rows:expr
    ) => {
        scale_four!(
            $scales, $registers, $rows,
            [
                "tileloadd tmm5, [{w} + {stride}]",
                concat!($dot_high, " tmm", $high, ", tmm4, tmm5"),
                "tileloadd tmm5, [{w} + {stride} + 1024]",
                concat!($dot_low, " tmm", $low, ", tmm4, tmm5")
            ],
            w = in(reg) $w,
            stride = in(reg) 64usize,
        )
    };
}

/// Stores the two tiles of a panel and zeroes them.
macro_rules! store_pair {
    ($tiles:expr, $high:literal, $low:literal) => {
        asm!(
            concat!("tilestored [{high} + {stride}], tmm", $high),
            concat!("tilezero tmm", $high),
            concat!("tilestored [{low} + {stride}], tmm", $low),
            concat!("tilezero tmm", $low),
            high = in(reg) $tiles[0].as_mut_ptr(),
            low = in(reg) $tiles[1].as_mut_ptr(),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags),
        )
    };
}

/// Multiplies blocks with the panels of a group, one unit of each.
///
/// # Safety
/// The group holds `work.num_panels` panels; tiles are configured for the blocks; blocks and unit exist, and there is a
/// tile of results for every panel and block. The machine has AMX and AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply_units<F: QuantizedFormat>(
    group: &mut UnpackedUnits,
    work: &BlockRange<'_>,
    ahead: &mut NextPanelsPrefetch,
) {
    let UnpackedUnits { bytes, scales, tiles } = group;
    let first_slice = 2 * QUAD * work.unit;
    let both = work.num_panels == PANELS;
    let fresh = work.unit == 0;
    debug_assert!((1..=PANELS).contains(&work.num_panels) && work.blocks.end <= work.rows.num_blocks());
    debug_assert!(first_slice + 2 * QUAD <= work.rows.num_slices());
    debug_assert!((work.num_panels - 1) * work.distance + work.blocks.len() <= work.num_results);
    // SAFETY: the caller guarantees that blocks, unit, panels and results exist. Every offset below is within them:
    // slices `first_slice` to `first_slice + 2 * QUAD` of a block, rows below `num_rows` of a tile, and tiles `panel *
    // distance + step` of the results. Sums and scales of x can be read for sixteen rows even where a block has fewer.
    unsafe {
        let registers = [UnitScaleRegisters::load(&scales[0]), UnitScaleRegisters::load(&scales[1])];
        let load_x = |x: *const i8| {
            asm!("tileloadd tmm4, [{} + {}]", in(reg) x, in(reg) 64usize, options(nostack, preserves_flags, readonly));
        };
        // While one block is multiplied, the tiles of the previous block are scaled.
        let mut scaled: Option<(RowBlock<'_>, *mut Tile<f32>)> = None;
        for step in 0..=work.blocks.len() {
            let multiplied = (step < work.blocks.len()).then(|| work.rows.block(work.blocks.start + step));
            ahead.next_block();
            for pair in 0..QUAD {
                if let Some(x) = &multiplied {
                    load_x(x.slice(first_slice + 2 * pair, 0));
                    if pair < work.num_panels {
                        ahead.fetch(pair);
                    }
                }
                macro_rules! panel {
                    ($panel:literal, $high:literal, $low:literal) => {
                        let w = bytes[4 * (QUAD * $panel + pair)..].as_ptr();
                        let rows =
                            scaled.as_ref().filter(|(x, _)| ROWS_AT_ONCE * pair < x.num_rows).map(|(x, results)| {
                                let results = results.wrapping_add($panel * work.distance);
                                ScaledRows::new(&tiles[$panel], x, work.unit, ROWS_AT_ONCE * pair, fresh, results)
                            });
                        let scales = F::LAYOUT.scales;
                        match (&multiplied, rows) {
                            (Some(_), Some(rows)) if scales == Scales::PerHalfSlice => {
                                multiply_and_scale!(
                                    ["tdpbssd", "tdpbsud"],
                                    w,
                                    $high,
                                    $low,
                                    scales,
                                    registers[$panel],
                                    rows
                                )
                            }
                            (Some(_), Some(rows)) => {
                                multiply_and_scale!(
                                    ["tdpbsud", "tdpbsud"],
                                    w,
                                    $high,
                                    $low,
                                    scales,
                                    registers[$panel],
                                    rows
                                )
                            }
                            (Some(_), None) if scales == Scales::PerHalfSlice => {
                                multiply_pair!(["tdpbssd", "tdpbsud"], w, $high, $low)
                            }
                            (Some(_), None) => multiply_pair!(["tdpbsud", "tdpbsud"], w, $high, $low),
                            (None, Some(rows)) => scale_four!(scales, registers[$panel], rows, ["", "", "", ""],),
                            (None, None) => {}
                        }
                    };
                }
                panel!(0, "0", "1");
                if both {
                    panel!(1, "2", "3");
                }
            }
            if multiplied.is_some() {
                store_pair!(tiles[0], "0", "1");
                if both {
                    store_pair!(tiles[1], "2", "3");
                }
            }
            scaled = multiplied.map(|x| (x, work.results.wrapping_add(step)));
        }
    }
}
