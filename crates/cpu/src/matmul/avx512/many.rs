//! Several blocks of rows: what is unpacked of two panels stays in the first-level cache, the rows' stretch in the second-level one.

use std::arch::x86_64::{_mm512_setzero_si512, _mm512_store_si512};
use std::cell::RefCell;
use std::ops::Range;

use super::super::activations::{BLOCK, Quantized, RowBlock};
use super::super::ahead::{Ahead, Upcoming};
use super::super::packing::{COLUMNS, Packing};
use super::super::results::Tile;
use super::super::weight::PackedWeight;
use super::kernel::{self, Rows, SLICE_BYTES, Stretch, Unpacked};
use super::unpack::integer;

/// Panels that are unpacked together, and slices of each: 16 KB.
const PANELS: usize = 2;
const SLICES: usize = 16;

#[repr(C, align(64))]
struct Scratch([[[u8; SLICE_BYTES]; SLICES]; PANELS]);

thread_local! {
    /// Kept by each thread so that a step allocates nothing after the first.
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch([[[0; SLICE_BYTES]; SLICES]; PANELS])));
}

/// Some panels times some blocks; results are `[panel][block]`.
///
/// # Safety
/// The machine has AVX-512 with VNNI; rows and weight have the same number of units of F.
pub(super) unsafe fn multiply<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &Quantized,
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
                for (panel, numbers) in few.clone().zip(&mut scratch.0) {
                    // SAFETY: they are whole units of F, no more than the scratch holds; features by the caller's promise.
                    unsafe { unpack::<F>(&weight.panel(panel)[bytes.clone()], numbers) };
                }
                // What is unpacked next: the same stretch of the next panels, or the next stretch of the first ones.
                let next = if few.end < panels.end { (few.end, bytes.start) } else { (panels.start, bytes.end) };
                let next = weight.panel(next.0).as_ptr().wrapping_add(next.1);
                let mut upcoming = Upcoming::new(next, weight.panel_bytes(), bytes.len(), blocks.len());
                let stretch = Stretch {
                    packed: weight.panels(few.clone())[bytes.start..].as_ptr(),
                    panel_bytes: weight.panel_bytes(),
                    numbers: scratch.0.as_ptr().cast(),
                    numbers_bytes: size_of_val(&scratch.0[0]),
                    first,
                    num_units,
                };
                for block in blocks.clone() {
                    upcoming.next_block();
                    (0..few.len()).for_each(|panel| upcoming.fetch(panel));
                    let at = (few.start - panels.start) * blocks.len() + block - blocks.start;
                    let to = Target { results: results[at..].as_mut_ptr(), distance: blocks.len() };
                    // SAFETY: the scratch holds these units; results have a tile for every panel and block.
                    unsafe { multiply_block::<F>(&stretch, few.len(), rows.block(block), to) };
                }
            }
        }
    });
}

/// # Safety
/// They are whole units of F, no more than there are numbers for; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: Packing>(units: &[u8], numbers: &mut [[u8; SLICE_BYTES]; SLICES]) {
    let layout = F::LAYOUT;
    for (unit, numbers) in units.chunks_exact(layout.unit_bytes()).zip(numbers.chunks_exact_mut(layout.slices)) {
        for (slice, numbers) in numbers.iter_mut().enumerate() {
            let mut registers = [_mm512_setzero_si512(); 8];
            // SAFETY: a slice has eight registers, and as many bytes are aligned as they; features by the caller's promise.
            unsafe {
                for j in 0..8 {
                    registers[j] = integer::<F>(unit.as_ptr(), slice, j);
                }
                for j in 0..8 {
                    _mm512_store_si512(numbers.as_mut_ptr().add(64 * j).cast(), registers[j]);
                }
            }
        }
    }
}

/// Where a block's results of the first panel go; those of the next panel lie `distance` tiles further on.
struct Target {
    results: *mut Tile<f32>,
    distance: usize,
}

/// A block of rows.
///
/// # Safety
/// The stretch is of F, unpacked, with as many panels, and there are results for them; the machine has AVX-512 with VNNI.
unsafe fn multiply_block<F: Packing>(stretch: &Stretch, num_panels: usize, x: RowBlock, to: Target) {
    // What is needed next has been asked for.
    let (mut first, mut nothing) = (0, Ahead::new(&[], 1));
    while first < x.num_rows {
        let results = to.results.cast::<f32>().wrapping_add(first * COLUMNS);
        let distance = to.distance * BLOCK * COLUMNS;
        let rows = Rows { x, first, results, distance, fresh: stretch.first == 0 };
        macro_rules! rows {
            ($rows:literal, $panels:literal) => {{
                // SAFETY: passed on from the caller; there are as many panels, and rows end within the block.
                unsafe { kernel::multiply::<F, Unpacked, $rows, $panels>(stretch, &rows, &mut nothing, None) };
                $rows
            }};
        }
        first += match (x.num_rows - first, num_panels) {
            (8.., 2) => rows!(8, 2),
            (8.., _) => rows!(8, 1),
            (4..=7, 2) => rows!(4, 2),
            (4..=7, _) => rows!(4, 1),
            (_, 2) => rows!(1, 2),
            (_, _) => rows!(1, 1),
        };
    }
}
