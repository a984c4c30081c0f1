//! Many blocks of rows: the tiles of x stay in registers for several panels of W, whose unpacked numbers stay in the first-level cache.
//!
//! A *quad* is what four tiles of x hold: four slices, or a unit of 256 numbers of the K formats. For each quad, a few panels are unpacked;
//! then block after block loads its four tiles, and multiplies them with panel after panel. While one panel is multiplied, what the one
//! before it left in tiles is scaled: the multiplication takes as long as the scaling, and neither waits for the other.
//!
//! For 16 x 16 x 32, loading W, multiplying and storing take turns: 5 + 16 + 16 cycles for slices, 9 + 16 + 4 for planes. Measured for slices in
//! a loop of its own: 53 cycles, and 68 where another program shares the core; 64 and 106 with x and W loaded anew for each tile
//! (2026-11-15, Xeon with AMX at 2.3 GHz).

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::Quantized;
use super::super::packing::{Layout, Packing, Scales};
use super::super::weight::PackedWeight;
use super::slices::for_each_row;
use super::{BLOCK, Scratch, SliceScales, Tile, UnitScales, planes, slices};
use crate::simd::amx::TileConfig;

/// Tiles of x in registers.
const QUAD: usize = 4;
/// Panels that are unpacked together: as many as 16 KB hold.
const SLICE_PANELS: usize = 8;
const UNIT_PANELS: usize = 2;

/// A quad of a few panels, unpacked; and where tiles go between multiplying and scaling.
#[repr(C, align(64))]
pub(super) struct Group {
    /// `[panel][slice]`, or `[panel][pair of slices][high, low][slice]`
    numbers: [[u8; 512]; SLICE_PANELS * QUAD],
    /// `[panel][slice]`
    slices: [[SliceScales; QUAD]; SLICE_PANELS],
    units: [UnitScales; UNIT_PANELS],
    tiles: [Tile<i32>; QUAD],
    /// Where the results of no panel go.
    nowhere: Tile<f32>,
}

/// A quad of some blocks of as many rows each, and where their results lie.
struct Blocks<'a> {
    rows: &'a Quantized,
    blocks: Range<usize>,
    quad: usize,
    /// The first block's tile of the first panel; those of the next panel lie `distance` tiles further on.
    results: *mut Tile<f32>,
    distance: usize,
    num_panels: usize,
}

/// Some panels times some blocks, into the first tiles of `scratch.results`: `[panel][block]`.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, the program may use AMX, and rows and weight have the same number of units of F.
pub(super) unsafe fn multiply<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &Quantized,
    blocks: Range<usize>,
    scratch: &mut Scratch,
) {
    let layout = F::LAYOUT;
    let Scratch { group, results, .. } = scratch;
    let results = results.grow(panels.len() * blocks.len()).as_mut_ptr();
    let units_each = units_of_quad(&layout);
    let group_panels = if layout.scales == Scales::Plain { SLICE_PANELS } else { UNIT_PANELS };
    // The last block may have fewer rows, and so tiles of another shape.
    let whole = if rows.block(blocks.end - 1).num_rows < BLOCK { blocks.end - 1 } else { blocks.end };
    let mut configured = 0;
    for first in (0..weight.num_units).step_by(units_each) {
        let num_units = units_each.min(weight.num_units - first);
        let units = first * layout.unit_bytes()..(first + num_units) * layout.unit_bytes();
        for start in panels.clone().step_by(group_panels) {
            let few = start..panels.end.min(start + group_panels);
            for (i, panel) in few.clone().enumerate() {
                // SAFETY: these are whole units of F; features by the caller's promise.
                unsafe { unpack::<F>(&weight.panel(panel)[units.clone()], i, group) };
            }
            // What is unpacked next: the same stretch of the next panels, or the next stretch of the first ones.
            let next = if few.end < panels.end { (few.end, units.start) } else { (panels.start, units.end) };
            let next = weight.panel(next.0).as_ptr().wrapping_add(next.1);
            for part in [blocks.start..whole, whole..blocks.end] {
                if part.is_empty() {
                    continue;
                }
                let num_rows = rows.block(part.start).num_rows;
                if std::mem::replace(&mut configured, num_rows) != num_rows {
                    // SAFETY: the machine has AMX and the program may use it.
                    unsafe { tile_shapes(&layout, num_rows).load() };
                }
                let mut ahead = Upcoming::new(next, weight.panel_bytes(), units.len(), part.len());
                let work = Blocks {
                    rows,
                    quad: first / units_each,
                    results: results
                        .wrapping_add((few.start - panels.start) * blocks.len() + part.start - blocks.start),
                    distance: blocks.len(),
                    num_panels: few.len(),
                    blocks: part,
                };
                // SAFETY: the group holds these panels; tiles are configured for the blocks, which have results for each panel.
                unsafe {
                    match (layout.scales, num_units * layout.slices) {
                        (Scales::Plain, QUAD) => multiply_slices::<F, QUAD>(group, &work, &mut ahead),
                        (Scales::Plain, _) => multiply_slices::<F, 2>(group, &work, &mut ahead),
                        _ => multiply_units::<F>(group, &work, &mut ahead),
                    }
                }
            }
        }
    }
}

