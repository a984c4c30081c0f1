//! One block of rows: how many panels and rows are multiplied together.

use std::ops::Range;

use super::packed_panels::{self, AdjacentPanels, BlockRows, ByRows, ByWords, MANY_PANELS};
use crate::matmul::kernel::min_rows_amx;
use crate::matmul::prefetch::{PacedPrefetch, take_panels};
use crate::matmul::quantized::activations::{InputOrder, QuantizedRows};
use crate::matmul::quantized::panel_layout::QuantizedFormat;
use crate::matmul::result_tiles::Tile;
use crate::matmul::weight::PackedWeight;
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};
use crate::pool::Direction;

/// Multiplies some panels with the block; there is a tile of results for each panel.
///
/// # Safety
/// The machine has AVX-512 with VNNI; rows and weight have the same number of units of F, and there is one block.
pub(super) unsafe fn multiply<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    direction: Direction,
    rows: &QuantizedRows,
    results: &mut [Tile<f32>],
) {
    let mut left = panels.clone();
    while !left.is_empty() {
        let len = panels_at_once(rows.num_rows(), left.len());
        let (group, next) = take_panels(&mut left, len, direction, len, weight.num_panels());
        let results = &mut results[group.start - panels.start..][..len];
        // SAFETY: passed on from the caller.
        unsafe { multiply_group::<F>(weight, group, next, rows, results) };
    }
}

/// Number of panels that are multiplied together: enough independent sums to cover the latency of an instruction.
fn panels_at_once(num_rows: usize, num_panels: usize) -> usize {
    match (num_rows, num_panels) {
        (1, _) => num_panels.min(MANY_PANELS),
        (2 | 3, 4..) => MANY_PANELS,
        _ => num_panels.min(2),
    }
}

/// Multiplies a group of panels, whose number is that of [`panels_at_once`], and prefetches the `next` ones.
///
/// # Safety
/// As for [`multiply`].
unsafe fn multiply_group<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    next: Range<usize>,
    rows: &QuantizedRows,
    results: &mut [Tile<f32>],
) {
    let (x, order) = (rows.block(0), rows.order());
    let mut ahead = PacedPrefetch::new(weight.panels(next.clone()), rows.num_slices());
    let following = (next.start as isize - panels.start as isize) * weight.panel_bytes() as isize;
    let following = (!next.is_empty()).then_some(following);
    let start = weight.panels(panels.clone()).as_ptr();
    let w = AdjacentPanels { start, panel_bytes: weight.panel_bytes(), num_units: weight.num_units };
    let (results, distance) = (results.as_mut_ptr().cast::<f32>(), BLOCK_ROWS * PANEL_COLUMNS);
    let mut first = 0;
    while first < x.num_rows {
        let rows = BlockRows { x, first, results: results.wrapping_add(first * PANEL_COLUMNS), distance };
        macro_rules! rows {
            ($order:ident, $rows:literal, $panels:literal) => {{
                // SAFETY: passed on from the caller; the panels exist, and rows end within the block or, ordered by
                // word, within its tile.
                unsafe { packed_panels::multiply::<F, $order, $rows, $panels>(&w, &rows, &mut ahead, following) };
                $rows
            }};
        }
        first += match (order, x.num_rows - first, panels.len()) {
            (InputOrder::ByWord, ..=4, 2) => rows!(ByWords, 4, 2),
            (InputOrder::ByWord, ..=4, _) => rows!(ByWords, 4, 1),
            (InputOrder::ByWord, _, 2) => rows!(ByWords, 8, 2),
            (InputOrder::ByWord, _, _) => rows!(ByWords, 8, 1),
            (InputOrder::ByRow, 1, 4) => rows!(ByRows, 1, 4),
            (InputOrder::ByRow, 1, 3) => rows!(ByRows, 1, 3),
            (InputOrder::ByRow, 1, 2) => rows!(ByRows, 1, 2),
            (InputOrder::ByRow, 1, _) => rows!(ByRows, 1, 1),
            (InputOrder::ByRow, 2, 4) => rows!(ByRows, 2, 4),
            (InputOrder::ByRow, 2, 2) => rows!(ByRows, 2, 2),
            (InputOrder::ByRow, 2, _) => rows!(ByRows, 2, 1),
            (InputOrder::ByRow, 3, 4) => rows!(ByRows, 3, 4),
            (InputOrder::ByRow, 3, 2) => rows!(ByRows, 3, 2),
            (InputOrder::ByRow, 3, _) => rows!(ByRows, 3, 1),
            // More than four rows are ordered by row on machines with AMX only; formats for which AMX begins later come
            // here.
            (InputOrder::ByRow, 8.., num_panels) if const { min_rows_amx(&F::LAYOUT) > 8 } => match num_panels {
                2 => rows!(ByRows, 8, 2),
                _ => rows!(ByRows, 8, 1),
            },
            (InputOrder::ByRow, _, 2) => rows!(ByRows, 4, 2),
            (InputOrder::ByRow, _, _) => rows!(ByRows, 4, 1),
        };
    }
}
