//! Products with quantized weights by AVX2: `vpmaddubsw` multiplies bytes and adds pairs in 16 bits, half a panel (eight columns) at a time.
//!
//! Sums of pairs are added up in 16 bits as long as they cannot overflow (eight for 4-bit numbers: 8 * 2 * 15 * 127 < 2^15), then widened.
//! 8-bit numbers go as magnitudes, their signs moved to x: 2 * 128 * 127 < 2^15. All integers are exact, hence the bits of `scalar`.

use std::arch::x86_64::*;

use super::activations::RowBlock;
use super::packing::{COLUMNS, Mins, Packing, SLICE, Scales};

/// Distance of two rows' slices, in words of four numbers.
const ROW_WORDS: usize = 2 * SLICE / 4;

/// The numbers of a slice for eight columns; register j holds the numbers 4 j to 4 j + 3 of each.
///
/// # Safety
/// `unit` is a whole unit of F, and the machine has AVX2.
#[inline(always)]
unsafe fn integers<F: Packing>(unit: *const u8, slice: usize, side: usize) -> [__m256i; 8] {
    let layout = F::LAYOUT;
    // SAFETY: the layout's parts lie within the unit; features by the caller's promise.
    unsafe {
        let load = |at: usize, j: usize| _mm256_loadu_si256(unit.add(at + 64 * j + 32 * side).cast());
        if layout.bits == 8 {
            // Signed, unlike the other formats.
            return std::array::from_fn(|j| load(layout.low(slice), j));
        }
        let nibble = _mm256_set1_epi8(0x0f);
        let mut q = [_mm256_setzero_si256(); 8];
        for j in 0..4 {
            let both = load(layout.low(slice), j);
            q[j] = _mm256_and_si256(both, nibble);
            q[j + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
        }
        for j in 0..8 {
            let (bits, up, mask) = match layout.bits {
                5 => (load(layout.high(slice), 0), 4 - j as i32, 0x10),
                6 => (load(layout.high(slice), j / 4), 4 - 2 * (j as i32 % 4), 0x30),
                _ => break,
            };
            let bits = match up {
                0.. => _mm256_sll_epi16(bits, _mm_cvtsi32_si128(up)),
                _ => _mm256_srl_epi16(bits, _mm_cvtsi32_si128(-up)),
            };
            q[j] = _mm256_or_si256(q[j], _mm256_and_si256(bits, _mm256_set1_epi8(mask)));
        }
        q
    }
}

/// `start` plus the products of the registers `w` and of the row's numbers at `x`.
///
/// # Safety
/// `x` has four bytes for each register; the machine has AVX2.
#[inline(always)]
unsafe fn dot<F: Packing>(start: __m256i, w: &[__m256i], x: *const i32) -> __m256i {
    let run = match F::LAYOUT.bits {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    };
    let ones = _mm256_set1_epi16_one();
    let mut sum = start;
    for (i, w) in w.chunks(run).enumerate() {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut pairs = _mm256_setzero_si256();
            for (j, &w) in w.iter().enumerate() {
                let x = _mm256_set1_epi32(*x.add(run * i + j));
                let products = if F::LAYOUT.bits == 8 {
                    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                } else {
                    _mm256_maddubs_epi16(w, x)
                };
                pairs = if j == 0 { products } else { _mm256_add_epi16(pairs, products) };
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    sum
}

/// Sixteen times 1 in 16 bits.
#[inline(always)]
fn _mm256_set1_epi16_one() -> __m256i {
    // SAFETY: any bits are a valid register.
    unsafe { std::mem::transmute::<[i16; 16], __m256i>([1; 16]) }
}

/// # Safety
/// Sixteen bytes at `at`; the machine has F16C.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// The integers that scale a slice, or half of one, in 32 bits.
///
/// # Safety
/// `unit` is a whole unit of F, whose scales are integers; the machine has AVX2.
#[inline(always)]
unsafe fn scale_integers<F: Packing>(unit: *const u8, slice: usize, half: usize, side: usize) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice) + 8 * side);
        match F::LAYOUT.scales {
            Scales::Halves => _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(16 * half).cast())),
            _ => _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())),
        }
    }
}

/// What the numbers' offset adds to a sum of products; bytes are made signed instead.
///
/// # Safety
/// `offset` can be read, and the machine has AVX2.
#[inline(always)]
unsafe fn offset<F: Packing>(offset: *const i32) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        match F::LAYOUT.offset_shift {
            None | Some(7) => _mm256_setzero_si256(),
            _ => _mm256_set1_epi32(*offset),
        }
    }
}

