//! The inner loop for one block of rows: R rows times P packed panels, unpacked in registers.
//!
//! Several rows and panels have independent sums, because an instruction takes five cycles and two can begin in each
//! cycle.

use std::arch::x86_64::*;

use super::unpack_register::{float_scales, halves, integer, min_pairs, scale_integers};
use crate::matmul::prefetch::PacedPrefetch;
use crate::matmul::quantized::activations::{RowBlock, SLICE_WORDS};
use crate::matmul::quantized::panel_layout::{Mins, QuantizedFormat, Scales};
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};

/// Distance in bytes from the prefetched line of W to the one in use, when [`MANY_PANELS`] panels share the first-level
/// cache.
const PREFETCH_BYTES: usize = 2 * 1024;

/// With this number of panels, each panel prefetches its own next lines.
pub(super) const MANY_PANELS: usize = 4;

/// The addresses of the words of x: one implementation for each
/// [`InputOrder`](crate::matmul::quantized::activations::InputOrder).
pub(super) trait WordStrides {
    /// Words from a row to the next, and from a word of a row to its next word.
    const ROW: usize;
    const WORD: usize;

    /// The first word of a slice of a row.
    ///
    /// # Safety
    /// The block has that slice and row, and is in this order.
    unsafe fn slice(x: &RowBlock<'_>, slice: usize, row: usize) -> *const i32;
}

pub(super) struct ByRows;

impl WordStrides for ByRows {
    const ROW: usize = 2 * SLICE_WORDS;
    const WORD: usize = 1;

    #[inline(always)]
    unsafe fn slice(x: &RowBlock<'_>, slice: usize, row: usize) -> *const i32 {
        // SAFETY: passed on from the caller.
        unsafe { x.slice(slice, row).cast() }
    }
}

pub(super) struct ByWords;

impl WordStrides for ByWords {
    const ROW: usize = 1;
    const WORD: usize = BLOCK_ROWS;

    #[inline(always)]
    unsafe fn slice(x: &RowBlock<'_>, slice: usize, row: usize) -> *const i32 {
        // SAFETY: passed on from the caller.
        unsafe { x.words(slice, row) }
    }
}

/// Adjacent panels.
#[derive(Clone, Copy)]
pub(super) struct AdjacentPanels {
    /// Start of the first panel, and the bytes from panel to panel.
    pub(super) start: *const u8,
    pub(super) panel_bytes: usize,
    pub(super) num_units: usize,
}

/// Some rows of a block, and where their results go.
#[derive(Clone, Copy)]
pub(super) struct BlockRows<'a> {
    pub(super) x: RowBlock<'a>,
    pub(super) first: usize,
    /// Results of the first row and the first panel, followed by those of the other rows; the next panel's are
    /// `distance` values further on.
    pub(super) results: *mut f32,
    pub(super) distance: usize,
}

