//! Several blocks of rows: K is cut into parts. For each part, two panels are unpacked into the first-level cache and
//! multiplied with all blocks, whose same part of K stays in the second-level cache.

use std::cell::RefCell;
use std::ops::Range;

use super::unpacked_panels::{self, SLICES, UnpackedPanel, UnpackedWork};
use crate::matmul::prefetch::NextPanelsPrefetch;
use crate::matmul::quantized::activations::QuantizedRows;
use crate::matmul::quantized::panel_layout::QuantizedFormat;
use crate::matmul::result_tiles::Tile;
use crate::matmul::weight::PackedWeight;
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};

/// Panels that are unpacked together.
const PANELS: usize = 2;

thread_local! {
    /// Kept by each thread, so that only the first step allocates.
    static SCRATCH: RefCell<Box<[UnpackedPanel; PANELS]>> = RefCell::new(Box::new([UnpackedPanel::ZEROS; PANELS]));
}

/// Multiplies the blocks `blocks` of x with the panels `panels` of W; `results` is `[panel][block]`.
///
/// # Safety
/// The machine has AVX-512 with VNNI; `rows` is in `InputOrder::ByWord`, and `rows` and `weight` have the same number
/// of units of F.
pub(super) unsafe fn multiply<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &QuantizedRows,
    blocks: Range<usize>,
    results: &mut [Tile<f32>],
) {
    let layout = F::LAYOUT;
    let units_at_once = SLICES / layout.slices;
    SCRATCH.with_borrow_mut(|scratch| {
        for first in (0..weight.num_units).step_by(units_at_once) {
            let num_units = units_at_once.min(weight.num_units - first);
            let bytes = first * layout.unit_bytes()..(first + num_units) * layout.unit_bytes();
            for start in panels.clone().step_by(PANELS) {
                let few = start..panels.end.min(start + PANELS);
                for (panel, unpacked) in few.clone().zip(scratch.iter_mut()) {
                    // SAFETY: they are whole units of F, no more than the scratch holds; the caller guarantees the
                    // features.
                    unsafe { unpacked.fill::<F>(&weight.panel(panel)[bytes.clone()]) };
                }
                // Unpacked next: the same part of K of the next panels, or the next part of the first panels.
                let next = if few.end < panels.end { (few.end, bytes.start) } else { (panels.start, bytes.end) };
                let next = weight.panel(next.0).as_ptr().wrapping_add(next.1);
                let mut upcoming = NextPanelsPrefetch::new(next, weight.panel_bytes(), bytes.len(), blocks.len());
                for block in blocks.clone() {
                    upcoming.next_block();
                    (0..few.len()).for_each(|panel| upcoming.fetch(panel));
                    let at = (few.start - panels.start) * blocks.len() + block - blocks.start;
                    let mut work = UnpackedWork {
                        panels: scratch.as_ptr(),
                        x: rows.block(block),
                        slice: first * layout.slices,
                        num_slices: num_units * layout.slices,
                        row: 0,
                        results: results[at..].as_mut_ptr().cast(),
                        distance: blocks.len() * BLOCK_ROWS * PANEL_COLUMNS,
                        fresh: first == 0,
                    };
                    while work.row < work.x.num_rows {
                        let left = work.x.num_rows - work.row;
                        // SAFETY: the scratch holds these units of F; the caller guarantees rows ordered by word, and
                        // results with a tile of sixteen rows for every panel and block.
                        unsafe {
                            match (left, few.len()) {
                                (..=4, 2) => unpacked_panels::multiply::<4, 2>(&layout, &work),
                                (..=4, _) => unpacked_panels::multiply::<4, 1>(&layout, &work),
                                (_, 2) => unpacked_panels::multiply::<8, 2>(&layout, &work),
                                (_, _) => unpacked_panels::multiply::<8, 1>(&layout, &work),
                            }
                        }
                        let num_rows = if left <= 4 { 4 } else { 8 };
                        work.row += num_rows;
                        work.results = work.results.wrapping_add(num_rows * PANEL_COLUMNS);
                    }
                }
            }
        }
    });
}
