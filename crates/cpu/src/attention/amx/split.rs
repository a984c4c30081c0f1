//! Numbers in two parts: f32 on the way to the tiles, and the lines of KV memory.

use std::arch::asm;
use std::arch::x86_64::*;

use pellucid_tensor::DType;

use super::super::kv_layout::STEP;
use super::prefetch::STREAMS;
use super::{LINE, ROWS};

/// The upper half of an f32, which is a bf16.
const HIGH: i32 = 0xffff_0000_u32 as i32;

/// Makes 32 numbers a high and a low bf16 each, the first rounded and the second cut off; the i-th and the one sixteen later are a pair.
///
/// # Safety
/// The machine has AVX-512; there is room for 32 of each.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn split(numbers: *const f32, high: *mut u16, low: *mut u16) {
    // SAFETY: passed on from the caller.
    unsafe {
        let (a, b) = (_mm512_loadu_si512(numbers.cast()), _mm512_loadu_si512(numbers.add(16).cast()));
        let (a_high, b_high) = (rounded(a), rounded(b));
        _mm512_storeu_si512(high.cast(), pairs(a_high, b_high));
        _mm512_storeu_si512(low.cast(), pairs(left_of(a, a_high), left_of(b, b_high)));
    }
}

/// Numbers rounded to bf16, in the upper halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_add_epi32(x, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(HIGH))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn left_of(x: __m512i, high: __m512i) -> __m512i {
    _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(high)))
}

/// The upper halves of both, as pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512i, b: __m512i) -> __m512i {
    const A_OR_B_AND_C: i32 = 0xf8;
    _mm512_ternarylogic_epi32::<A_OR_B_AND_C>(_mm512_srli_epi32::<16>(a), b, _mm512_set1_epi32(HIGH))
}

/// Sixteen halves, straight from memory: the intrinsic loads them first, which costs a third more.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn f16_to_f32(from: *const u8) -> __m512i {
    let numbers: __m512i;
    // SAFETY: passed on from the caller.
    unsafe {
        asm!("vcvtph2ps {}, ymmword ptr [{}]", lateout(zmm_reg) numbers, in(reg) from, options(pure, readonly, nostack, preserves_flags));
    }
    numbers
}

/// Rows of two lines of a block in KV memory.
#[derive(Clone, Copy)]
pub(super) struct KvLines {
    pub(super) start: *const u8,
    pub(super) rows: usize,
    pub(super) stride: usize,
    pub(super) dtype: DType,
    /// What will be read later: a quarter as many lines from each of these places are asked for.
    pub(super) ahead: [*const u8; STREAMS],
    pub(super) step: usize,
}

impl KvLines {
    /// Splits every line into its high and its low parts, `low` bytes apart.
    ///
    /// # Safety
    /// The machine has AVX-512, the lines are there, and so is room for them, `stride` bytes from row to row.
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
    /// As for `split`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn each<const F16: bool>(self, to: *mut u8, low: usize, stride: usize) {
        // SAFETY: passed on from the caller; a prefetch may go anywhere.
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
                        // Cutting off is exact here: what is left has three bits.
                        let left = pairs(left_of(a, _mm512_and_si512(a, mask)), left_of(b, _mm512_and_si512(b, mask)));
                        _mm512_storeu_si512(to.cast(), pairs(a, b));
                        _mm512_storeu_si512(to.add(low).cast(), left);
                    } else {
                        let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(LINE / 2).cast()));
                        let b = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(b));
                        _mm512_storeu_si512(to.cast(), _mm512_or_si512(_mm512_cvtepu16_epi32(a), b));
                    }
                }
            }
        }
    }

    /// Sets values that are no numbers to zero: a weight of zero would not silence them. Gives the positions that have some.
    ///
    /// # Safety
    /// `split` has written 32 positions of `head_size` values to `to`.
    #[cold]
    pub(super) unsafe fn clear_what_is_no_number(self, to: *mut u8, low: usize, head_size: usize) -> u32 {
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
