//! A pipeline for slices of 32 values with float scales: while one slice is multiplied in tiles, the slice two before
//! it is stored, and the slice four before it is scaled by vectors and added to the sums of its rows. The pipeline goes
//! on from block to block ([`multiply_blocks`]), or from panel to panel ([`multiply_panels`]).
//!
//! **Order of instructions.** A slice of 16 x 16 x 32 takes 16 cycles of multiplication, 16 of storing and 48 vector
//! operations (64 with minimums) for two ports of the core, one of which also multiplies tiles: 33 cycles. A core that
//! runs nothing else needs 36 in any order. While another program uses its second hardware thread, the core looks ahead
//! half as far, and an instruction that waits delays those behind it: with all tile instructions before the vector
//! operations a slice took 74 to 91 cycles, with tile instructions spread among them 50 to 57 (2026-11-16, Xeon with
//! AMX). So a quarter or a half of the rows is scaled between a tile instruction and the one that needs its result.

use std::arch::asm;
use std::arch::x86_64::*;

use super::float_scales::{RING_CAPACITY_UNITS, unpack_slice};
use super::slice_macros::{first_half, interleaved, plain_row, row_with_min, second_half};
use super::{BLOCK_ROWS, RING_SLICES, SliceScales, Tile, UnpackRing};
use crate::matmul::prefetch::PacedPrefetch;
use crate::matmul::quantized::activations::RowBlock;
use crate::matmul::quantized::avx512::{float_scales, halves};
use crate::matmul::quantized::panel_layout::{Mins, QuantizedFormat, SLICE_LEN};

/// Units in the ring when units are unpacked just before their use. A small ring is still in the first-level cache when
/// it is overwritten: with sixteen units, products of 16 rows were a fifth slower.
const RING_UNITS: usize = 4;

/// Panels that one block of rows is multiplied with in turns.
const GROUP_PANELS: usize = 4;

/// Units of a panel that are multiplied before the next panel's turn.
const VISIT: usize = 4;

/// Distance in bytes from the prefetched line of W to the one in use, in each of these panels.
const AHEAD_BYTES: usize = 3 * 1024;

/// Units from being multiplied to being scaled.
const LAG: usize = 2;

/// An integer below 2^22 in magnitude, added to the bits of this float, gives the float `MAGIC + integer`.
const MAGIC: f32 = crate::math::ROUND;

/// Blocks of rows to multiply with some units of a panel, no more than the ring holds.
pub(super) struct PanelRun<'a> {
    /// The first block, from the first unit on.
    pub(super) x: RowBlock<'a>,
    /// Distance to the next block: in bytes of integers, and in entries of sums and scales.
    pub(super) distance: (usize, usize),
    /// Units of a block.
    pub(super) num_units: usize,
    /// Whether results are overwritten; otherwise they are added to.
    pub(super) fresh: bool,
    /// The packed units.
    pub(super) units: *const u8,
}

/// The next unit to be multiplied.
struct NextUnit {
    x: *const i8,
    /// Its index among the units.
    at: usize,
    /// Blocks that are left, including this one.
    blocks: usize,
}

/// A slice that has been multiplied and stored, with its scales: those of W in registers, those of x for each row.
struct MultipliedSlice {
    tile: *const Tile<i32>,
    scale: __m512,
    /// `-MAGIC` times the scale.
    excess: __m512,
    mins: __m512,
    x_scales: *const f32,
    x_sums: *const f32,
}

impl MultipliedSlice {
    /// # Safety
    /// The machine has AVX-512 F.
    #[inline(always)]
    unsafe fn new(
        tile: *const Tile<i32>,
        [scale, mins]: [__m512; 2],
        x_scales: *const f32,
        x_sums: *const f32,
    ) -> Self {
        // SAFETY: passed on from the caller.
        unsafe {
            // Exact: MAGIC has 2 significant bits, a scale has at most 17.
            let excess = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
            MultipliedSlice { tile, scale, excess, mins, x_scales, x_sums }
        }
    }
}

/// Whether tiles read the packed values without unpacking.
pub(super) const fn is_direct<F: QuantizedFormat>() -> bool {
    F::LAYOUT.bits == 8
}

/// Scale and minimum of a slice of a unit.
///
/// # Safety
/// The unit is whole; the machine has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn scales<F: QuantizedFormat>(unit: *const u8, slice: usize) -> [__m512; 2] {
    let layout = F::LAYOUT;
    // SAFETY: passed on from the caller.
    unsafe {
        let min = match layout.mins {
            Mins::Float => halves(unit.add(layout.min(slice))),
            _ => _mm512_setzero_ps(),
        };
        [float_scales::<F>(unit, slice), min]
    }
}

