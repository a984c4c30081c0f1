//! The inner loop for several blocks of rows: rows times unpacked units of panels. Values and scales are unpacked once
//! for all rows, so that the loop only has to load them.
//!
//! Eight rows and two panels have independent sums, because an instruction takes five cycles and two can begin in each
//! cycle: a register of W is used eight times and one of x twice. Each slice of 32 values takes eight multiplications
//! for each sum, and three operations (six for Q6_K) to scale the result. So at most about seven tenths of the
//! machine's multiplications can be reached.

use std::arch::x86_64::*;

use super::unpack_register::{float_scales, halves, integer, min_pairs, scale_integers};
use crate::matmul::quantized::activations::{RowBlock, SLICE_WORDS};
use crate::matmul::quantized::panel_layout::{Mins, PanelLayout, QuantizedFormat, SLICE_LEN, Scales};
use crate::matmul::{BLOCK_ROWS, PANEL_COLUMNS};

/// Slices of a panel that are unpacked at a time: 16 KB for two panels.
pub(super) const SLICES: usize = 16;

/// Slices of a unit with integer scales.
const UNIT_SLICES: usize = 8;
/// Units with integer scales that are unpacked at a time.
const UNITS: usize = SLICES / UNIT_SLICES;

/// 32 bits, or a pair of i16, for each column.
type ColumnRegister = [u32; PANEL_COLUMNS];

/// Some units of a panel, unpacked.
#[repr(C, align(64))]
pub(super) struct UnpackedPanel {
    integers: [[u8; SLICE_LEN * PANEL_COLUMNS]; SLICES],
    /// Scales of each slice or half slice: f32, or i32 if units have a float scale.
    scales: [ColumnRegister; 2 * SLICES],
    /// Minimums of each slice: f32; or of two slices as pairs of i16 if units have a float scale.
    mins: [ColumnRegister; SLICES],
    heads: [ColumnRegister; UNITS],
    min_heads: [ColumnRegister; UNITS],
}

impl UnpackedPanel {
    pub(super) const ZEROS: Self = UnpackedPanel {
        integers: [[0; SLICE_LEN * PANEL_COLUMNS]; SLICES],
        scales: [[0; PANEL_COLUMNS]; 2 * SLICES],
        mins: [[0; PANEL_COLUMNS]; SLICES],
        heads: [[0; PANEL_COLUMNS]; UNITS],
        min_heads: [[0; PANEL_COLUMNS]; UNITS],
    };

    /// Unpacks units of a panel.
    ///
    /// # Safety
    /// `units` are whole units of F, of at most [`SLICES`] slices; the machine has AVX-512 BW.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn fill<F: QuantizedFormat>(&mut self, units: &[u8]) {
        let layout = F::LAYOUT;
        let put = |to: &mut ColumnRegister, x: __m512i| {
            // SAFETY: `to` has the size and alignment of a register; the caller guarantees the features.
            unsafe { _mm512_store_si512(to.as_mut_ptr().cast(), x) };
        };
        for (u, unit) in units.chunks_exact(layout.unit_bytes()).enumerate() {
            let unit = unit.as_ptr();
            // SAFETY: the unit is whole; the caller guarantees the features.
            unsafe {
                for slice in 0..layout.slices {
                    let at = u * layout.slices + slice;
                    let integers = self.integers[at].as_mut_ptr();
                    for j in 0..SLICE_WORDS {
                        _mm512_store_si512(integers.add(64 * j).cast(), integer::<F>(unit, slice, j));
                    }
                    match layout.scales {
                        Scales::Float | Scales::BrainFloat | Scales::Single => {
                            put(&mut self.scales[at], _mm512_castps_si512(float_scales::<F>(unit, slice)));
                        }
                        Scales::PerSlice => put(&mut self.scales[at], scale_integers::<F>(unit, slice, 0)),
                        Scales::PerHalfSlice => {
                            put(&mut self.scales[2 * at], scale_integers::<F>(unit, slice, 0));
                            put(&mut self.scales[2 * at + 1], scale_integers::<F>(unit, slice, 1));
                        }
                    }
                    match layout.mins {
                        Mins::Float => {
                            put(&mut self.mins[at], _mm512_castps_si512(halves(unit.add(layout.min(slice)))));
                        }
                        Mins::PerSlice if slice % 2 == 1 => {
                            put(&mut self.mins[at / 2], min_pairs::<F>(unit, slice / 2))
                        }
                        _ => {}
                    }
                }
                if !layout.scaled_by_floats() {
                    put(&mut self.heads[u], _mm512_castps_si512(halves(unit.add(layout.head()))));
                }
                if layout.mins == Mins::PerSlice {
                    put(&mut self.min_heads[u], _mm512_castps_si512(halves(unit.add(layout.min_head()))));
                }
            }
        }
    }
}

