//! Quantizing with AVX-512, one slice of sixteen rows at a time: scales and sums of the rows are then lanes of one
//! vector, and one tree of operations computes the largest values or the sums of all rows. Gives the same integers,
//! scales and sums as [`super::quantize_group`].

use std::arch::x86_64::*;

use super::{BLOCK_ROWS, Destination, InputOrder, ROUND, RowArrays, SLICE_WORDS};
use crate::matmul::quantized::panel_layout::SLICE_LEN;

/// Quantizes up to sixteen rows of a block.
///
/// # Safety
/// The machine has AVX-512 (F, BW and VL), `x` is whole rows of `depth` values in whole groups, and no other thread
/// writes these rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
pub(super) unsafe fn quantize_rows(x: &[f32], depth: usize, destination: Destination, arrays: RowArrays<'_>) {
    let Destination { start, row, m, group, .. } = destination;
    let num_rows = x.len() / depth;
    assert!(num_rows <= BLOCK_ROWS && depth.is_multiple_of(group * SLICE_LEN) && x.len() == num_rows * depth);
    for first in (0..depth / SLICE_LEN).step_by(group) {
        // SAFETY: `x` has a group of each row; only these rows have these entries.
        unsafe {
            let mut magnitudes = [_mm512_setzero_si512(); BLOCK_ROWS];
            for (i, magnitudes) in magnitudes.iter_mut().enumerate().take(num_rows) {
                for s in first..first + group {
                    let [a, b] = load(x[i * depth + s * SLICE_LEN..].as_ptr());
                    *magnitudes = _mm512_max_epu32(*magnitudes, _mm512_max_epu32(magnitude(a), magnitude(b)));
                }
            }
            let inverses = scale_each(magnitudes, arrays.scales.part((start + first * m) / group + row, num_rows));
            let mut previous = _mm512_setzero_si512();
            for s in first..first + group {
                previous =
                    quantize_slice(&x[s * SLICE_LEN..], depth, s, &inverses[..num_rows], previous, destination, arrays);
            }
        }
    }
}

/// Quantizes a single row with a scale for each slice: sixteen slices are processed like sixteen rows.
///
/// # Safety
/// As for [`quantize_rows`]; the row is whole slices, and the only one of its block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
pub(super) unsafe fn quantize_slices(x: &[f32], destination: Destination, arrays: RowArrays<'_>) {
    let Destination { quants, start, offset, .. } = destination;
    let (slices, rest) = x.as_chunks::<SLICE_LEN>();
    assert!(rest.is_empty() && (destination.m, destination.group) == (1, 1));
    for (first, slices) in (0..).step_by(BLOCK_ROWS).zip(slices.chunks(BLOCK_ROWS)) {
        let (at, count) = (start + first, slices.len());
        // SAFETY: only this row has these entries.
        unsafe {
            let mut magnitudes = [_mm512_setzero_si512(); BLOCK_ROWS];
            for (magnitudes, slice) in magnitudes.iter_mut().zip(slices) {
                let [a, b] = load(slice.as_ptr());
                *magnitudes = _mm512_max_epu32(magnitude(a), magnitude(b));
            }
            let factors = scale_each(magnitudes, arrays.scales.part(at, count));
            let mut sums = [_mm256_setzero_si256(); BLOCK_ROWS];
            for (i, slice) in slices.iter().enumerate() {
                let bytes = integers(slice.as_ptr(), factors[i]);
                let to = arrays.quants.part(quants + (first + i) * SLICE_LEN, SLICE_LEN);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes);
                sums[i] = sums_by_fours(bytes);
            }
            let [low, high] = sums_of_each(sums);
            let sum = _mm512_add_epi32(low, high);
            let offsets = _mm512_mullo_epi32(sum, _mm512_set1_epi32(-offset));
            _mm512_mask_storeu_ps(arrays.sums.part(at, count).as_mut_ptr(), lanes(count), _mm512_cvtepi32_ps(sum));
            _mm512_mask_storeu_epi32(arrays.offsets32.part(at, count).as_mut_ptr(), lanes(count), offsets);
        }
    }
}

/// Writes the scale of each vector of magnitudes; returns the factors that turn values into integers.
#[inline]
#[target_feature(enable = "avx512f")]
fn scale_each(magnitudes: [__m512i; BLOCK_ROWS], scales: &mut [f32]) -> [f32; BLOCK_ROWS] {
    let largest = _mm512_castsi512_ps(largest_of_each(magnitudes));
    let is_zero = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(largest), _mm512_setzero_si512());
    let inverse = _mm512_maskz_div_ps(!is_zero, _mm512_set1_ps(127.0), largest);
    let scale = _mm512_div_ps(largest, _mm512_set1_ps(127.0));
    let mut inverses = [0.0f32; BLOCK_ROWS];
    // SAFETY: the mask excludes lanes beyond `scales`; the array is as long as the vector.
    unsafe {
        _mm512_mask_storeu_ps(scales.as_mut_ptr(), lanes(scales.len()), scale);
        _mm512_storeu_ps(inverses.as_mut_ptr(), inverse);
    }
    inverses
}

/// A slice times `factor`, rounded to integers.
///
/// # Safety
/// 32 values can be read from `slice`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
unsafe fn integers(slice: *const f32, factor: f32) -> __m256i {
    // SAFETY: passed on from the caller.
    let [a, b] = unsafe { load(slice) };
    let factor = _mm512_set1_ps(factor);
    _mm256_set_m128i(round(b, factor), round(a, factor))
}

/// Sums of four adjacent bytes each.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_by_fours(bytes: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

/// The mask of the first `num_rows` lanes.
fn lanes(num_rows: usize) -> u16 {
    ((1u32 << num_rows) - 1) as u16
}

