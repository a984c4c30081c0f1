//! One block of rows.

use std::ops::Range;

use super::super::activations::{BLOCK, Order, Quantized};
use super::super::ahead::{Ahead, take_panels};
use super::super::amx_rows;
use super::super::packing::{COLUMNS, Packing};
use super::super::results::Tile;
use super::super::weight::PackedWeight;
use super::kernel::{self, ByRows, ByWords, MANY_PANELS, Panels, Rows};
use crate::pool::Direction;

/// Some panels times the block; there is a tile of results for each.
///
/// # Safety
/// The machine has AVX-512 with VNNI; rows and weight have the same number of units of F, and there is one block.
pub(super) unsafe fn multiply<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    direction: Direction,
    rows: &Quantized,
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

/// How many of so many panels are multiplied at once: enough sums to fill the time that an instruction takes.
fn panels_at_once(num_rows: usize, num_panels: usize) -> usize {
    match (num_rows, num_panels) {
        (1, _) => num_panels.min(MANY_PANELS),
        (2 | 3, 4..) => MANY_PANELS,
        _ => num_panels.min(2),
    }
}

/// As many panels as [`panels_at_once`] says. The `next` ones are asked for.
///
/// # Safety
/// As for `multiply`.
unsafe fn multiply_group<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    next: Range<usize>,
    rows: &Quantized,
    results: &mut [Tile<f32>],
) {
    let (x, order) = (rows.block(0), rows.order());
    let mut ahead = Ahead::new(weight.panels(next.clone()), rows.num_slices());
    let following = (next.start as isize - panels.start as isize) * weight.panel_bytes() as isize;
    let following = (!next.is_empty()).then_some(following);
    let start = weight.panels(panels.clone()).as_ptr();
    let w = Panels { start, panel_bytes: weight.panel_bytes(), num_units: weight.num_units };
    let (results, distance) = (results.as_mut_ptr().cast::<f32>(), BLOCK * COLUMNS);
    let mut first = 0;
    while first < x.num_rows {
        let rows = Rows { x, first, results: results.wrapping_add(first * COLUMNS), distance };
        macro_rules! rows {
            ($order:ident, $rows:literal, $panels:literal) => {{
                // SAFETY: passed on from the caller; there are as many panels, and rows end within the block or, by words, its tile.
                unsafe { kernel::multiply::<F, $order, $rows, $panels>(&w, &rows, &mut ahead, following) };
                $rows
            }};
        }
        first += match (order, x.num_rows - first, panels.len()) {
            (Order::Words, ..=4, 2) => rows!(ByWords, 4, 2),
            (Order::Words, ..=4, _) => rows!(ByWords, 4, 1),
            (Order::Words, _, 2) => rows!(ByWords, 8, 2),
            (Order::Words, _, _) => rows!(ByWords, 8, 1),
            (Order::Rows, 1, 4) => rows!(ByRows, 1, 4),
            (Order::Rows, 1, 3) => rows!(ByRows, 1, 3),
            (Order::Rows, 1, 2) => rows!(ByRows, 1, 2),
            (Order::Rows, 1, _) => rows!(ByRows, 1, 1),
            (Order::Rows, 2, 4) => rows!(ByRows, 2, 4),
            (Order::Rows, 2, 2) => rows!(ByRows, 2, 2),
            (Order::Rows, 2, _) => rows!(ByRows, 2, 1),
            (Order::Rows, 3, 4) => rows!(ByRows, 3, 4),
            (Order::Rows, 3, 2) => rows!(ByRows, 3, 2),
            (Order::Rows, 3, _) => rows!(ByRows, 3, 1),
            // More rows than four lie by rows for the sake of tiles, and come here where tiles would be slower: a matter of the format.
            (Order::Rows, 8.., num_panels) if const { amx_rows(&F::LAYOUT) > 8 } => match num_panels {
                2 => rows!(ByRows, 8, 2),
                _ => rows!(ByRows, 8, 1),
            },
            (Order::Rows, _, 2) => rows!(ByRows, 4, 2),
            (Order::Rows, _, _) => rows!(ByRows, 4, 1),
        };
    }
}