/// The operands of [`multiply`].
pub(super) struct UnpackedWork<'a> {
    pub(super) panels: *const UnpackedPanel,
    /// A block ordered by word, its first slice, and the number of slices.
    pub(super) x: RowBlock<'a>,
    pub(super) slice: usize,
    pub(super) num_slices: usize,
    /// The first row.
    pub(super) row: usize,
    /// Results of the first row and the first panel, followed by those of the other rows; the next panel's are
    /// `distance` values further on.
    pub(super) results: *mut f32,
    pub(super) distance: usize,
    /// Whether results are overwritten; otherwise they are added to.
    pub(super) fresh: bool,
}

/// Multiplies R rows with P panels.
///
/// # Safety
/// There are P panels, unpacked from units of that layout. The block has the slices, and block and results have memory
/// for R rows from the first on. The machine has AVX-512 with VNNI.
pub(super) unsafe fn multiply<const R: usize, const P: usize>(layout: &PanelLayout, work: &UnpackedWork<'_>) {
    // SAFETY: passed on from the caller. Layouts with float scales have either minimums or an offset; of those with
    // integer scales, the ones with scales for half slices have an offset and the others minimums.
    unsafe {
        match (layout.scales, layout.mins) {
            (Scales::Float, Mins::Float) => by_floats::<true, R, P>(work),
            (Scales::Float | Scales::BrainFloat | Scales::Single, _) => by_floats::<false, R, P>(work),
            (Scales::PerSlice, _) => by_integers::<false, R, P>(work),
            (Scales::PerHalfSlice, _) => by_integers::<true, R, P>(work),
        }
    }
}

/// Slices with float scales, and either minimums or an offset.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn by_floats<const MINS: bool, const R: usize, const P: usize>(work: &UnpackedWork<'_>) {
    let &UnpackedWork { panels, x, slice, num_slices, row, results, distance, fresh } = work;
    let m = x.num_rows;
    // SAFETY: the caller guarantees panels, rows and results.
    unsafe {
        for s in 0..num_slices {
            let place = (slice + s) * m + row;
            let mut dots = [[_mm512_setzero_si512(); R]; P];
            if !MINS {
                for r in 0..R {
                    let start = _mm512_set1_epi32(*x.offsets32.add(place + r));
                    for p in 0..P {
                        dots[p][r] = start;
                    }
                }
            }
            let integers = (&raw const (*panels).integers).cast::<u8>().add(s * SLICE_LEN * PANEL_COLUMNS);
            add_dots::<R, P, 0, SLICE_WORDS>(&mut dots, integers, x.words(slice + s, row));
            for p in 0..P {
                let panel = panels.add(p);
                let scale = _mm512_load_ps((&raw const (*panel).scales).cast::<f32>().add(s * PANEL_COLUMNS));
                let min = _mm512_load_ps((&raw const (*panel).mins).cast::<f32>().add(s * PANEL_COLUMNS));
                for r in 0..R {
                    let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[p][r]), scale);
                    if MINS {
                        part = _mm512_fmadd_ps(_mm512_set1_ps(*x.sums.add(place + r)), min, part);
                    }
                    // Results are kept in memory: there are not enough registers for sixteen of them beside sixteen
                    // products.
                    let result = results.add(p * distance + r * PANEL_COLUMNS);
                    let sum = if fresh && s == 0 { _mm512_setzero_ps() } else { _mm512_loadu_ps(result) };
                    let scale = _mm512_set1_ps(*x.scales.add(place + r));
                    _mm512_storeu_ps(result, _mm512_fmadd_ps(part, scale, sum));
                }
            }
        }
    }
}

