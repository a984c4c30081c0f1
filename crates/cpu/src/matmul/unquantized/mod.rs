//! Products with F32, F16 and BF16 weights: f32 arithmetic on panels of sixteen columns, one fused multiply-add for
//! each value.
//!
//! ```text
//! part = 0; for each k of a unit of 256, ascending: part = fma(x[k], w[k], part)
//! result = result + part, unit by unit
//! ```
//! This is the definition for every number of rows and every instruction set (but BF16 with AMX, see
//! [`amx_bf16`](self)). Summing each unit separately keeps errors small. A panel holds `[k][16]` values; for BF16 `[k /
//! 2][16][2]`, which is what AMX multiplies. Bound: reading W for one row, the two multiply-adds per cycle of a core
//! for many. This file holds the kernels for up to four rows at a time.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx_bf16;
#[cfg(target_arch = "x86_64")]
pub(super) mod eight_rows;
#[cfg(target_arch = "x86_64")]
mod interleaved_rows;
mod panel_format;
#[cfg(target_arch = "x86_64")]
mod register_tile;

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use pellucid_tensor::{DType, Error};

#[cfg(target_arch = "x86_64")]
pub(super) use interleaved_rows::InterleavedRows;

use crate::matmul::PANEL_COLUMNS;
use crate::memory::HostMemory;
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::Level;
use panel_format::{BF16, F16, F32, PanelFormat};

/// Values of K that are summed separately.
const UNIT: usize = 256;

/// The depth of a panel is a multiple of this, because AMX reads whole tiles.
pub(super) const DEPTH_MULTIPLE: usize = 32;

/// An unquantized weight in panels.
#[derive(Debug)]
pub(crate) struct UnquantizedWeight {
    memory: HostMemory,
    panel_bytes: usize,
}

impl UnquantizedWeight {
    pub(crate) fn num_panels(&self) -> usize {
        self.memory.bytes().len() / self.panel_bytes
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.memory.bytes()[panel * self.panel_bytes..(panel + 1) * self.panel_bytes]
    }

    /// Adjacent panels.
    #[cfg(target_arch = "x86_64")]
    fn range(&self, panels: Range<usize>) -> &[u8] {
        &self.memory.bytes()[panels.start * self.panel_bytes..panels.end * self.panel_bytes]
    }

    /// All panels, and the bytes of one.
    pub(crate) fn panels(&self) -> (&[u8], usize) {
        (self.memory.bytes(), self.panel_bytes)
    }

    /// Packs rows of a file into panels, on all threads; `None` for quantized formats.
    pub(crate) fn pack(
        pool: &Pool,
        dtype: DType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Option<Result<Self, Error>> {
        let pack = match dtype {
            DType::F32 => pack_panel::<4, 1>,
            DType::F16 => pack_panel::<2, 1>,
            DType::BF16 => pack_panel::<2, 2>,
            _ => return None,
        };
        let panel_bytes = cols.next_multiple_of(DEPTH_MULTIPLE) * PANEL_COLUMNS * dtype.block_bytes();
        let num_panels = rows.div_ceil(PANEL_COLUMNS);
        let mut memory = match HostMemory::zeroed(num_panels * panel_bytes) {
            Ok(memory) => memory,
            Err(error) => return Some(Err(error)),
        };
        memory.prefer_huge_pages();
        let panels = SharedSlice::new(memory.bytes_mut());
        let row_bytes = cols * dtype.block_bytes();
        pool.run(num_panels, &|panel| {
            let rows = panel * PANEL_COLUMNS..rows.min((panel + 1) * PANEL_COLUMNS);
            let source = &bytes[rows.start * row_bytes..rows.end * row_bytes];
            // SAFETY: each task has its own panel.
            pack(source, row_bytes, unsafe { panels.part(panel * panel_bytes, panel_bytes) });
        });
        Some(Ok(UnquantizedWeight { memory, panel_bytes }))
    }
}

/// Packs up to sixteen rows of values of `SIZE` bytes; `RUN` values of a column are adjacent.
fn pack_panel<const SIZE: usize, const RUN: usize>(source: &[u8], row_bytes: usize, panel: &mut [u8]) {
    for (column, row) in source.chunks_exact(row_bytes).enumerate() {
        for (i, run) in row.chunks(SIZE * RUN).enumerate() {
            let at = (i * PANEL_COLUMNS + column) * SIZE * RUN;
            panel[at..at + run.len()].copy_from_slice(run);
        }
    }
}

/// Rows of x in f32.
#[derive(Clone, Copy)]
pub(super) struct FloatRows<'a> {
    pub(super) x: &'a [f32],
    pub(super) depth: usize,
}

