//! Splitting values into a high and a low bf16: floats on their way to the tiles, and lines of KV memory.

use std::arch::asm;
use std::arch::x86_64::*;

use pellucid_tensor::DType;

use super::super::kv_layout::STEP;
use super::prefetch::STREAMS;
use super::{LINE, ROWS};

/// The upper half of an f32, which is a bf16.
const HIGH: i32 = 0xffff_0000_u32 as i32;

/// Splits 32 floats into a high bf16, rounded, and a low bf16, truncated; values i and i + 16 are a pair.
///
/// # Safety
/// The machine has AVX-512; 32 floats can be read, and 32 values written to `high` and to `low`.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn split(values: *const f32, high: *mut u16, low: *mut u16) {
    // SAFETY: passed on from the caller.
    unsafe {
        let (a, b) = (_mm512_loadu_si512(values.cast()), _mm512_loadu_si512(values.add(16).cast()));
        let (a_high, b_high) = (rounded(a), rounded(b));
        _mm512_storeu_si512(high.cast(), pairs(a_high, b_high));
        _mm512_storeu_si512(low.cast(), pairs(remainder(a, a_high), remainder(b, b_high)));
    }
}

/// Floats rounded to bf16, in the upper halves of lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_add_epi32(x, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(HIGH))
}

/// `x - high`
#[inline]
#[target_feature(enable = "avx512f")]
fn remainder(x: __m512i, high: __m512i) -> __m512i {
    _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(high)))
}

/// The upper halves of the lanes of both, as pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512i, b: __m512i) -> __m512i {
    const A_OR_B_AND_C: i32 = 0xf8;
    _mm512_ternarylogic_epi32::<A_OR_B_AND_C>(_mm512_srli_epi32::<16>(a), b, _mm512_set1_epi32(HIGH))
}

/// Sixteen f16 as f32, converted directly from memory: with the intrinsic, a separate load costs a third more time.
///
/// # Safety
/// 32 bytes can be read from `from`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn f16_to_f32(from: *const u8) -> __m512i {
    let values: __m512i;
    // SAFETY: passed on from the caller.
    unsafe {
        asm!(
            "vcvtph2ps {}, ymmword ptr [{}]",
            lateout(zmm_reg) values,
            in(reg) from,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    values
}

/// Some rows of two lines of a block in KV memory.
#[derive(Clone, Copy)]
pub(super) struct KvLines {
    pub(super) start: *const u8,
    pub(super) rows: usize,
    pub(super) stride: usize,
    pub(super) dtype: DType,
    /// Addresses to prefetch from, in turns, for each line that is read; `step` bytes from line to line.
    pub(super) ahead: [*const u8; STREAMS],
    pub(super) step: usize,
}

impl KvLines {
    /// Splits every line into high and low parts, `low` bytes apart.
    ///
    /// # Safety
    /// The machine has AVX-512, the lines can be read, and both parts can be written, `stride` bytes from row to row.
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    pub(super) unsafe fn split(self, to: *mut u8, low: usize, stride: usize) {
        // SAFETY: passed on from the caller.
        unsafe {
            match self.dtype {
                DType::BF16 => self.each::<false>(to, low, stride),
                _ => self.each::<true>(to, low, stride),
            }
        }
    }

    /// # Safety
    /// As for [`KvLines::split`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn each<const F16: bool>(self, to: *mut u8, low: usize, stride: usize) {
        // SAFETY: passed on from the caller; a prefetch may use any address.
        unsafe {
            for row in 0..self.rows {
                for line in [0, LINE] {
                    let (from, to) = (self.start.add(row * self.stride + line), to.add(row * stride + line));
                    let ahead = self.ahead[(2 * row + line / LINE) % STREAMS];
                    _mm_prefetch::<_MM_HINT_T0>(
                        ahead.wrapping_add((2 * row + line / LINE) / STREAMS * self.step).cast(),
                    );
                    if F16 {
                        let (a, b) = (f16_to_f32(from), f16_to_f32(from.add(LINE / 2)));
                        let mask = _mm512_set1_epi32(HIGH);
                        // Truncating is exact: an f16 has 11 significant bits, so the remainder has three.
                        let rest =
                            pairs(remainder(a, _mm512_and_si512(a, mask)), remainder(b, _mm512_and_si512(b, mask)));
                        _mm512_storeu_si512(to.cast(), pairs(a, b));
                        _mm512_storeu_si512(to.add(low).cast(), rest);
                    } else {
                        let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(LINE / 2).cast()));
                        let b = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(b));
                        _mm512_storeu_si512(to.cast(), _mm512_or_si512(_mm512_cvtepu16_epi32(a), b));
                    }
                }
            }
        }
    }

    /// Sets NaN and infinite values to zero, because a weight of zero would not. Returns a bit for each position that
    /// has some.
    ///
    /// # Safety
    /// [`KvLines::split`] has written 32 positions of `head_size` values to `to`.
    #[cold]
    pub(super) unsafe fn clear_non_finite(self, to: *mut u8, low: usize, head_size: usize) -> u32 {
        let mut mark = 0;
        for position in 0..STEP {
            for d in 0..head_size {
                let line = (position % ROWS * (head_size / ROWS) + d / ROWS) * LINE;
                let at = line + d % ROWS * 4 + position / ROWS * 2;
                // SAFETY: passed on from the caller.
                unsafe {
                    let high = to.add(at).cast::<u16>();
                    if *high & 0x7f80 == 0x7f80 {
                        *high = 0;
                        if self.dtype != DType::BF16 {
                            *to.add(at + low).cast::<u16>() = 0;
                        }
                        mark |= 1 << position;
                    }
                }
            }
        }
        mark
    }
}
