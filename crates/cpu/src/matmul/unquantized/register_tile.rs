//! The inner loop for eight rows: half a unit of up to three panels times a group of rows, with all sums in registers.

use crate::matmul::PANEL_COLUMNS;
use std::arch::x86_64::*;

use super::interleaved_rows::GROUP;
use super::panel_format::PanelFormat;

/// The operands of [`multiply`].
pub(super) struct HalfUnitWork {
    pub(super) x: *const f32,
    /// Start in the first panel, and the bytes from panel to panel.
    pub(super) w: *const u8,
    pub(super) w_distance: usize,
    /// Values of K.
    pub(super) len: usize,
    /// Distance in bytes to the half unit that is read next, if it is to be prefetched.
    pub(super) next: Option<isize>,
    /// Sums of the unit between its halves: read unless the unit `begins` here, written unless it `ends` here.
    pub(super) parts: *mut f32,
    pub(super) begins: bool,
    pub(super) ends: bool,
    /// Results of the first row and the first panel, followed by those of the other rows; the next panel's are
    /// `distance` values further on.
    pub(super) results: *mut f32,
    pub(super) distance: usize,
    /// Whether results are overwritten; otherwise they are added to.
    pub(super) fresh: bool,
}

/// Multiplies R rows of the group with P panels.
///
/// # Safety
/// Rows, panels, parts and results exist; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply<N: PanelFormat, const R: usize, const P: usize>(work: &HalfUnitWork) {
    let &HalfUnitWork { x, w, w_distance, len, next, parts, begins, ends, results, distance, fresh } = work;
    let mut sums = [[_mm512_setzero_ps(); R]; P];
    // SAFETY: the caller guarantees all operands; a prefetch may use any address.
    unsafe {
        if !begins {
            for p in 0..P {
                for r in 0..R {
                    sums[p][r] = _mm512_loadu_ps(parts.add((p * GROUP + r) * PANEL_COLUMNS));
                }
            }
        }
        macro_rules! step {
            ($k:expr) => {
                let mut values = [_mm512_setzero_ps(); P];
                for p in 0..P {
                    values[p] = N::sixteen(w.add(p * w_distance), $k);
                }
                for r in 0..R {
                    let x = _mm512_set1_ps(*x.add($k * GROUP + r));
                    for p in 0..P {
                        sums[p][r] = _mm512_fmadd_ps(x, values[p], sums[p][r]);
                    }
                }
            };
        }
        let mut k = 0;
        while k + 2 <= len {
            if let Some(next) = next {
                for p in 0..P {
                    for line in (0..2 * PANEL_COLUMNS * N::SIZE).step_by(64) {
                        let here = w.wrapping_add(p * w_distance + k * PANEL_COLUMNS * N::SIZE + line);
                        _mm_prefetch::<_MM_HINT_T0>(here.wrapping_offset(next).cast());
                    }
                }
            }
            step!(k);
            step!(k + 1);
            k += 2;
        }
        if k < len {
            step!(k);
        }
        for p in 0..P {
            for r in 0..R {
                if ends {
                    let result = results.add(p * distance + r * PANEL_COLUMNS);
                    let before = if fresh { _mm512_setzero_ps() } else { _mm512_loadu_ps(result) };
                    _mm512_storeu_ps(result, _mm512_add_ps(before, sums[p][r]));
                } else {
                    _mm512_storeu_ps(parts.add((p * GROUP + r) * PANEL_COLUMNS), sums[p][r]);
                }
            }
        }
    }
}