/// Quantizes slice `s` of each row; `x` begins with that of the first row. Takes the sums of the previous slice and
/// returns its own.
///
/// # Safety
/// As for [`quantize_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
unsafe fn quantize_slice(
    x: &[f32],
    depth: usize,
    s: usize,
    factors: &[f32],
    previous: __m512i,
    destination: Destination,
    arrays: RowArrays<'_>,
) -> __m512i {
    let Destination { quants: block, start, row, m, order, group, offset } = destination;
    let (num_rows, at) = (factors.len(), start + s * m);
    // SAFETY: passed on from the caller.
    unsafe {
        let mut slices = [_mm256_setzero_si256(); BLOCK_ROWS];
        let mut sums = [_mm256_setzero_si256(); BLOCK_ROWS];
        for (i, &factor) in factors.iter().enumerate() {
            slices[i] = integers(x[i * depth..].as_ptr(), factor);
            sums[i] = sums_by_fours(slices[i]);
        }
        match order {
            InputOrder::ByRow => {
                for (i, slice) in slices.iter().enumerate().take(num_rows) {
                    let to = arrays
                        .quants
                        .part(block + (s / 2 * m + row + i) * 2 * SLICE_LEN + s % 2 * SLICE_LEN, SLICE_LEN);
                    _mm256_storeu_si256(to.as_mut_ptr().cast(), *slice);
                }
            }
            InputOrder::ByWord => {
                for (j, words) in words_of_each(slices).into_iter().enumerate() {
                    let to = arrays.quants.part(block + ((s * SLICE_WORDS + j) * BLOCK_ROWS + row) * 4, num_rows * 4);
                    _mm512_mask_storeu_epi32(to.as_mut_ptr().cast(), lanes(num_rows), words);
                }
            }
        }
        let [low, high] = sums_of_each(sums);
        let (sum, negated) = (_mm512_add_epi32(low, high), _mm512_set1_epi32(-offset));
        let lanes = lanes(num_rows);
        let put = |to: &mut [i32], x: __m512i| _mm512_mask_storeu_epi32(to.as_mut_ptr(), lanes, x);
        _mm512_mask_storeu_ps(arrays.sums.part(at + row, num_rows).as_mut_ptr(), lanes, _mm512_cvtepi32_ps(sum));
        if group == 1 {
            put(arrays.offsets32.part(at + row, num_rows), _mm512_mullo_epi32(sum, negated));
            return sum;
        }
        put(arrays.offsets16.part(2 * at + row, num_rows), _mm512_mullo_epi32(low, negated));
        put(arrays.offsets16.part(2 * at + m + row, num_rows), _mm512_mullo_epi32(high, negated));
        if s % 2 == 1 {
            let first = _mm512_and_si512(previous, _mm512_set1_epi32(0xffff));
            let pairs = _mm512_or_si512(first, _mm512_slli_epi32::<16>(sum));
            let to = arrays.pairs.part((at - m) / 2 + row, num_rows);
            _mm512_mask_storeu_epi32(to.as_mut_ptr().cast(), lanes, pairs);
        }
        sum
    }
}

/// # Safety
/// 32 values can be read from `slice`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(slice: *const f32) -> [__m512; 2] {
    // SAFETY: passed on from the caller.
    unsafe { [_mm512_loadu_ps(slice), _mm512_loadu_ps(slice.add(16))] }
}

/// The bits of the magnitudes, which are ordered like the magnitudes, with NaN last.
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

/// Returns a vector whose lane i is the largest lane of vector i. Each step interleaves the halves of two vectors and
/// takes the maximum.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest_of_each(v: [__m512i; BLOCK_ROWS]) -> __m512i {
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

/// Returns two vectors: lane i of the first is the sum of the lower half of vector i, lane i of the second that of its
/// upper half.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
fn sums_of_each(v: [__m256i; BLOCK_ROWS]) -> [__m512i; 2] {
    let mut fours = [_mm256_setzero_si256(); 4];
    for (i, four) in fours.iter_mut().enumerate() {
        let v = &v[4 * i..];
        let two = |a: __m256i, b: __m256i| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (a, b) = (two(v[0], v[1]), two(v[2], v[3]));
        *four = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    let [a, b, c, d] = fours;
    let join = |ab: __m256i, cd: __m256i| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(ab), cd);
    [
        join(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x20>(c, d)),
        join(_mm256_permute2x128_si256::<0x31>(a, b), _mm256_permute2x128_si256::<0x31>(c, d)),
    ]
}

/// Lane i of vector j becomes lane j of vector i.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
fn words_of_each(v: [__m256i; BLOCK_ROWS]) -> [__m512i; SLICE_WORDS] {
    // Rows 0 to 7 in the lower halves, 8 to 15 in the upper ones.
    let mut rows = [_mm512_setzero_si512(); SLICE_WORDS];
    for i in 0..SLICE_WORDS {
        rows[i] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(v[i]), v[i + SLICE_WORDS]);
    }
    // In each quarter of a register, words w of four rows: quarters 0 and 2 have the words 0 to 3, quarters 1 and 3 the
    // words 4 to 7.
    let mut fours = [[_mm512_setzero_si512(); 4]; 2];
    for (i, four) in fours.iter_mut().enumerate() {
        let [a, b, c, d] = [rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]];
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        (four[0], four[1]) = (_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        (four[2], four[3]) = (_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    let lower = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let upper = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    let mut words = [_mm512_setzero_si512(); SLICE_WORDS];
    for w in 0..4 {
        words[w] = _mm512_permutex2var_epi64(fours[0][w], lower, fours[1][w]);
        words[w + 4] = _mm512_permutex2var_epi64(fours[0][w], upper, fours[1][w]);
    }
    words
}
