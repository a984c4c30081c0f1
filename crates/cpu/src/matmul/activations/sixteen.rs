//! One slice of sixteen rows at a time, by AVX-512: what a slice leaves behind is then one vector with a lane for each row, and the
//! largest numbers and the sums of all rows come out of one tree. The same integers, scales and sums as [`super::quantize_group`] gives.

use std::arch::x86_64::*;

use super::super::packing::SLICE;
use super::{BLOCK, Parts, Place, ROUND};

/// Quantizes up to sixteen rows of a block, for formats in which every slice has its own scale.
///
/// # Safety
/// The machine has AVX-512 (F and BW), `x` is whole rows of `depth` numbers in whole slices, and no other thread writes these rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
pub(super) unsafe fn quantize_rows(x: &[f32], depth: usize, place: Place, parts: Parts) {
    let Place { quants: block, start, row, m, offset, .. } = place;
    let num_rows = x.len() / depth;
    assert!(num_rows <= BLOCK && depth.is_multiple_of(SLICE) && x.len() == num_rows * depth);
    let lanes = ((1u32 << num_rows) - 1) as u16;
    for s in 0..depth / SLICE {
        let at = start + s * m + row;
        // SAFETY: a slice of each row lies in `x`; the places are these rows' own.
        unsafe {
            let slices = x[s * SLICE..].as_ptr();
            let mut magnitudes = [_mm512_setzero_si512(); BLOCK];
            for i in 0..num_rows {
                let [a, b] = load(slices.add(i * depth));
                magnitudes[i] = _mm512_max_epu32(magnitude(a), magnitude(b));
            }
            let largest = _mm512_castsi512_ps(largest_of_each(magnitudes));
            let is_zero = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(largest), _mm512_setzero_si512());
            let inverse = _mm512_maskz_div_ps(!is_zero, _mm512_set1_ps(127.0), largest);
            let scale = _mm512_div_ps(largest, _mm512_set1_ps(127.0));
            _mm512_mask_storeu_ps(parts.scales.part(at, num_rows).as_mut_ptr(), lanes, scale);
            let mut inverses = [0.0f32; BLOCK];
            _mm512_storeu_ps(inverses.as_mut_ptr(), inverse);

            let mut sums = [_mm256_setzero_si256(); BLOCK];
            for i in 0..num_rows {
                let factor = _mm512_set1_ps(inverses[i]);
                let [a, b] = load(slices.add(i * depth));
                let bytes = _mm256_set_m128i(round(b, factor), round(a, factor));
                let to = parts.quants.part(block + (s / 2 * m + row + i) * 2 * SLICE + s % 2 * SLICE, SLICE);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes);
                let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
                sums[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            }
            let sums = sum_of_each(sums);
            _mm512_mask_storeu_ps(parts.sums.part(at, num_rows).as_mut_ptr(), lanes, _mm512_cvtepi32_ps(sums));
            let offsets = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-offset));
            _mm512_mask_storeu_epi32(parts.offsets32.part(at, num_rows).as_mut_ptr(), lanes, offsets);
        }
    }
}

/// # Safety
/// A slice can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(slice: *const f32) -> [__m512; 2] {
    // SAFETY: passed on from the caller.
    unsafe { [_mm512_loadu_ps(slice), _mm512_loadu_ps(slice.add(16))] }
}

/// The bits of magnitudes, whose order is theirs, what is no number last.
#[inline]
#[target_feature(enable = "avx512f")]
fn magnitude(x: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn round(x: __m512, factor: __m512) -> __m128i {
    let rounded = _mm512_add_ps(_mm512_mul_ps(x, factor), _mm512_set1_ps(ROUND));
    _mm512_cvtepi32_epi8(_mm512_castps_si512(rounded))
}

/// Lane i becomes the largest lane of vector i. A step takes two vectors, puts the halves of each side by side, and joins them.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest_of_each(v: [__m512i; BLOCK]) -> __m512i {
    let mut fours = [_mm512_setzero_si512(); 4];
    for (i, four) in fours.iter_mut().enumerate() {
        let v = &v[4 * i..];
        let two = |a: __m512i, b: __m512i| _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (a, b) = (two(v[0], v[1]), two(v[2], v[3]));
        *four = _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    let two = |a: __m512i, b: __m512i| {
        _mm512_max_epu32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b))
    };
    two(two(fours[0], fours[1]), two(fours[2], fours[3]))
}

/// Lane i becomes the sum of vector i.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
fn sum_of_each(v: [__m256i; BLOCK]) -> __m512i {
    let mut fours = [_mm256_setzero_si256(); 4];
    for (i, four) in fours.iter_mut().enumerate() {
        let v = &v[4 * i..];
        let two = |a: __m256i, b: __m256i| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (a, b) = (two(v[0], v[1]), two(v[2], v[3]));
        *four = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    let two = |a: __m256i, b: __m256i| {
        _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
    };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(two(fours[0], fours[1])), two(fours[2], fours[3]))
}