/// Units of eight slices with integer scales: of whole slices, with minimums; or of half slices, with an offset.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn by_integers<const HALVES: bool, const R: usize, const P: usize>(work: &UnpackedWork<'_>) {
    let &UnpackedWork { panels, x, slice, num_slices, row, results, distance, fresh } = work;
    let m = x.num_rows;
    // SAFETY: the caller guarantees panels, rows and results.
    unsafe {
        for u in 0..num_slices / UNIT_SLICES {
            let mut scaled = [[_mm512_setzero_si512(); R]; P];
            for s in u * UNIT_SLICES..(u + 1) * UNIT_SLICES {
                let integers = (&raw const (*panels).integers).cast::<u8>().add(s * SLICE_LEN * PANEL_COLUMNS);
                let words = x.words(slice + s, row);
                macro_rules! part {
                    ($from:expr, $to:expr, $half:expr, $scale:expr) => {
                        let mut dots = [[_mm512_setzero_si512(); R]; P];
                        if HALVES {
                            for r in 0..R {
                                let offset = x.offsets16.add((2 * (slice + s) + $half) * m + row + r);
                                let start = _mm512_set1_epi32(*offset);
                                for p in 0..P {
                                    dots[p][r] = start;
                                }
                            }
                        }
                        add_dots::<R, P, { $from }, { $to }>(&mut dots, integers, words);
                        for p in 0..P {
                            let scale = _mm512_load_si512((&raw const (*panels.add(p)).scales[$scale]).cast());
                            for r in 0..R {
                                scaled[p][r] = _mm512_add_epi32(scaled[p][r], _mm512_mullo_epi32(dots[p][r], scale));
                            }
                        }
                    };
                }
                if HALVES {
                    part!(0, SLICE_WORDS / 2, 0, 2 * s);
                    part!(SLICE_WORDS / 2, SLICE_WORDS, 1, 2 * s + 1);
                } else {
                    part!(0, SLICE_WORDS, 0, s);
                }
            }
            for p in 0..P {
                let panel = panels.add(p);
                let head = _mm512_load_ps((&raw const (*panel).heads[u]).cast());
                let min_head = _mm512_load_ps((&raw const (*panel).min_heads[u]).cast());
                for r in 0..R {
                    let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(scaled[p][r]), head);
                    if !HALVES {
                        let mut minimum = _mm512_setzero_si512();
                        for i in u * UNIT_SLICES / 2..(u + 1) * UNIT_SLICES / 2 {
                            let min = _mm512_load_si512((&raw const (*panel).mins[i]).cast());
                            let pair = x.pairs.add((slice / 2 + i) * m + row + r).cast::<i32>();
                            let pair = _mm512_set1_epi32(pair.read_unaligned());
                            minimum = _mm512_dpwssd_epi32(minimum, min, pair);
                        }
                        part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minimum), min_head, part);
                    }
                    let result = results.add(p * distance + r * PANEL_COLUMNS);
                    let sum = if fresh && u == 0 { _mm512_setzero_ps() } else { _mm512_loadu_ps(result) };
                    let scale = _mm512_set1_ps(*x.scales.add((slice / UNIT_SLICES + u) * m + row + r));
                    _mm512_storeu_ps(result, _mm512_fmadd_ps(part, scale, sum));
                }
            }
        }
    }
}

/// Adds the products of words FROM to TO of a slice; `integers` are those of the first panel.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn add_dots<const R: usize, const P: usize, const FROM: usize, const TO: usize>(
    dots: &mut [[__m512i; R]; P],
    integers: *const u8,
    words: *const i32,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        for j in FROM..TO {
            let mut w = [_mm512_setzero_si512(); P];
            for p in 0..P {
                w[p] = _mm512_load_si512(integers.add(p * size_of::<UnpackedPanel>() + 64 * j).cast());
            }
            for r in 0..R {
                let x = _mm512_set1_epi32(*words.add(j * BLOCK_ROWS + r));
                for p in 0..P {
                    dots[p][r] = _mm512_dpbusd_epi32(dots[p][r], w[p], x);
                }
            }
        }
    }
}
