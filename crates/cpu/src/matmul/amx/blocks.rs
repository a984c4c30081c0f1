//! Many blocks of rows with the K formats: the tiles of x stay in registers for several panels of W, whose unpacked numbers stay in the
//! first-level cache.
//!
//! For each unit of 256 numbers, a few panels are unpacked; then block after block loads its four tiles, and multiplies them with panel
//! after panel. While one panel is multiplied, what the one before it left in tiles is scaled.
//!
//! For 16 x 16 x 32, loading W, multiplying and storing take turns: 9 + 16 + 4 cycles; and each takes twice as long or more while another
//! program shares the core (2026-11-15, Xeon with AMX).

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::Quantized;
use super::super::packing::{Packing, Scales};
use super::super::weight::PackedWeight;
use super::{BLOCK, Scratch, Tile, UnitScales, planes};
use crate::simd::amx::TileConfig;

/// Tiles of x in registers.
const QUAD: usize = 4;
/// Panels that are unpacked together: as many as 16 KB hold.
const PANELS: usize = 2;

/// A unit of a few panels, unpacked; and where tiles go between multiplying and scaling.
#[repr(C, align(64))]
pub(super) struct Group {
    /// `[panel][pair of slices][high, low][slice]`
    numbers: [[u8; 512]; PANELS * QUAD * 4],
    scales: [UnitScales; PANELS],
    tiles: [Tile<i32>; 2],
    /// Where the results of no panel go.
    nowhere: Tile<f32>,
}

/// A unit of some blocks of as many rows each, and where their results lie.
struct Blocks<'a> {
    rows: &'a Quantized,
    blocks: Range<usize>,
    unit: usize,
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
    // The last block may have fewer rows, and so tiles of another shape.
    let whole = if rows.block(blocks.end - 1).num_rows < BLOCK { blocks.end - 1 } else { blocks.end };
    let mut configured = 0;
    for unit in 0..weight.num_units {
        let bytes = unit * layout.unit_bytes()..(unit + 1) * layout.unit_bytes();
        for start in panels.clone().step_by(PANELS) {
            let few = start..panels.end.min(start + PANELS);
            for (i, panel) in few.clone().enumerate() {
                // SAFETY: it is a whole unit of F; features by the caller's promise.
                unsafe { unpack::<F>(&weight.panel(panel)[bytes.clone()], i, group) };
            }
            // What is unpacked next: the same stretch of the next panels, or the next stretch of the first ones.
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
                let mut ahead = Upcoming::new(next, weight.panel_bytes(), bytes.len(), part.len());
                let work = Blocks {
                    rows,
                    unit,
                    results: results
                        .wrapping_add((few.start - panels.start) * blocks.len() + part.start - blocks.start),
                    distance: blocks.len(),
                    num_panels: few.len(),
                    blocks: part,
                };
                // SAFETY: the group holds these panels; tiles are configured for the blocks, which have results for each panel.
                unsafe { multiply_units::<F>(group, &work, &mut ahead) };
            }
        }
    }
}

/// # Safety
/// It is a whole unit of F; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: Packing>(unit: &[u8], panel: usize, group: &mut Group) {
    for pair in 0..QUAD {
        let to = (panel * QUAD + pair) * 4;
        let planes = [to, to + 2].map(|to| group.numbers[to].as_mut_ptr());
        // SAFETY: passed on from the caller.
        unsafe { planes::unpack_pair::<F>(unit.as_ptr(), pair, planes, &mut group.scales[panel]) };
    }
}

/// Tiles 0 to 3 are x, 4 and 5 W, 6 and 7 results.
fn tile_shapes(num_rows: usize) -> TileConfig {
    let mut config = TileConfig::default();
    for tile in 0..8 {
        config.set(tile, if matches!(tile, 4 | 5) { 16 } else { num_rows }, 64);
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

/// Asks for a part of the tiles of x that the next block will load: what lies that far apart no hardware foresees.
#[inline(always)]
fn fetch_x(from: *const u8, bytes: usize, part: usize, num_parts: usize) {
    let bytes = bytes / num_parts;
    for line in (part * bytes..(part + 1) * bytes).step_by(64) {
        // SAFETY: a prefetch may go anywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
    }
}

/// Loads the four tiles of x.
///
/// # Safety
/// Tiles are configured for what lies at these places.
#[inline(always)]
unsafe fn load_quad(at: impl Fn(usize) -> *const i8) {
    // SAFETY: by the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{0} + {4}]",
            "tileloadd tmm1, [{1} + {4}]",
            "tileloadd tmm2, [{2} + {4}]",
            "tileloadd tmm3, [{3} + {4}]",
            in(reg) at(0), in(reg) at(1), in(reg) at(2), in(reg) at(3), in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        );
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

/// Blocks times the panels of a group, one unit of each.
///
/// # Safety
/// The group holds so many panels; tiles are configured for the blocks, which have results for each panel; the machine has AMX and AVX-512
/// with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply_units<F: Packing>(group: &mut Group, work: &Blocks<'_>, ahead: &mut Upcoming) {
    let Group { numbers, scales, tiles, nowhere } = group;
    let mut x = work.rows.block(work.blocks.start);
    // The panel that was multiplied before; at first none, whose results are not kept.
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
                let first_slice = 2 * QUAD * work.unit;
                following = next_x.slice(first_slice, 0).wrapping_add(work.rows.block_bytes());
                load_quad(|i| next_x.slice(first_slice + 2 * i, 0));
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
                        &scales[panel],
                        x,
                        work.unit,
                        rows,
                        work.unit == 0,
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
