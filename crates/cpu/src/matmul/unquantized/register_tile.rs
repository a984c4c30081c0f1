//! Eight rows times a stretch of up to three panels: a register of W serves eight times and a number of x three times.

use crate::matmul::PANEL_COLUMNS;
use std::arch::x86_64::*;

use super::interleaved_rows::GROUP;
use super::panel_format::PanelFormat;

/// A group of rows times a stretch of panels.
pub(super) struct StretchWork {
    pub(super) x: *const f32,
    /// The first panel's stretch, and the bytes from panel to panel.
    pub(super) w: *const u8,
    pub(super) w_distance: usize,
    /// Numbers of K.
    pub(super) len: usize,
    /// Bytes from here to the stretch that is read next, where it is to be asked for.
    pub(super) next: Option<isize>,
    /// Sums of the unit: whether they begin with this stretch, or go on; whether they end, or are kept here.
    pub(super) parts: *mut f32,
    pub(super) begins: bool,
    pub(super) ends: bool,
    /// The first row's results of the first panel, followed by the other rows'; those of the next panel lie `distance` numbers further on.
    pub(super) results: *mut f32,
    pub(super) distance: usize,
    /// Whether results begin with this unit.
    pub(super) fresh: bool,
}

/// R rows of the group, P panels.
///
/// # Safety
/// They are there, and so are their parts and results; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply<N: PanelFormat, const R: usize, const P: usize>(work: &StretchWork) {
    let &StretchWork { x, w, w_distance, len, next, parts, begins, ends, results, distance, fresh } = work;
    let mut sums = [[_mm512_setzero_ps(); R]; P];
    // SAFETY: by the caller's promise; a prefetch may go anywhere.
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
                let mut numbers = [_mm512_setzero_ps(); P];
                for p in 0..P {
                    numbers[p] = N::sixteen(w.add(p * w_distance), $k);
                }
                for r in 0..R {
                    let x = _mm512_set1_ps(*x.add($k * GROUP + r));
                    for p in 0..P {
                        sums[p][r] = _mm512_fmadd_ps(x, numbers[p], sums[p][r]);
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
