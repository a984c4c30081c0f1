//! Products with quantized weights by AVX-512 VNNI: `vpdpbusd` multiplies 64 bytes and adds them up by fours, sixteen columns at once.
//!
//! For few rows, as in decoding: W is read once, and each register of unpacked W serves up to eight rows. Bound: reading W. Unpacking and
//! multiplying a slice of 4-bit numbers (256 bytes of 16 columns) takes 13 cycles for one row and 45 for eight, the memory of a core
//! of this kind of machine delivers it in about 45. One row goes through several panels side by side: their sums do not wait for each
//! other, and the machine's own prefetchers follow as many streams, each in its page, where they could run ahead in one only.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Product;
use super::activations::{BLOCK, Quantized, RowBlock};
use super::ahead::Ahead;
use super::packing::{COLUMNS, Mins, Packing, SLICE, Scales};
use super::weight::PackedWeight;
use crate::pool::Direction;

/// How far ahead of its use W is fetched when several panels are read side by side: they share the first-level cache.
const PREFETCH_BYTES: usize = 2 * 1024;

/// Distance of two rows' slices, in words of four numbers.
const ROW_WORDS: usize = 2 * SLICE / 4;

/// The eight registers of a slice: register j holds, for each column, the numbers 4 j to 4 j + 3, offset not yet subtracted.
///
/// # Safety
/// `unit` is a whole unit of F, and the machine has AVX-512 BW.
#[inline(always)]
pub(super) unsafe fn integers<F: Packing>(unit: *const u8, slice: usize) -> [__m512i; 8] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut q = [_mm512_setzero_si512(); 8];
        for j in 0..4 {
            [q[j], q[j + 4]] = quarter::<F>(unit, slice, j);
        }
        q
    }
}

/// Registers j and j + 4 of a slice.
///
/// # Safety
/// As for [`integers`].
#[inline(always)]
pub(super) unsafe fn quarter<F: Packing>(unit: *const u8, slice: usize, j: usize) -> [__m512i; 2] {
    let layout = F::LAYOUT;
    // SAFETY: the layout's parts lie within the unit; features by the caller's promise.
    unsafe {
        let low = unit.add(layout.low(slice));
        let load = |at: *const u8, j: usize| _mm512_loadu_si512(at.add(64 * j).cast());
        if layout.bits == 8 {
            // The other sign bit adds the offset.
            let sign = _mm512_set1_epi8(i8::MIN);
            return [_mm512_xor_si512(load(low, j), sign), _mm512_xor_si512(load(low, j + 4), sign)];
        }
        let nibble = _mm512_set1_epi8(0x0f);
        let both = load(low, j);
        let q = [_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble)];
        let high = unit.add(layout.high(slice));
        // a | (b & c)
        const OR_AND: i32 = 0xf8;
        match layout.bits {
            5 => {
                let (bits, bit) = (load(high, 0), _mm512_set1_epi8(0x10));
                let j = j as i32;
                [
                    _mm512_ternarylogic_epi32::<OR_AND>(q[0], shifted(bits, 4 - j), bit),
                    _mm512_ternarylogic_epi32::<OR_AND>(q[1], shifted(bits, -j), bit),
                ]
            }
            6 => {
                let two = _mm512_set1_epi8(0x30);
                let by = 4 - 2 * j as i32;
                [
                    _mm512_ternarylogic_epi32::<OR_AND>(q[0], shifted(load(high, 0), by), two),
                    _mm512_ternarylogic_epi32::<OR_AND>(q[1], shifted(load(high, 1), by), two),
                ]
            }
            _ => q,
        }
    }
}

/// Bits moved up by `by` places, or down where it is negative. Constant after unrolling.
///
/// # Safety
/// The machine has AVX-512 BW.
#[inline(always)]
unsafe fn shifted(bits: __m512i, by: i32) -> __m512i {
    // SAFETY: features by the caller's promise.
    unsafe {
        match by {
            4 => _mm512_slli_epi16::<4>(bits),
            3 => _mm512_slli_epi16::<3>(bits),
            2 => _mm512_slli_epi16::<2>(bits),
            1 => _mm512_slli_epi16::<1>(bits),
            0 => bits,
            -1 => _mm512_srli_epi16::<1>(bits),
            -2 => _mm512_srli_epi16::<2>(bits),
            _ => _mm512_srli_epi16::<3>(bits),
        }
    }
}

/// Sixteen f16 as f32.
///
/// # Safety
/// 32 bytes at `at`; the machine has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// The integers that scale a slice, or half of one, in 32 bits.
///
/// # Safety
/// `unit` is a whole unit of F, whose scales are integers; the machine has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn scale_integers<F: Packing>(unit: *const u8, slice: usize, half: usize) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice));
        match F::LAYOUT.scales {
            Scales::Halves => _mm512_cvtepi8_epi32(_mm_loadu_si128(at.add(16 * half).cast())),
            _ => _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())),
        }
    }
}

