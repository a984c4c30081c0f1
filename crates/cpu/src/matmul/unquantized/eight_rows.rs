//! Five rows and more with AVX-512, eight rows and three panels at a time: a register of W is used eight times and a
//! value of x three times.
//!
//! Up to sixteen rows: W is read once, sequentially, in its own format. Up to eight rows, reading W is the bound.
//! More rows: for each unit of K three panels are converted to f32 once for all rows; the bound is two multiply-adds
//! per cycle. Both process a unit in halves, of which W stays in the first-level cache for several groups of eight
//! rows.

use std::arch::x86_64::_mm512_storeu_ps;
use std::cell::RefCell;
use std::ops::Range;

use super::interleaved_rows::{GROUP, InterleavedRows};
use super::panel_format::{BF16, F16, F32, PanelFormat};
use super::register_tile::{self, HalfUnitWork};
use super::{UNIT, UnquantizedWeight, units};
use crate::matmul::ProductPart;
use crate::matmul::prefetch::{NextPanelsPrefetch, take_panels};
use crate::matmul::result_tiles::{ResultSink, Tile};
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};
use crate::pool::Direction;
use pellucid_tensor::DType;

/// Maximum panels that are multiplied together.
const PANELS: usize = 3;

/// Values of K that are processed at a time: three panels in f32 take 24 KB, which a first-level cache holds.
const HALF_UNIT: usize = UNIT / 2;

/// Groups of rows that are multiplied with one half of a unit before the next half.
const GROUPS: usize = 8;

/// Memory of a thread.
#[repr(C, align(64))]
struct WidenedPanels {
    /// One unit of each panel, in f32.
    values: [[[f32; PANEL_COLUMNS]; UNIT]; PANELS],
    /// Sums of each group over the first half of a unit.
    parts: [[[[f32; PANEL_COLUMNS]; GROUP]; PANELS]; GROUPS],
}

thread_local! {
    /// Kept by each thread, so that only the first step allocates.
    static SCRATCH: RefCell<Box<WidenedPanels>> = RefCell::new(Box::new(WidenedPanels {
        values: [[[0.0; PANEL_COLUMNS]; UNIT]; PANELS],
        parts: [[[[0.0; PANEL_COLUMNS]; GROUP]; PANELS]; GROUPS],
    }));
}

/// Multiplies up to sixteen rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results. Panels are taken in the thread's direction.
///
/// # Safety
/// The machine has AVX-512. There is one block of rows; rows and weights have the same depth, and weights the format of
/// the product. No other thread writes these panels of the output.
pub(in crate::matmul) unsafe fn one_block_times_panels<const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&UnquantizedWeight; WEIGHTS],
    x: &InterleavedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    let multiply = match part.product.weight.dtype {
        DType::F32 => one_block::<F32>,
        DType::F16 => one_block::<F16>,
        DType::BF16 => one_block::<BF16>,
        _ => unreachable!("quantized formats have other kernels"),
    };
    assert!(x.num_rows() <= BLOCK_ROWS, "rows of one block");
    assert_depth(&part, weights, x);
    let direction = part.direction;
    let sink = ResultSink { part, num_rows: x.num_rows() };
    SCRATCH.with_borrow_mut(|scratch| {
        // SAFETY: passed on from the caller; there is a tile of results for every panel.
        unsafe {
            sink.fill::<WEIGHTS>(
                |i, panels, _, results| multiply(weights[i], panels, direction, x, scratch, results),
                join,
            );
        }
    });
}

/// Multiplies any number of rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results.
///
/// # Safety
/// As for [`one_block_times_panels`], for any number of blocks.
pub(in crate::matmul) unsafe fn many_blocks_times_panels<const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&UnquantizedWeight; WEIGHTS],
    x: &InterleavedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    let multiply = match part.product.weight.dtype {
        DType::F32 => many_blocks::<F32>,
        DType::F16 => many_blocks::<F16>,
        DType::BF16 => many_blocks::<BF16>,
        _ => unreachable!("quantized formats have other kernels"),
    };
    assert_depth(&part, weights, x);
    let sink = ResultSink { part, num_rows: x.num_rows() };
    SCRATCH.with_borrow_mut(|scratch| {
        // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
        unsafe {
            sink.fill::<WEIGHTS>(
                |i, panels, blocks, results| multiply(weights[i], panels, x, blocks, scratch, results),
                join,
            );
        }
    });
}