/// Scale and minimum of a slice that was unpacked to the ring.
///
/// # Safety
/// As for [`scales`]; the ring has the unit at index `at`, unless tiles read packed values.
#[inline(always)]
unsafe fn unpacked_scales<F: QuantizedFormat>(
    unit: *const u8,
    at: usize,
    slice: usize,
    ring: &UnpackRing,
) -> [__m512; 2] {
    // SAFETY: passed on from the caller.
    unsafe {
        if is_direct::<F>() {
            return scales::<F>(unit, slice);
        }
        let SliceScales { scale, min } = &ring.scales[2 * at + slice];
        [_mm512_load_ps(scale.as_ptr()), _mm512_load_ps(min.as_ptr())]
    }
}

/// Multiplies blocks of rows with some units of one panel; there is a tile of results for each block. Block i
/// prefetches `ahead(i)`.
///
/// # Safety
/// Tiles are configured for the blocks and hold zeros. The ring holds the units, unless tiles read packed values; the
/// blocks have them too. The machine has AMX and AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply_blocks<F: QuantizedFormat>(
    ring: &mut UnpackRing,
    run: &PanelRun<'_>,
    results: &mut [Tile<f32>],
    ahead: impl Fn(usize) -> PacedPrefetch,
) {
    let num_units = run.num_units;
    // SAFETY: the caller guarantees blocks and units. Every index below is within the block's and the ring's arrays;
    // sums and scales can be read for sixteen rows even if a block has fewer.
    unsafe {
        let m = run.x.num_rows;
        let unit_bytes = 2 * SLICE_LEN * m;
        let mut factors = NextUnit { x: run.x.quants, at: 0, blocks: results.len() };
        // After the last unit, the pipeline multiplies some units of the last block again; the products are not used.
        let advance = |factors: &mut NextUnit| {
            factors.x = factors.x.wrapping_add(unit_bytes);
            factors.at += 1;
            if factors.at == num_units {
                let distance = if factors.blocks > 1 { run.distance.0 } else { 0 };
                factors.x = factors.x.wrapping_add(distance).wrapping_sub(num_units * unit_bytes);
                (factors.at, factors.blocks) = (0, factors.blocks.saturating_sub(1));
            }
        };
        let unpacked_slices = ring.integers.as_ptr();
        let unit = |at: usize| run.units.wrapping_add(at * F::LAYOUT.unit_bytes());
        let w = |at: usize, slice: usize| match is_direct::<F>() {
            true => unit(at).add(F::LAYOUT.low(slice)),
            false => unpacked_slices.add(2 * at + slice).cast(),
        };
        let tiles = ring.tiles.as_mut_ptr();
        for unit in 0..LAG {
            multiply_tile::<0>(factors.x, w(factors.at, 0), (unit > 0).then_some(tiles));
            multiply_tile::<1>(factors.x.add(SLICE_LEN), w(factors.at, 1), (unit > 0).then_some(tiles.add(1)));
            advance(&mut factors);
        }
        // Number of units that were scaled.
        let mut n = 0;
        let (mut block_scales, mut block_sums) = (run.x.scales, run.x.sums);
        for (i, result) in results.iter_mut().enumerate() {
            ahead(i).fetch();
            let mut sums = [_mm512_setzero_ps(); BLOCK_ROWS];
            if !run.fresh {
                sums = std::array::from_fn(|r| _mm512_loadu_ps(result[r].as_ptr()));
            }
            let (mut x_scales, mut x_sums) = (block_scales, block_sums);
            for at in 0..num_units {
                let (scaled, stored) = (tiles.add(n % 2 * 2), tiles.add((n + 1) % 2 * 2));
                macro_rules! slice {
                    ($slice:literal) => {{
                        let scales = unpacked_scales::<F>(unit(at), at, $slice, ring);
                        let slice = MultipliedSlice::new(scaled.add($slice), scales, x_scales, x_sums);
                        let (x, to) = (factors.x.add($slice * SLICE_LEN), stored.add($slice));
                        first_half!(slice, sums, F::LAYOUT.mins, BLOCK_ROWS, $slice, x, to);
                        second_half!(slice, sums, F::LAYOUT.mins, BLOCK_ROWS, $slice, w(factors.at, $slice));
                        (x_scales, x_sums) = (x_scales.add(m), x_sums.add(m));
                    }};
                }
                slice!(0);
                slice!(1);
                advance(&mut factors);
                n += 1;
            }
            for r in 0..BLOCK_ROWS {
                _mm512_storeu_ps(result[r].as_mut_ptr(), sums[r]);
            }
            block_scales = block_scales.wrapping_add(run.distance.1);
            block_sums = block_sums.wrapping_add(run.distance.1);
        }
        asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags, nomem));
    }
}