/// R rows of a block, from `first` on, times one panel: what is unpacked serves all of them.
///
/// # Safety
/// `panel` holds `num_units` units of F, the block as many, and its rows reach to `first + R`; the machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn rows_times_panel<F: Packing, const R: usize>(
    panel: *const u8,
    num_units: usize,
    x: RowBlock,
    first: usize,
) -> [[f32; COLUMNS]; R] {
    let layout = F::LAYOUT;
    let m = x.num_rows;
    let mut results = [[_mm256_setzero_ps(); 2]; R];
    for u in 0..num_units {
        // SAFETY: units, slices and rows are within the panel and the block by the caller's promise.
        unsafe {
            let unit = panel.add(u * layout.unit_bytes());
            for side in 0..2 {
                let mut scaled = [_mm256_setzero_si256(); R];
                let mut minimums = [_mm256_setzero_si256(); R];
                for slice in 0..layout.slices {
                    let at = u * layout.slices + slice;
                    let place = at * m + first;
                    let w = integers::<F>(unit, slice, side);
                    let quants = x.slice(at, first).cast::<i32>();
                    match layout.scales {
                        Scales::Plain => {
                            let scale = halves(unit.add(layout.scale(slice) + 16 * side));
                            let mins = match layout.mins {
                                Mins::Plain => halves(unit.add(layout.min(slice) + 16 * side)),
                                _ => _mm256_setzero_ps(),
                            };
                            for r in 0..R {
                                let start = offset::<F>(x.offsets32.add(place + r));
                                let sum = dot::<F>(start, &w, quants.add(ROW_WORDS * r));
                                let mut part = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale);
                                if layout.mins == Mins::Plain {
                                    part = _mm256_fmadd_ps(_mm256_set1_ps(*x.sums.add(place + r)), mins, part);
                                }
                                let x_scale = _mm256_set1_ps(*x.scales.add(place + r));
                                results[r][side] = _mm256_fmadd_ps(part, x_scale, results[r][side]);
                            }
                        }
                        Scales::Slices => {
                            let scale = scale_integers::<F>(unit, slice, 0, side);
                            for r in 0..R {
                                let sum = dot::<F>(_mm256_setzero_si256(), &w, quants.add(ROW_WORDS * r));
                                scaled[r] = _mm256_add_epi32(scaled[r], _mm256_mullo_epi32(sum, scale));
                            }
                        }
                        Scales::Halves => {
                            for half in 0..2 {
                                let scale = scale_integers::<F>(unit, slice, half, side);
                                for r in 0..R {
                                    let start = offset::<F>(x.offsets16.add((2 * at + half) * m + first + r));
                                    let (w, quants) =
                                        (&w[4 * half..4 * half + 4], quants.add(ROW_WORDS * r + 4 * half));
                                    let sum = dot::<F>(start, w, quants);
                                    scaled[r] = _mm256_add_epi32(scaled[r], _mm256_mullo_epi32(sum, scale));
                                }
                            }
                        }
                    }
                    if layout.mins == Mins::Slices && slice % 2 == 1 {
                        let mins = _mm_loadu_si128(unit.add(layout.min(slice - 1) + 16 * side).cast());
                        let mins = _mm256_cvtepu8_epi16(mins);
                        for r in 0..R {
                            let pair = x.pairs.add(at / 2 * m + first + r).cast::<i32>().read_unaligned();
                            let products = _mm256_madd_epi16(mins, _mm256_set1_epi32(pair));
                            minimums[r] = _mm256_add_epi32(minimums[r], products);
                        }
                    }
                }
                if layout.scales == Scales::Plain {
                    continue;
                }
                let head = halves(unit.add(layout.head() + 16 * side));
                let min_head = match layout.mins {
                    Mins::Slices => halves(unit.add(layout.min_head() + 16 * side)),
                    _ => _mm256_setzero_ps(),
                };
                for r in 0..R {
                    let mut part = _mm256_mul_ps(_mm256_cvtepi32_ps(scaled[r]), head);
                    if layout.mins == Mins::Slices {
                        part = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(minimums[r]), min_head, part);
                    }
                    let scale = _mm256_set1_ps(*x.scales.add(u * m + first + r));
                    results[r][side] = _mm256_fmadd_ps(part, scale, results[r][side]);
                }
            }
        }
    }
    // SAFETY: both are sixteen f32, lane 0 first.
    results.map(|result| unsafe { std::mem::transmute::<[__m256; 2], [f32; COLUMNS]>(result) })
}

/// All rows of a block times one panel; `put` gets each row's sixteen results.
///
/// # Safety
/// `panel` holds `num_units` units of F and the block as many; the machine has AVX2, FMA and F16C.
pub(crate) unsafe fn block_times_panel<F: Packing>(
    panel: *const u8,
    num_units: usize,
    x: RowBlock,
    put: &mut dyn FnMut(usize, &[f32; COLUMNS]),
) {
    let mut first = 0;
    while first + 4 <= x.num_rows {
        // SAFETY: passed on from the caller; the rows end within the block.
        let results = unsafe { rows_times_panel::<F, 4>(panel, num_units, x, first) };
        (0..4).for_each(|r| put(first + r, &results[r]));
        first += 4;
    }
    for row in first..x.num_rows {
        // SAFETY: as above.
        let [result] = unsafe { rows_times_panel::<F, 1>(panel, num_units, x, row) };
        put(row, &result);
    }
}