/// Units whose numbers a quad of x is multiplied with.
const fn units_of_quad(layout: &Layout) -> usize {
    if matches!(layout.scales, Scales::Plain) { QUAD / layout.slices } else { 1 }
}

/// # Safety
/// They are whole units of F, a quad at most; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: Packing>(units: &[u8], panel: usize, group: &mut Group) {
    let layout = F::LAYOUT;
    for (u, unit) in units.chunks_exact(layout.unit_bytes()).enumerate() {
        // SAFETY: passed on from the caller.
        unsafe {
            if layout.scales == Scales::Plain {
                for slice in 0..layout.slices {
                    let at = u * layout.slices + slice;
                    let to = &mut group.numbers[panel * QUAD + at];
                    slices::unpack_slice::<F>(unit.as_ptr(), slice, to, &mut group.slices[panel][at]);
                }
                continue;
            }
            for pair in 0..QUAD {
                let to = (panel * QUAD + pair) * 4;
                let planes = [to, to + 2].map(|to| group.numbers[to].as_mut_ptr());
                planes::unpack_pair::<F>(unit.as_ptr(), pair, planes, &mut group.units[panel]);
            }
        }
    }
}

/// Tiles 0 to 3 are x, 4 and 5 W, 6 and 7 results.
fn tile_shapes(layout: &Layout, num_rows: usize) -> TileConfig {
    let numbers = 32 * super::num_planes(layout);
    let mut config = TileConfig::default();
    for tile in 0..QUAD {
        config.set(tile, num_rows, numbers);
    }
    for i in 0..2 {
        config.set(4 + i, numbers / 4, 64);
        config.set(6 + i, num_rows, 64);
    }
    config
}

/// What is unpacked next of the panels that follow: kernels ask for it line by line while they multiply.
struct Upcoming {
    start: *const u8,
    panel_bytes: usize,
    /// Where the lines of this block begin, and how many bytes they are.
    at: usize,
    len: usize,
    bytes_each: usize,
}

impl Upcoming {
    /// `len` bytes of each panel, of which the first begins at `start`, asked for in `num_blocks` parts.
    fn new(start: *const u8, panel_bytes: usize, len: usize, num_blocks: usize) -> Self {
        let bytes_each = len.div_ceil(num_blocks).next_multiple_of(64);
        Upcoming { start, panel_bytes, at: bytes_each.wrapping_neg(), len, bytes_each }
    }

    #[inline(always)]
    fn fetch(&mut self, panel: usize) {
        if self.at < self.len {
            let from = self.start.wrapping_add(panel * self.panel_bytes + self.at);
            for line in (0..self.bytes_each).step_by(64) {
                // SAFETY: a prefetch may go anywhere.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
            }
        }
    }