/// The minimums of two slices, as pairs of i16.
///
/// # Safety
/// `unit` is a whole unit of F, whose minimums are integers; the machine has AVX-512 BW.
#[inline(always)]
pub(super) unsafe fn min_pairs<F: Packing>(unit: *const u8, pair: usize) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_cvtepu8_epi16(_mm256_loadu_si256(unit.add(F::LAYOUT.min(2 * pair)).cast())) }
}

/// R rows of a block, from `first` on, times P neighbouring panels. A single panel asks for what is `ahead`; several fetch what follows
/// in each of them, and then the first bytes of the panels that lie `following` bytes further on.
///
/// # Safety
/// At `panels` lie P panels of `num_units` units of F; the block has as many, and its rows reach to `first + R`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn rows_times<F: Packing, const R: usize, const P: usize>(
    panels: *const u8,
    num_units: usize,
    x: RowBlock,
    first: usize,
    ahead: &mut Ahead,
    following: Option<isize>,
) -> [[__m512; R]; P] {
    let layout = F::LAYOUT;
    let (m, unit_bytes) = (x.num_rows, layout.unit_bytes());
    let panel_bytes = num_units * unit_bytes;
    let mut results = [[_mm512_setzero_ps(); R]; P];
    for u in 0..num_units {
        // Where a panel ends, its stream goes on in the panels that follow, if there are any.
        let distance = match (u * unit_bytes + PREFETCH_BYTES < panel_bytes, following) {
            (true, _) => PREFETCH_BYTES,
            (false, None) => 0,
            (false, Some(bytes)) => PREFETCH_BYTES.wrapping_sub(panel_bytes).wrapping_add_signed(bytes),
        };
        // SAFETY: units, slices and rows are within the panels and the block by the caller's promise; a prefetch may go anywhere.
        unsafe {
            let units: [*const u8; P] = std::array::from_fn(|p| panels.add(p * panel_bytes + u * unit_bytes));
            let mut scaled = [[_mm512_setzero_si512(); R]; P];
            let mut minimums = [[_mm512_setzero_si512(); R]; P];
            for slice in 0..layout.slices {
                let at = u * layout.slices + slice;
                let place = at * m + first;
                let quants = x.slice(at, first).cast::<i32>();
                if P == 1 {
                    ahead.fetch();
                }
                for p in 0..P {
                    let unit = units[p];
                    let lines = if P == 1 { 0 } else { unit_bytes / 64 };
                    for line in slice * lines / layout.slices..(slice + 1) * lines / layout.slices {
                        _mm_prefetch::<_MM_HINT_T0>(unit.wrapping_add(distance.wrapping_add(64 * line)).cast());
                    }
                    let w = integers::<F>(unit, slice);
                    let dot = |start: __m512i, r: usize, registers: Range<usize>| {
                        registers.fold(start, |dot, j| {
                            _mm512_dpbusd_epi32(dot, w[j], _mm512_set1_epi32(*quants.add(ROW_WORDS * r + j)))
                        })
                    };
                    match layout.scales {
                        Scales::Plain => {
                            let scale = halves(unit.add(layout.scale(slice)));
                            let mins = match layout.mins {
                                Mins::Plain => halves(unit.add(layout.min(slice))),
                                _ => _mm512_setzero_ps(),
                            };
                            for r in 0..R {
                                let dot = dot(offset::<F>(x.offsets32.add(place + r)), r, 0..8);
                                let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
                                if layout.mins == Mins::Plain {
                                    part = _mm512_fmadd_ps(_mm512_set1_ps(*x.sums.add(place + r)), mins, part);
                                }
                                let scale = _mm512_set1_ps(*x.scales.add(place + r));
                                results[p][r] = _mm512_fmadd_ps(part, scale, results[p][r]);
                            }
                        }
                        Scales::Slices => {
                            let scale = scale_integers::<F>(unit, slice, 0);
                            for r in 0..R {
                                let dot = dot(_mm512_setzero_si512(), r, 0..8);
                                scaled[p][r] = _mm512_add_epi32(scaled[p][r], _mm512_mullo_epi32(dot, scale));
                            }
                        }
                        Scales::Halves => {
                            for half in 0..2 {
                                let scale = scale_integers::<F>(unit, slice, half);
                                for r in 0..R {
                                    let start = x.offsets16.add((2 * at + half) * m + first + r);
                                    let dot = dot(offset::<F>(start), r, 4 * half..4 * half + 4);
                                    scaled[p][r] = _mm512_add_epi32(scaled[p][r], _mm512_mullo_epi32(dot, scale));
                                }
                            }
                        }
                    }
                    if layout.mins == Mins::Slices && slice % 2 == 1 {
                        let mins = min_pairs::<F>(unit, slice / 2);
                        for r in 0..R {
                            let pair = x.pairs.add(at / 2 * m + first + r).cast::<i32>();
                            let pair = _mm512_set1_epi32(pair.read_unaligned());
                            minimums[p][r] = _mm512_dpwssd_epi32(minimums[p][r], mins, pair);
                        }
                    }
                }
            }
            if layout.scales == Scales::Plain {
                continue;
            }
            for p in 0..P {
                let head = halves(units[p].add(layout.head()));
                let min_head = match layout.mins {
                    Mins::Slices => halves(units[p].add(layout.min_head())),
                    _ => _mm512_setzero_ps(),
                };
                for r in 0..R {
                    let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(scaled[p][r]), head);
                    if layout.mins == Mins::Slices {
                        part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minimums[p][r]), min_head, part);
                    }
                    let scale = _mm512_set1_ps(*x.scales.add(u * m + first + r));
                    results[p][r] = _mm512_fmadd_ps(part, scale, results[p][r]);
                }
            }
        }
    }
    results
}