/// The order in which units of adjacent panels are multiplied: panels are taken in groups, and of a group some units of
/// each panel in turn.
#[derive(Clone, Copy)]
struct PanelWalk {
    units: *const u8,
    num_units: usize,
    count: usize,
    unit_bytes: usize,
    /// Units of a panel before the next panel's turn.
    visit: usize,
}

/// A unit in that order.
#[derive(Clone, Copy)]
struct UnitCursor {
    unit: *const u8,
    /// Its index in the panel.
    index: usize,
    panel: usize,
    /// First unit of the panel's turn, and the end of it.
    visit: (usize, usize),
    /// First panel of the group, and the end of it.
    group: (usize, usize),
}

impl PanelWalk {
    /// The first unit of the group that begins with panel `start`.
    fn group(&self, start: usize) -> UnitCursor {
        let unit = self.units.wrapping_add(start * self.num_units * self.unit_bytes);
        let group = (start, self.count.min(start + GROUP_PANELS));
        UnitCursor { unit, index: 0, panel: start, visit: (0, self.num_units.min(self.visit)), group }
    }

    /// The unit after this one; after the last comes the first.
    #[inline(always)]
    fn next(&self, cursor: UnitCursor) -> UnitCursor {
        if cursor.index + 1 < cursor.visit.1 {
            return UnitCursor { unit: cursor.unit.wrapping_add(self.unit_bytes), index: cursor.index + 1, ..cursor };
        }
        self.next_visit(cursor)
    }

    /// The first unit of the next panel's turn.
    #[inline(always)]
    fn next_visit(&self, cursor: UnitCursor) -> UnitCursor {
        let UnitCursor { unit, index, panel, visit, group } = cursor;
        let panel_bytes = self.num_units * self.unit_bytes;
        if panel + 1 < group.1 {
            let unit = unit.wrapping_add(panel_bytes).wrapping_sub((index - visit.0) * self.unit_bytes);
            return UnitCursor { unit, index: visit.0, panel: panel + 1, visit, group };
        }
        if visit.1 == self.num_units {
            return self.group(if group.1 < self.count { group.1 } else { 0 });
        }
        let back = (panel - group.0) * panel_bytes;
        let unit = unit.wrapping_add((visit.1 - index) * self.unit_bytes).wrapping_sub(back);
        let visit = (visit.1, self.num_units.min(visit.1 + self.visit));
        UnitCursor { unit, index: visit.0, panel: group.0, visit, group }
    }
}