/// Checks that panels are at least as deep as the rows.
fn assert_depth<const WEIGHTS: usize>(
    part: &ProductPart<'_>,
    weights: [&UnquantizedWeight; WEIGHTS],
    x: &InterleavedRows,
) {
    // BF16 is stored in pairs of values.
    let bytes = x.depth().next_multiple_of(2) * PANEL_COLUMNS * part.product.weight.dtype.block_bytes();
    assert!(weights.iter().all(|weight| bytes <= weight.panel_bytes()), "panels are as deep as the rows");
}

/// Number of panels that are multiplied together. Four are taken as two and two: one panel alone has too few
/// independent sums to cover the latency of an instruction.
fn panels_at_once(num_panels: usize) -> usize {
    match num_panels {
        4 => 2,
        _ => num_panels.min(PANELS),
    }
}

/// Some panels times one block of rows; there is a tile of results for every panel.
///
/// # Safety
/// As for [`one_block_times_panels`].
unsafe fn one_block<N: PanelFormat>(
    weight: &UnquantizedWeight,
    panels: Range<usize>,
    direction: Direction,
    x: &InterleavedRows,
    scratch: &mut WidenedPanels,
    results: &mut [Tile<f32>],
) {
    let mut left = panels.clone();
    while !left.is_empty() {
        let len = panels_at_once(left.len());
        let (few, next) = take_panels(&mut left, len, direction, PANELS, weight.num_panels());
        let start = weight.range(few.clone()).as_ptr();
        let to_next = (next.start as isize - few.start as isize) * weight.panel_bytes() as isize;
        let results = results[few.start - panels.start..][..len].as_mut_ptr();
        for unit in units(x.depth()) {
            let before = unit.start * PANEL_COLUMNS * N::SIZE;
            let after = if unit.end < x.depth() {
                Some((unit.len() * PANEL_COLUMNS * N::SIZE) as isize)
            } else {
                (!next.is_empty()).then_some(to_next - before as isize)
            };
            let distance = weight.panel_bytes();
            let w = PanelUnit { start: start.wrapping_add(before), distance, len, range: unit, after };
            let target = ResultPosition { results, distance: 1, block: 0 };
            let parts = scratch.parts.as_mut_ptr();
            // SAFETY: passed on from the caller.
            unsafe { unit_times_groups::<N>(&w, x, 0..x.num_groups(), target, parts) };
        }
    }
}

/// Some panels times some blocks of rows; results are `[panel][block]`.
///
/// # Safety
/// As for [`many_blocks_times_panels`].
unsafe fn many_blocks<N: PanelFormat>(
    weight: &UnquantizedWeight,
    panels: Range<usize>,
    x: &InterleavedRows,
    blocks: Range<usize>,
    scratch: &mut WidenedPanels,
    results: &mut [Tile<f32>],
) {
    const PER_BLOCK: usize = BLOCK_ROWS / GROUP;
    let groups = blocks.start * PER_BLOCK..x.num_groups().min(blocks.end * PER_BLOCK);
    for unit in units(x.depth()) {
        let bytes = unit.start * PANEL_COLUMNS * N::SIZE..unit.end * PANEL_COLUMNS * N::SIZE;
        let mut start = panels.start;
        while start < panels.end {
            let few = start..start + panels_at_once(panels.end - start);
            start = few.end;
            for (panel, values) in few.clone().zip(&mut scratch.values) {
                // SAFETY: the panel has these values; the caller guarantees the features.
                unsafe { widen::<N>(weight.panel(panel).as_ptr(), unit.clone(), values) };
            }
            // Converted next: the same unit of the next panels, or the next unit of the first ones.
            let next = if few.end < panels.end { (few.end, bytes.start) } else { (panels.start, bytes.end) };
            let next = weight.panel(next.0).as_ptr().wrapping_add(next.1);
            let visits = groups.len().div_ceil(GROUPS);
            let mut upcoming = NextPanelsPrefetch::new(next, weight.panel_bytes(), bytes.len(), visits);
            let (start, distance) = (scratch.values.as_ptr().cast(), size_of_val(&scratch.values[0]));
            let w = PanelUnit { start, distance, len: few.len(), range: unit.clone(), after: None };
            let results = results[(few.start - panels.start) * blocks.len()..].as_mut_ptr();
            for first in groups.clone().step_by(GROUPS) {
                upcoming.next_block();
                (0..few.len()).for_each(|panel| upcoming.fetch(panel));
                let groups = first..groups.end.min(first + GROUPS);
                let target = ResultPosition { results, distance: blocks.len(), block: blocks.start };
                let parts = scratch.parts.as_mut_ptr();
                // SAFETY: passed on from the caller.
                unsafe { unit_times_groups::<F32>(&w, x, groups, target, parts) };
            }
        }
    }
}