impl<'a> FloatRows<'a> {
    /// The existing rows of a range.
    pub(super) fn part(self, rows: Range<usize>) -> FloatRows<'a> {
        let end = self.num_rows().min(rows.end);
        FloatRows { x: &self.x[rows.start * self.depth..end * self.depth], depth: self.depth }
    }

    pub(super) fn num_rows(&self) -> usize {
        self.x.len() / self.depth
    }
}

/// Multiplies all rows with one panel; `put(row, results)` receives the sixteen results of each row.
pub(super) fn rows_times_panel(
    level: Level,
    dtype: DType,
    panel: &[u8],
    rows: FloatRows<'_>,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    match dtype {
        DType::F32 => by_level::<F32>(level, panel, rows, put),
        DType::F16 => by_level::<F16>(level, panel, rows, put),
        DType::BF16 => by_level::<BF16>(level, panel, rows, put),
        _ => unreachable!("quantized formats have other kernels"),
    }
}

fn by_level<N: PanelFormat>(
    level: Level,
    panel: &[u8],
    rows: FloatRows<'_>,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    // BF16 is stored in pairs of values.
    assert!(
        rows.depth.next_multiple_of(2) * PANEL_COLUMNS * N::SIZE <= panel.len(),
        "the panel is as deep as the rows"
    );
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    macro_rules! in_steps {
        ($kernel:ident, $($count:literal)*) => {{
            let mut first = 0;
            while first < rows.num_rows() {
                let left = rows.num_rows() - first;
                $(if left >= $count {
                    // SAFETY: the level proves the instructions; by the assertion, the panel is `depth` long; at least
                    // `$count` rows are left.
                    let results = unsafe { $kernel::<N, $count>(panel.as_ptr(), rows, first) };
                    (0..$count).for_each(|r| put(first + r, &results[r]));
                    first += $count;
                    continue;
                })*
            }
        }};
    }
    match level {
        Level::Scalar(_) => {
            (0..rows.num_rows())
                .for_each(|row| put(row, &scalar::<N>(panel, &rows.x[row * rows.depth..][..rows.depth])));
        }
        #[cfg(target_arch = "aarch64")]
        Level::Neon(_) => in_steps!(neon, 4 2 1),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(_) => in_steps!(avx2, 4 2 1),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(_) | Level::Amx(..) => in_steps!(avx512, 4 2 1),
    }
}

/// The ranges of K of the units.
fn units(depth: usize) -> impl Iterator<Item = Range<usize>> {
    (0..depth).step_by(UNIT).map(move |start| start..depth.min(start + UNIT))
}

fn scalar<N: PanelFormat>(panel: &[u8], x: &[f32]) -> [f32; PANEL_COLUMNS] {
    let mut results = [0.0; PANEL_COLUMNS];
    for unit in units(x.len()) {
        for (c, result) in results.iter_mut().enumerate() {
            *result += unit.clone().fold(0.0, |part, k| x[k].mul_add(N::value(panel, k, c), part));
        }
    }
    results
}