    fn next_block(&mut self) {
        self.at = self.at.wrapping_add(self.bytes_each);
    }
}

/// Asks for a part of the quad of x that the next block will load: what lies that far apart no hardware foresees.
#[inline(always)]
fn fetch_x(from: *const u8, bytes: usize, part: usize, num_parts: usize) {
    let bytes = bytes / num_parts;
    for line in (part * bytes..(part + 1) * bytes).step_by(64) {
        // SAFETY: a prefetch may go anywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
    }
}

/// Loads the first tiles of x, two or four.
///
/// # Safety
/// Tiles are configured for what lies at these places.
#[inline(always)]
unsafe fn load_quad(at: impl Fn(usize) -> *const i8, count: usize) {
    // SAFETY: by the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{0} + {2}]",
            "tileloadd tmm1, [{1} + {2}]",
            in(reg) at(0), in(reg) at(1), in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        );
        if count > 2 {
            asm!(
                "tileloadd tmm2, [{0} + {2}]",
                "tileloadd tmm3, [{1} + {2}]",
                in(reg) at(2), in(reg) at(3), in(reg) 64usize,
                options(nostack, preserves_flags, readonly),
            );
        }
    }
}

/// Multiplies two slices of a unit in both planes.
macro_rules! multiply_pair {
    ($dot:literal, $x:literal, $high:expr, $low:expr) => {
        asm!(
            "tileloadd tmm4, [{high} + {stride}]",
            concat!($dot, " tmm6, tmm", $x, ", tmm4"),
            "tileloadd tmm5, [{low} + {stride}]",
            concat!($dot, " tmm7, tmm", $x, ", tmm5"),
            high = in(reg) $high,
            low = in(reg) $low,
            stride = in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        )
    };
}

/// Multiplies one slice of W with x into a tile that goes to memory.
macro_rules! multiply_slice {
    ($x:literal, $w:literal, $sum:literal, $from:expr, $to:expr) => {
        asm!(
            concat!("tileloadd tmm", $w, ", [{from} + {stride}]"),
            concat!("tilezero tmm", $sum),
            concat!("tdpbssd tmm", $sum, ", tmm", $x, ", tmm", $w),
            concat!("tilestored [{to} + {stride}], tmm", $sum),
            from = in(reg) $from.as_ptr(),
            to = in(reg) $to.as_mut_ptr(),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags),
        )
    };
}

/// Blocks times the panels of a group, `N` slices of each.
///
/// # Safety
/// The group holds so many panels; tiles are configured for the blocks, which have results for each panel; the machine has AMX and AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply_slices<F: Packing, const N: usize>(group: &mut Group, work: &Blocks<'_>, ahead: &mut Upcoming) {
    let kept: __mmask16 = if work.quad == 0 { 0 } else { !0 };
    let Group { numbers, slices, tiles, nowhere, .. } = group;
    let first_slice = QUAD * work.quad;
    let mut x = work.rows.block(work.blocks.start);
    // The panel that was multiplied before; at first none, whose results are not kept.
    let (mut panel, mut results) = (0, &raw mut *nowhere);
    let mut following: *const i8 = std::ptr::null();
    let x_bytes = 32 * N * BLOCK;
    // SAFETY: see the promises of the function; sums and scales of x can be read for a whole block even where it has fewer rows.
    unsafe {
        for step in 0..=work.blocks.len() * work.num_panels {
            let (block, next_panel) = (step / work.num_panels, step % work.num_panels);
            let last = block == work.blocks.len();
            let mut next_x = x;
            if next_panel == 0 && !last {
                next_x = work.rows.block(work.blocks.start + block);
                following = next_x.slice(first_slice, 0).wrapping_add(work.rows.block_bytes());
                load_quad(|i| next_x.slice(first_slice + i, 0), N);
                ahead.next_block();
            }
            ahead.fetch(next_panel);
            fetch_x(following.cast(), x_bytes, next_panel, work.num_panels);
            let mut sums = [_mm512_setzero_ps(); BLOCK];
            for_each_row!(r => { sums[r] = _mm512_maskz_loadu_ps(kept, (*results)[r].as_ptr()); });
            let scales = &slices[panel];
            let w = &numbers[next_panel * QUAD..];
            macro_rules! slice {
                ($s:literal, $w:literal, $sum:literal) => {
                    if $s < N {
                        slices::scale_slice::<F>(&tiles[$s], &scales[$s], x, first_slice + $s, &mut sums);
                        if !last {
                            multiply_slice!($s, $w, $sum, w[$s], tiles[$s]);
                        }
                    }
                };
            }
            slice!(0, "4", "6");
            slice!(1, "5", "7");
            slice!(2, "4", "6");
            slice!(3, "5", "7");
            for_each_row!(r => { _mm512_storeu_ps((*results)[r].as_mut_ptr(), sums[r]); });
            (x, panel) = (next_x, next_panel);
            results = work.results.wrapping_add(next_panel * work.distance + block);
        }
    }
}

