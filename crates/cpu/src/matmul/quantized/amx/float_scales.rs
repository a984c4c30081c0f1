//! Formats with a float scale for every slice of 32 values: how they are unpacked, and in which order they are
//! multiplied ([`slice_pipeline`]).
//!
//! One block of rows: four panels at a time, each unit unpacked just before its use. Several blocks: K is cut into
//! parts. For each part, a panel is unpacked to bytes in the first-level cache and multiplied with all rows, whose same
//! part of K stays in the second-level cache. Values of 8 bits are not unpacked at all.
//!
//! Keeping the tiles of x in registers for several panels was slower: sums then go to memory and back after every four
//! slices.

use std::arch::x86_64::*;
use std::ops::Range;

use super::slice_pipeline::{self, PanelRun};
use super::{AmxScratch, BLOCK_ROWS, RING_SLICES, Tile, UnpackRing, tile_shapes};
use crate::matmul::prefetch::PacedPrefetch;
use crate::matmul::quantized::activations::QuantizedRows;
use crate::matmul::quantized::avx512::integers;
use crate::matmul::quantized::panel_layout::{Mins, QuantizedFormat};
use crate::matmul::weight::PackedWeight;

/// Units in the ring: all of these formats have two slices in a unit.
pub(super) const RING_CAPACITY_UNITS: usize = RING_SLICES / 2;

/// Up to this number of rows, a kernel that scales only half a block is used.
const HALF_BLOCK: usize = BLOCK_ROWS / 2;

/// Unpacks units with their scales, no more than the ring holds.
///
/// # Safety
/// `units` are whole units of F; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: QuantizedFormat>(units: &[u8], ring: &mut UnpackRing) {
    for (u, unit) in units.chunks_exact(F::LAYOUT.unit_bytes()).enumerate() {
        // SAFETY: passed on from the caller.
        unsafe {
            for slice in 0..2 {
                unpack_slice::<F>(unit.as_ptr(), u, slice, ring);
                let [scale, min] = slice_pipeline::scales::<F>(unit.as_ptr(), slice);
                let to = &mut ring.scales[2 * u + slice];
                _mm512_store_ps(to.scale.as_mut_ptr(), scale);
                if F::LAYOUT.mins == Mins::Float {
                    _mm512_store_ps(to.min.as_mut_ptr(), min);
                }
            }
        }
    }
}

/// Unpacks a slice of a unit to signed bytes, into unit `at` of the ring.
///
/// # Safety
/// `unit` is a whole unit of F; the machine has AVX-512 BW.
#[inline(always)]
pub(super) unsafe fn unpack_slice<F: QuantizedFormat>(unit: *const u8, at: usize, slice: usize, ring: &mut UnpackRing) {
    let to = &mut ring.integers[at * 2 + slice];
    // SAFETY: the caller guarantees a whole unit.
    unsafe {
        let offset = _mm512_set1_epi8(F::LAYOUT.offset_shift.map_or(0, |shift| (1u8 << shift) as i8));
        for (j, integers) in integers::<F>(unit, slice).into_iter().enumerate() {
            _mm512_store_si512(to.as_mut_ptr().add(64 * j).cast(), _mm512_sub_epi8(integers, offset));
        }
    }
}

/// Multiplies one block of rows with some panels, each unpacked unit by unit just before its use; there is a tile of
/// results for each panel.
///
/// # Safety
/// Tiles are configured for the block; the machine has AMX and AVX-512 with VNNI, and rows and weight have the same
/// number of units of F.
pub(super) unsafe fn multiply_panels<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &QuantizedRows,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let ring = &mut scratch.ring;
    let (x, units) = (rows.block(0), weight.panels(panels).as_ptr());
    // SAFETY: passed on from the caller; there is a tile of results for every panel.
    unsafe {
        if rows.num_rows() <= HALF_BLOCK {
            slice_pipeline::multiply_panels::<F, HALF_BLOCK>(ring, x, units, weight.num_units, results);
        } else {
            slice_pipeline::multiply_panels::<F, BLOCK_ROWS>(ring, x, units, weight.num_units, results);
        }
    }
}

/// Multiplies the blocks `blocks` of x with the panels `panels` of W; `results` is `[panel][block]`.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, the program may use AMX, and rows and weight have the same number of
/// units of F.
pub(super) unsafe fn multiply_blocks<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &QuantizedRows,
    blocks: Range<usize>,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let layout = F::LAYOUT;
    let ring = &mut scratch.ring;
    // The last block may have fewer rows, and then needs tiles of another shape.
    let whole = if rows.block(blocks.end - 1).num_rows < BLOCK_ROWS { blocks.end - 1 } else { blocks.end };
    let mut configured = 0;
    for first in (0..weight.num_units).step_by(RING_CAPACITY_UNITS) {
        let num_units = RING_CAPACITY_UNITS.min(weight.num_units - first);
        for (panel, results) in panels.clone().zip(results.chunks_mut(blocks.len())) {
            let units = &weight.panel(panel)[first * layout.unit_bytes()..][..num_units * layout.unit_bytes()];
            if !slice_pipeline::is_direct::<F>() {
                // SAFETY: these are whole units of F; the caller guarantees the features.
                unsafe { unpack::<F>(units, ring) };
            }
            // The same units of the next panel are read next; each block prefetches a share of them.
            let next = weight.panels(panel + 1..panels.end.min(panel + 2));
            let start = next.len().min(first * layout.unit_bytes());
            let next = &next[start..next.len().min(start + units.len())];
            let each = next.len().div_ceil(blocks.len());
            let (whole_results, rest) = results.split_at_mut(whole - blocks.start);
            for (blocks_here, results) in [(blocks.start..whole, whole_results), (whole..blocks.end, rest)] {
                if blocks_here.is_empty() {
                    continue;
                }
                let num_rows = rows.block(blocks_here.start).num_rows;
                if std::mem::replace(&mut configured, num_rows) != num_rows {
                    // SAFETY: the machine has AMX and the program may use it.
                    unsafe { tile_shapes(&layout, num_rows).load() };
                }
                let before = blocks_here.start - blocks.start;
                let ahead = |i: usize| {
                    let start = next.len().min((before + i) * each);
                    PacedPrefetch::new(&next[start..next.len().min(start + each)], num_units)
                };
                let distance = (rows.block_bytes(), BLOCK_ROWS * rows.num_slices());
                // SAFETY: the ring holds these units, the blocks have them too, and tiles are configured for the
                // blocks.
                unsafe {
                    let x = rows.block(blocks_here.start).at_slice(2 * first);
                    let run = PanelRun { x, distance, num_units, fresh: first == 0, units: units.as_ptr() };
                    slice_pipeline::multiply_blocks::<F>(ring, &run, results, ahead);
                }
            }
        }
    }
}