/// Multiplies one block of rows with adjacent panels; there is a tile of results for each panel. Several panels are
/// read in turns, because several streams of memory are faster than one; sums are in registers during a panel's turn
/// and in memory between turns.
///
/// # Safety
/// Tiles are configured for the block and hold zeros. At `units` there is a panel of `num_units` units for each tile of
/// results; x has `num_units` units too, and at most ROWS rows. The machine has AMX and AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply_panels<F: QuantizedFormat, const ROWS: usize>(
    ring: &mut UnpackRing,
    x: RowBlock<'_>,
    units: *const u8,
    num_units: usize,
    results: &mut [Tile<f32>],
) {
    let panels = PanelWalk { units, num_units, count: results.len(), unit_bytes: F::LAYOUT.unit_bytes(), visit: VISIT };
    let m = x.num_rows;
    // SAFETY: the caller guarantees block and panels; cursors stay within the panels. Sums and scales can be read for
    // sixteen rows even if the block has fewer; a prefetch may use any address.
    unsafe {
        let fetch = |at: *const u8, part: usize| {
            let lines = panels.unit_bytes / 64;
            for line in part * lines / 4..(part + 1) * lines / 4 {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(64 * line).cast());
            }
        };
        let unpack = |cursor: UnitCursor, n: usize, slice: usize, ring: &mut UnpackRing| {
            if !is_direct::<F>() {
                unpack_slice::<F>(cursor.unit, n % RING_UNITS, slice, ring);
            }
        };
        // Prefetching has its own order, in which all panels of a group advance at the same pace; it goes on beyond the
        // last panel.
        let streams = PanelWalk { count: usize::MAX, visit: 1, ..panels };
        let mut prefetched = streams.group(0);
        for _ in 0..GROUP_PANELS * AHEAD_BYTES.div_ceil(panels.unit_bytes) {
            prefetched = streams.next_visit(prefetched);
        }
        let unpacked_slices = ring.integers.as_ptr();
        let w = |cursor: UnitCursor, n: usize, slice: usize| match is_direct::<F>() {
            true => cursor.unit.add(F::LAYOUT.low(slice)),
            false => unpacked_slices.add(n % RING_UNITS * 2 + slice).cast(),
        };
        let x_slice = |cursor: UnitCursor, slice: usize| x.quants.add((cursor.index * 2 * m + slice) * SLICE_LEN);
        let tiles = ring.tiles.as_mut_ptr();
        // The unit that is multiplied, and the next one, which is unpacked.
        let mut factors = panels.group(0);
        (0..2).for_each(|slice| unpack(factors, 0, slice, ring));
        let mut unpacked = panels.next(factors);
        for n in 0..LAG {
            (0..2).for_each(|slice| unpack(unpacked, n + 1, slice, ring));
            multiply_tile::<0>(x_slice(factors, 0), w(factors, n, 0), (n > 0).then_some(tiles));
            multiply_tile::<1>(x_slice(factors, 1), w(factors, n, 1), (n > 0).then_some(tiles.add(1)));
            (factors, unpacked) = (unpacked, panels.next(unpacked));
        }
        // After the last unit, the pipeline multiplies the first ones again; the products are not used.
        let (mut scaled, mut n) = (panels.group(0), 0);
        while n < num_units * panels.count {
            let result = &mut results[scaled.panel];
            let mut sums = [_mm512_setzero_ps(); BLOCK_ROWS];
            if scaled.index > 0 {
                (0..ROWS).for_each(|r| sums[r] = _mm512_loadu_ps(result[r].as_ptr()));
            }
            for _ in scaled.visit.0..scaled.visit.1 {
                macro_rules! slice {
                    ($slice:literal) => {{
                        let at = (2 * scaled.index + $slice) * m;
                        let scales = scales::<F>(scaled.unit, $slice);
                        let slice = MultipliedSlice::new(
                            tiles.add(n % 2 * 2 + $slice),
                            scales,
                            x.scales.add(at),
                            x.sums.add(at),
                        );
                        let to = tiles.add((n + 1) % 2 * 2 + $slice);
                        first_half!(slice, sums, F::LAYOUT.mins, ROWS, $slice, x_slice(factors, $slice), to);
                        unpack(unpacked, n + LAG + 1, $slice, ring);
                        fetch(prefetched.unit, 2 * $slice);
                        second_half!(slice, sums, F::LAYOUT.mins, ROWS, $slice, w(factors, n + LAG, $slice));
                        fetch(prefetched.unit, 2 * $slice + 1);
                    }};
                }
                slice!(0);
                slice!(1);
                (factors, unpacked, prefetched) = (unpacked, panels.next(unpacked), streams.next_visit(prefetched));
                (scaled.unit, scaled.index, n) = (scaled.unit.wrapping_add(panels.unit_bytes), scaled.index + 1, n + 1);
            }
            (0..ROWS).for_each(|r| _mm512_storeu_ps(result[r].as_mut_ptr(), sums[r]));
            scaled = panels.next_visit(scaled);
        }
        asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags, nomem));
    }
}

/// Multiplies a slice into a tile; if `stored` is given, the tile is stored there and zeroed first.
///
/// # Safety
/// Block and ring have these slices, tiles are configured for them, and without `stored` the tile holds zeros; the
/// machine has AMX.
#[inline(always)]
unsafe fn multiply_tile<const TILE: usize>(x: *const i8, w: *const u8, stored: Option<*mut Tile<i32>>) {
    // SAFETY: passed on from the caller; a tile has at most sixteen rows, like the memory that it is stored to.
    unsafe {
        if let Some(to) = stored {
            asm!(
                "tilestored [{to} + {stride}], tmm{tile}",
                "tilezero tmm{tile}",
                tile = const TILE,
                to = in(reg) to,
                stride = in(reg) 2 * SLICE_LEN,
                options(nostack, preserves_flags),
            );
        }
        asm!(
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm5, [{w} + {stride}]",
            "tdpbssd tmm{tile}, tmm4, tmm5",
            "tilezero tmm4",
            "tilezero tmm5",
            tile = const TILE,
            x = in(reg) x,
            w = in(reg) w,
            stride = in(reg) 2 * SLICE_LEN,
            options(nostack, preserves_flags, readonly),
        );
    }
}

const _: () = assert!(RING_SLICES == 2 * RING_CAPACITY_UNITS && LAG + 1 < RING_UNITS);
