//! One block of rows.

use std::ops::Range;

use super::super::activations::{BLOCK, Quantized};
use super::super::ahead::Ahead;
use super::super::packing::{COLUMNS, Packing};
use super::super::results::Tile;
use super::super::weight::PackedWeight;
use super::kernel::{self, MANY_PANELS, Packed, Rows, Stretch};
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
        // And what is likely to be read after them, in this task or in the thread's next one.
        let (group, next) = match direction {
            Direction::Up => {
                let group = left.start..left.start + len;
                left.start = group.end;
                (group.clone(), group.end..weight.num_panels().min(group.end + len))
            }
            Direction::Down => {
                let group = left.end - len..left.end;
                left.end = group.start;
                (group.clone(), group.start.saturating_sub(len)..group.start)
            }
        };
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
    let x = rows.block(0);
    let mut ahead = Ahead::new(weight.panels(next.clone()), rows.num_slices());
    let following = (next.start as isize - panels.start as isize) * weight.panel_bytes() as isize;
    let following = (!next.is_empty()).then_some(following);
    let (start, panel_bytes) = (weight.panels(panels.clone()).as_ptr(), weight.panel_bytes());
    let w = Stretch {
        packed: start,
        panel_bytes,
        numbers: start,
        numbers_bytes: panel_bytes,
        first: 0,
        num_units: weight.num_units,
    };
    let (results, distance) = (results.as_mut_ptr().cast::<f32>(), BLOCK * COLUMNS);
    let mut first = 0;
    while first < x.num_rows {
        let rows = Rows { x, first, results: results.wrapping_add(first * COLUMNS), distance, fresh: true };
        macro_rules! rows {
            ($rows:literal, $panels:literal) => {{
                // SAFETY: passed on from the caller; there are as many panels, and rows end within the block.
                unsafe { kernel::multiply::<F, Packed, $rows, $panels>(&w, &rows, &mut ahead, following) };
                $rows
            }};
        }
        first += match (x.num_rows - first, panels.len()) {
            (1, 4) => rows!(1, 4),
            (1, 3) => rows!(1, 3),
            (1, 2) => rows!(1, 2),
            (1, _) => rows!(1, 1),
            (2, 4) => rows!(2, 4),
            (2, 2) => rows!(2, 2),
            (2, _) => rows!(2, 1),
            (3, 4) => rows!(3, 4),
            (3, 2) => rows!(3, 2),
            (3, _) => rows!(3, 1),
            (4..=7, 2) => rows!(4, 2),
            (4..=7, _) => rows!(4, 1),
            (_, 2) => rows!(8, 2),
            (_, _) => rows!(8, 1),
        };
    }
}