/// # Safety
/// Panel and rows are `depth` long, and there are R rows from `first` on; the machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
unsafe fn avx512<N: PanelFormat, const R: usize>(
    panel: *const u8,
    rows: FloatRows<'_>,
    first: usize,
) -> [[f32; PANEL_COLUMNS]; R] {
    /// Distance in bytes from the prefetched line of W to the one in use.
    const PREFETCH_BYTES: usize = 6 * 1024;
    let mut results = [_mm512_setzero_ps(); R];
    // SAFETY: the caller guarantees panel and rows; a prefetch may use any address.
    unsafe {
        let x: [*const f32; R] = std::array::from_fn(|r| rows.x[(first + r) * rows.depth..].as_ptr());
        for unit in units(rows.depth) {
            let mut parts = [_mm512_setzero_ps(); R];
            let step = |k: usize, parts: &mut [__m512; R]| {
                let w = N::sixteen(panel, k);
                for r in 0..R {
                    parts[r] = _mm512_fmadd_ps(_mm512_set1_ps(*x[r].add(k)), w, parts[r]);
                }
            };
            let mut k = unit.start;
            while k + 2 <= unit.end {
                for line in (0..2 * PANEL_COLUMNS * N::SIZE).step_by(64) {
                    let ahead = PREFETCH_BYTES + PANEL_COLUMNS * N::SIZE * k + line;
                    _mm_prefetch::<_MM_HINT_T0>(panel.wrapping_add(ahead).cast());
                }
                step(k, &mut parts);
                step(k + 1, &mut parts);
                k += 2;
            }
            if k < unit.end {
                step(k, &mut parts);
            }
            for r in 0..R {
                results[r] = _mm512_add_ps(results[r], parts[r]);
            }
        }
        // Both are sixteen f32.
        results.map(|result| std::mem::transmute::<__m512, [f32; PANEL_COLUMNS]>(result))
    }
}

/// # Safety
/// Panel and rows are `depth` long, and there are R rows from `first` on; the machine has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn avx2<N: PanelFormat, const R: usize>(
    panel: *const u8,
    rows: FloatRows<'_>,
    first: usize,
) -> [[f32; PANEL_COLUMNS]; R] {
    let mut results = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: the caller guarantees panel and rows.
    unsafe {
        let x: [*const f32; R] = std::array::from_fn(|r| rows.x[(first + r) * rows.depth..].as_ptr());
        for unit in units(rows.depth) {
            let mut parts = [[_mm256_setzero_ps(); 2]; R];
            for k in unit {
                let w = [N::eight(panel, k, 0), N::eight(panel, k, 1)];
                for r in 0..R {
                    let x = _mm256_set1_ps(*x[r].add(k));
                    for side in 0..2 {
                        parts[r][side] = _mm256_fmadd_ps(x, w[side], parts[r][side]);
                    }
                }
            }
            for r in 0..R {
                for side in 0..2 {
                    results[r][side] = _mm256_add_ps(results[r][side], parts[r][side]);
                }
            }
        }
        // Both are sixteen f32, lane 0 first.
        results.map(|result| std::mem::transmute::<[__m256; 2], [f32; PANEL_COLUMNS]>(result))
    }
}

/// # Safety
/// Panel and rows are `depth` long, and there are R rows from `first` on.
#[cfg(target_arch = "aarch64")]
unsafe fn neon<N: PanelFormat, const R: usize>(
    panel: *const u8,
    rows: FloatRows<'_>,
    first: usize,
) -> [[f32; PANEL_COLUMNS]; R] {
    // SAFETY: the caller guarantees panel and rows.
    unsafe {
        let zero = vdupq_n_f32(0.0);
        let mut results = [[zero; 4]; R];
        let x: [*const f32; R] = std::array::from_fn(|r| rows.x[(first + r) * rows.depth..].as_ptr());
        for unit in units(rows.depth) {
            let mut parts = [[zero; 4]; R];
            for k in unit {
                let w: [float32x4_t; 4] = std::array::from_fn(|quarter| N::four(panel, k, quarter));
                for r in 0..R {
                    for quarter in 0..4 {
                        parts[r][quarter] = vfmaq_n_f32(parts[r][quarter], w[quarter], *x[r].add(k));
                    }
                }
            }
            for r in 0..R {
                for quarter in 0..4 {
                    results[r][quarter] = vaddq_f32(results[r][quarter], parts[r][quarter]);
                }
            }
        }
        // Both are sixteen f32, lane 0 first.
        results.map(|result| std::mem::transmute::<[float32x4_t; 4], [f32; PANEL_COLUMNS]>(result))
    }
}