/// What the numbers' offset adds to a sum of products.
///
/// # Safety
/// `offset` can be read, and the machine has AVX-512 F.
#[inline(always)]
unsafe fn offset<F: Packing>(offset: *const i32) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe { if F::LAYOUT.offset_shift.is_none() { _mm512_setzero_si512() } else { _mm512_set1_epi32(*offset) } }
}

/// Some panels for all rows, written to the product's output, in the order in which the thread goes through them.
///
/// # Safety
/// The machine has AVX-512 with VNNI, and rows and weight have the same number of units of F. No other thread writes these panels, and
/// the output is alive.
pub(super) unsafe fn rows_times_panels<F: Packing>(
    product: &Product<'_>,
    weight: &PackedWeight,
    panels: Range<usize>,
    direction: Direction,
    rows: &Quantized,
) {
    let together = if rows.num_rows() == 1 { 4 } else { 1 };
    let num_groups = panels.len().div_ceil(together);
    let group = |i: usize| {
        let i = if direction == Direction::Up { i } else { num_groups - 1 - i };
        let first = panels.start + i * together;
        first..panels.end.min(first + together)
    };
    // What is likely to be read after a group, in this task or in the thread's next one.
    let after = |group: &Range<usize>| match direction {
        Direction::Up => group.end..weight.num_panels().min(group.end + together),
        Direction::Down => group.start.saturating_sub(together)..group.start,
    };
    for group in (0..num_groups).map(group) {
        let next = after(&group);
        let mut ahead = Ahead::new(weight.panels(next.clone()), rows.num_slices());
        let following = (next.start as isize - group.start as isize) * weight.panel_bytes() as isize;
        let following = (!next.is_empty()).then_some(following);
        for block in 0..rows.num_blocks() {
            let x = Place { rows, block };
            // SAFETY: passed on from the caller.
            unsafe { block_times_panels::<F>(product, weight, group.clone(), x, &mut ahead, following) };
        }
    }
}

/// A block of rows.
#[derive(Clone, Copy)]
struct Place<'a> {
    rows: &'a Quantized,
    block: usize,
}

/// All rows of a block times panels: one, or up to four where there is but one row.
///
/// # Safety
/// As for `rows_times_panels`.
unsafe fn block_times_panels<F: Packing>(
    product: &Product<'_>,
    weight: &PackedWeight,
    panels: Range<usize>,
    place: Place<'_>,
    ahead: &mut Ahead,
    following: Option<isize>,
) {
    let Place { rows, block } = place;
    let x = rows.block(block);
    let bytes = weight.panels(panels.clone()).as_ptr();
    macro_rules! rows {
        ($count:literal, $panels:literal, $first:expr) => {{
            // SAFETY: passed on from the caller; rows end within the block.
            unsafe {
                let results = rows_times::<F, $count, $panels>(bytes, weight.num_units, x, $first, ahead, following);
                for (p, results) in results.into_iter().enumerate() {
                    for (r, result) in results.into_iter().enumerate() {
                        // Both are sixteen f32.
                        let result = std::mem::transmute::<__m512, [f32; COLUMNS]>(result);
                        product.put(block * BLOCK + $first + r, panels.start + p, &result);
                    }
                }
            }
            $count
        }};
    }
    let mut first = 0;
    while first < x.num_rows {
        first += match (x.num_rows - first, panels.len()) {
            (1, 4) => rows!(1, 4, first),
            (1, 3) => rows!(1, 3, first),
            (1, 2) => rows!(1, 2, first),
            (1, _) => rows!(1, 1, first),
            (2, _) => rows!(2, 1, first),
            (3, _) => rows!(3, 1, first),
            (4..=7, _) => rows!(4, 1, first),
            _ => rows!(8, 1, first),
        };
    }
}
