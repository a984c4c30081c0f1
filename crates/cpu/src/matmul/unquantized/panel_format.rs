//! [`PanelFormat`]: how F32, F16 and BF16 values are read from panels.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use pellucid_tensor::quant::{bf16_to_f32, f16_to_f32};

use crate::matmul::PANEL_COLUMNS;

/// An unquantized format, read from its panels.
pub(super) trait PanelFormat {
    /// Bytes of a value.
    const SIZE: usize;

    /// Value k of a column.
    fn value(panel: &[u8], k: usize, column: usize) -> f32;

    /// Value k of all sixteen columns.
    ///
    /// # Safety
    /// The panel has the value; the machine has AVX-512 F and BW.
    #[cfg(target_arch = "x86_64")]
    unsafe fn sixteen(panel: *const u8, k: usize) -> __m512;

    /// Value k of eight columns.
    ///
    /// # Safety
    /// The panel has the value; the machine has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn eight(panel: *const u8, k: usize, side: usize) -> __m256;

    /// Value k of four columns.
    ///
    /// # Safety
    /// The panel has the value.
    #[cfg(target_arch = "aarch64")]
    unsafe fn four(panel: *const u8, k: usize, quarter: usize) -> float32x4_t;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;

impl PanelFormat for F32 {
    const SIZE: usize = 4;

    fn value(panel: &[u8], k: usize, column: usize) -> f32 {
        let at = 4 * (k * PANEL_COLUMNS + column);
        f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn sixteen(panel: *const u8, k: usize) -> __m512 {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe { _mm512_loadu_ps(panel.add(64 * k).cast()) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn eight(panel: *const u8, k: usize, side: usize) -> __m256 {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe { _mm256_loadu_ps(panel.add(64 * k + 32 * side).cast()) }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn four(panel: *const u8, k: usize, quarter: usize) -> float32x4_t {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe { vld1q_f32(panel.add(64 * k + 16 * quarter).cast()) }
    }
}

impl PanelFormat for F16 {
    const SIZE: usize = 2;

    fn value(panel: &[u8], k: usize, column: usize) -> f32 {
        let at = 2 * (k * PANEL_COLUMNS + column);
        f16_to_f32(u16::from_le_bytes([panel[at], panel[at + 1]]))
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn sixteen(panel: *const u8, k: usize) -> __m512 {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(panel.add(32 * k).cast())) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn eight(panel: *const u8, k: usize, side: usize) -> __m256 {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(panel.add(32 * k + 16 * side).cast())) }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn four(panel: *const u8, k: usize, quarter: usize) -> float32x4_t {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(panel.add(32 * k + 8 * quarter)))) }
    }
}

impl PanelFormat for BF16 {
    const SIZE: usize = 2;

    fn value(panel: &[u8], k: usize, column: usize) -> f32 {
        let at = 4 * (k / 2 * PANEL_COLUMNS + column) + 2 * (k % 2);
        bf16_to_f32(u16::from_le_bytes([panel[at], panel[at + 1]]))
    }

    /// The even value of a pair is the lower half of its lane, the odd one the upper half.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn sixteen(panel: *const u8, k: usize) -> __m512 {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe {
            let pair = _mm512_loadu_si512(panel.add(k / 2 * 64).cast());
            _mm512_castsi512_ps(match k % 2 {
                0 => _mm512_slli_epi32::<16>(pair),
                _ => _mm512_and_si512(pair, _mm512_set1_epi32(0xffff_0000u32 as i32)),
            })
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn eight(panel: *const u8, k: usize, side: usize) -> __m256 {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe {
            let pair = _mm256_loadu_si256(panel.add(k / 2 * 64 + 32 * side).cast());
            _mm256_castsi256_ps(match k % 2 {
                0 => _mm256_slli_epi32::<16>(pair),
                _ => _mm256_and_si256(pair, _mm256_set1_epi32(0xffff_0000u32 as i32)),
            })
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn four(panel: *const u8, k: usize, quarter: usize) -> float32x4_t {
        // SAFETY: the caller guarantees that the panel has the value.
        unsafe {
            let pair = vreinterpretq_u32_u8(vld1q_u8(panel.add(k / 2 * 64 + 16 * quarter)));
            vreinterpretq_f32_u32(match k % 2 {
                0 => vshlq_n_u32::<16>(pair),
                _ => vandq_u32(pair, vdupq_n_u32(0xffff_0000)),
            })
        }
    }
}