/// Blocks times the panels of a group, one unit of each.
///
/// # Safety
/// As for `multiply_slices`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply_units<F: Packing>(group: &mut Group, work: &Blocks<'_>, ahead: &mut Upcoming) {
    let Group { numbers, units, tiles, nowhere, .. } = group;
    let mut x = work.rows.block(work.blocks.start);
    let (mut panel, mut results) = (0, &raw mut *nowhere);
    let mut following: *const i8 = std::ptr::null();
    let x_bytes = 64 * QUAD * BLOCK;
    // SAFETY: see the promises of the function.
    unsafe {
        for step in 0..=work.blocks.len() * work.num_panels {
            let (block, next_panel) = (step / work.num_panels, step % work.num_panels);
            let last = block == work.blocks.len();
            let mut next_x = x;
            if next_panel == 0 && !last {
                next_x = work.rows.block(work.blocks.start + block);
                let first_slice = 2 * QUAD * work.quad;
                following = next_x.slice(first_slice, 0).wrapping_add(work.rows.block_bytes());
                load_quad(|i| next_x.slice(first_slice + 2 * i, 0), QUAD);
                ahead.next_block();
            }
            ahead.fetch(next_panel);
            fetch_x(following.cast(), x_bytes, next_panel, work.num_panels);
            let w = numbers[next_panel * 4 * QUAD..].as_ptr();
            if !last {
                asm!("tilezero tmm6", "tilezero tmm7", options(nostack, preserves_flags, nomem));
            }
            macro_rules! pair {
                ($pair:literal) => {
                    if !last {
                        let (high, low) = (w.add(4 * $pair), w.add(4 * $pair + 2));
                        if F::LAYOUT.scales == Scales::Halves {
                            multiply_pair!("tdpbssd", $pair, high, low);
                        } else {
                            multiply_pair!("tdpbsud", $pair, high, low);
                        }
                    }
                    // A quarter of the rows.
                    let rows = $pair * x.num_rows / QUAD..($pair + 1) * x.num_rows / QUAD;
                    planes::scale_rows::<F>(
                        [&tiles[0], &tiles[1]],
                        &units[panel],
                        x,
                        work.quad,
                        rows,
                        work.quad == 0,
                        &mut *results,
                    );
                };
            }
            pair!(0);
            pair!(1);
            pair!(2);
            pair!(3);
            if !last {
                asm!(
                    "tilestored [{high} + {stride}], tmm6",
                    "tilestored [{low} + {stride}], tmm7",
                    high = in(reg) tiles[0].as_mut_ptr(),
                    low = in(reg) tiles[1].as_mut_ptr(),
                    stride = in(reg) 64usize,
                    options(nostack, preserves_flags),
                );
            }
            (x, panel) = (next_x, next_panel);
            results = work.results.wrapping_add(next_panel * work.distance + block);
        }
    }
}