/// Converts values of a panel to f32.
///
/// # Safety
/// The panel has these values; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
unsafe fn widen<N: PanelFormat>(panel: *const u8, unit: Range<usize>, values: &mut [[f32; PANEL_COLUMNS]; UNIT]) {
    for (k, values) in unit.zip(values) {
        // SAFETY: passed on from the caller.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), N::sixteen(panel, k)) };
    }
}

/// One unit of some panels.
struct PanelUnit {
    /// Start of the unit in the first panel, and the bytes from panel to panel.
    start: *const u8,
    distance: usize,
    /// Number of panels.
    len: usize,
    /// The unit's range of K.
    range: Range<usize>,
    /// Distance in bytes to the unit that is read next, if it is to be prefetched.
    after: Option<isize>,
}

/// Target of results: the tile of the first panel and block, the number of that block, and the distance in tiles from
/// panel to panel.
#[derive(Clone, Copy)]
struct ResultPosition {
    results: *mut Tile<f32>,
    block: usize,
    distance: usize,
}

/// Multiplies one unit of some panels with some groups of rows. Results are overwritten by the first unit and added to
/// by the others.
///
/// # Safety
/// The unit is in the format N; x has these groups, at most [`GROUPS`]; there are `parts` and results for all of them.
/// The machine has AVX-512.
unsafe fn unit_times_groups<N: PanelFormat>(
    w: &PanelUnit,
    x: &InterleavedRows,
    groups: Range<usize>,
    target: ResultPosition,
    parts: *mut [[[f32; PANEL_COLUMNS]; GROUP]; PANELS],
) {
    let unit = &w.range;
    for start in (0..unit.len()).step_by(HALF_UNIT) {
        let len = HALF_UNIT.min(unit.len() - start);
        let ends = start + len == unit.len();
        let half_bytes = (HALF_UNIT * PANEL_COLUMNS * N::SIZE) as isize;
        let next =
            w.after.map(|after| if ends { after - (start * PANEL_COLUMNS * N::SIZE) as isize } else { half_bytes });
        for group in groups.clone() {
            let row = group * GROUP;
            let tile = target.results.wrapping_add(row / BLOCK_ROWS - target.block);
            let work = HalfUnitWork {
                x: x.unit(unit.start, group)[start * GROUP..].as_ptr(),
                w: w.start.wrapping_add(start * PANEL_COLUMNS * N::SIZE),
                w_distance: w.distance,
                len,
                parts: parts.wrapping_add(group - groups.start).cast(),
                begins: start == 0,
                ends,
                // The first group prefetches for all.
                next: next.filter(|_| group == groups.start),
                results: tile.cast::<f32>().wrapping_add(row % BLOCK_ROWS * PANEL_COLUMNS),
                distance: target.distance * BLOCK_ROWS * PANEL_COLUMNS,
                fresh: unit.start == 0,
            };
            // SAFETY: passed on from the caller; rows that a group lacks are zeros in x, and have results within the
            // tile.
            unsafe {
                match (x.num_rows() - row, w.len) {
                    (..=4, 1) => register_tile::multiply::<N, 4, 1>(&work),
                    (..=4, 2) => register_tile::multiply::<N, 4, 2>(&work),
                    (..=4, _) => register_tile::multiply::<N, 4, 3>(&work),
                    (_, 1) => register_tile::multiply::<N, 8, 1>(&work),
                    (_, 2) => register_tile::multiply::<N, 8, 2>(&work),
                    (_, _) => register_tile::multiply::<N, 8, 3>(&work),
                }
            }
        }
    }
}