/// Multiplies R rows with P panels. With fewer than [`MANY_PANELS`] panels, `ahead` is prefetched meanwhile. With
/// [`MANY_PANELS`], each panel prefetches its own next lines, and at its end the first lines of the panel that is
/// `following` bytes further on.
///
/// # Safety
/// There are P panels of F, the block has the same number of units and is in the order X. There are R rows from the
/// first on, or, ordered by word, memory for them; and memory for their results. The machine has AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply<F: QuantizedFormat, X: WordStrides, const R: usize, const P: usize>(
    w: &AdjacentPanels,
    rows: &BlockRows<'_>,
    ahead: &mut PacedPrefetch,
    following: Option<isize>,
) {
    let layout = F::LAYOUT;
    let &BlockRows { x, first, results, distance } = rows;
    let (m, unit_bytes) = (x.num_rows, layout.unit_bytes());
    let mut sums = [[_mm512_setzero_ps(); R]; P];
    // SAFETY: the caller guarantees units, slices, rows and results; a prefetch may use any address.
    unsafe {
        for u in 0..w.num_units {
            let mut units = [w.start; P];
            for p in 0..P {
                units[p] = w.start.add(p * w.panel_bytes + u * unit_bytes);
            }
            // At the end of a panel, prefetching goes on in the panel that follows, if there is one.
            let further = match (u * unit_bytes + PREFETCH_BYTES < w.panel_bytes, following) {
                (true, _) => PREFETCH_BYTES,
                (false, None) => 0,
                (false, Some(bytes)) => PREFETCH_BYTES.wrapping_sub(w.panel_bytes).wrapping_add_signed(bytes),
            };
            let mut scaled = [[_mm512_setzero_si512(); R]; P];
            let mut minimums = [[_mm512_setzero_si512(); R]; P];
            for slice in 0..layout.slices {
                let at = u * layout.slices + slice;
                let place = at * m + first;
                let quants = X::slice(&x, at, first);
                if P < MANY_PANELS {
                    ahead.fetch();
                } else {
                    let lines = unit_bytes / 64;
                    for line in slice * lines / layout.slices..(slice + 1) * lines / layout.slices {
                        for p in 0..P {
                            let from = units[p].wrapping_add(further.wrapping_add(64 * line));
                            _mm_prefetch::<_MM_HINT_T0>(from.cast());
                        }
                    }
                }
                match layout.scales {
                    Scales::Float | Scales::BrainFloat | Scales::Single => {
                        let dots = dots::<F, X, R, P, 0, 8>(units, slice, quants, x.offsets32.wrapping_add(place));
                        for p in 0..P {
                            let scale = float_scales::<F>(units[p], slice);
                            for r in 0..R {
                                let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[p][r]), scale);
                                if layout.mins == Mins::Float {
                                    let mins = halves(units[p].add(layout.min(slice)));
                                    part = _mm512_fmadd_ps(_mm512_set1_ps(*x.sums.add(place + r)), mins, part);
                                }
                                let scale = _mm512_set1_ps(*x.scales.add(place + r));
                                sums[p][r] = _mm512_fmadd_ps(part, scale, sums[p][r]);
                            }
                        }
                    }
                    Scales::PerSlice => {
                        let dots = dots::<F, X, R, P, 0, 8>(units, slice, quants, x.offsets32);
                        add_scaled::<F, R, P>(&mut scaled, &dots, units, slice, 0);
                    }
                    Scales::PerHalfSlice => {
                        let offsets = x.offsets16.wrapping_add(2 * at * m + first);
                        let first = dots::<F, X, R, P, 0, 4>(units, slice, quants, offsets);
                        add_scaled::<F, R, P>(&mut scaled, &first, units, slice, 0);
                        let second = dots::<F, X, R, P, 4, 8>(units, slice, quants, offsets.wrapping_add(m));
                        add_scaled::<F, R, P>(&mut scaled, &second, units, slice, 1);
                    }
                }
                if layout.mins == Mins::PerSlice && slice % 2 == 1 {
                    for p in 0..P {
                        let mins = min_pairs::<F>(units[p], slice / 2);
                        for r in 0..R {
                            let pair = x.pairs.add(at / 2 * m + first + r).cast::<i32>();
                            let pair = _mm512_set1_epi32(pair.read_unaligned());
                            minimums[p][r] = _mm512_dpwssd_epi32(minimums[p][r], mins, pair);
                        }
                    }
                }
            }
            if layout.scaled_by_floats() {
                continue;
            }
            for p in 0..P {
                let head = halves(units[p].add(layout.head()));
                let min_head = match layout.mins {
                    Mins::PerSlice => halves(units[p].add(layout.min_head())),
                    _ => _mm512_setzero_ps(),
                };
                for r in 0..R {
                    let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(scaled[p][r]), head);
                    if layout.mins == Mins::PerSlice {
                        part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minimums[p][r]), min_head, part);
                    }
                    let scale = _mm512_set1_ps(*x.scales.add(u * m + first + r));
                    sums[p][r] = _mm512_fmadd_ps(part, scale, sums[p][r]);
                }
            }
        }
        for p in 0..P {
            for r in 0..R {
                _mm512_storeu_ps(results.add(p * distance + r * PANEL_COLUMNS), sums[p][r]);
            }
        }
    }
}

/// Sums of the products of registers FROM to TO of a slice.
///
/// # Safety
/// Each of `units` is a whole unit of F; `quants` are R rows of x in the order X, and `offsets` their sums times the
/// negated offset of W. The machine has AVX-512 with VNNI.
#[inline(always)]
unsafe fn dots<
    F: QuantizedFormat,
    X: WordStrides,
    const R: usize,
    const P: usize,
    const FROM: usize,
    const TO: usize,
>(
    units: [*const u8; P],
    slice: usize,
    quants: *const i32,
    offsets: *const i32,
) -> [[__m512i; R]; P] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut dots = [[_mm512_setzero_si512(); R]; P];
        for r in 0..R {
            let start = offset::<F>(offsets.wrapping_add(r));
            for p in 0..P {
                dots[p][r] = start;
            }
        }
        for j in FROM..TO {
            let mut w = [_mm512_setzero_si512(); P];
            for p in 0..P {
                w[p] = integer::<F>(units[p], slice, j);
            }
            for r in 0..R {
                let x = _mm512_set1_epi32(*quants.add(X::ROW * r + X::WORD * j));
                for p in 0..P {
                    dots[p][r] = _mm512_dpbusd_epi32(dots[p][r], w[p], x);
                }
            }
        }
        dots
    }
}

/// Adds sums of products times their integer scales.
///
/// # Safety
/// `units` are whole units of F, whose scales are integers; the machine has AVX-512 with VNNI.
#[inline(always)]
unsafe fn add_scaled<F: QuantizedFormat, const R: usize, const P: usize>(
    scaled: &mut [[__m512i; R]; P],
    dots: &[[__m512i; R]; P],
    units: [*const u8; P],
    slice: usize,
    half: usize,
) {
    for p in 0..P {
        // SAFETY: passed on from the caller.
        unsafe {
            let scale = scale_integers::<F>(units[p], slice, half);
            for r in 0..R {
                scaled[p][r] = _mm512_add_epi32(scaled[p][r], _mm512_mullo_epi32(dots[p][r], scale));
            }
        }
    }
}

/// The share of W's offset in a sum of products.
///
/// # Safety
/// `offset` can be read, and the machine has AVX-512 F.
#[inline(always)]
unsafe fn offset<F: QuantizedFormat>(offset: *const i32) -> __m512i {
    // SAFETY: passed on from the caller.
    unsafe { if F::LAYOUT.offset_shift.is_none() { _mm512_setzero_si512() } else { _mm512_set1_epi32(*offset) } }
}
