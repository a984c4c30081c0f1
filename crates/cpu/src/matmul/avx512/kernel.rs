//! Some rows times some panels.
//!
//! Sums of several rows and panels grow side by side, since an instruction takes five cycles and two can begin in each: of eight rows and two
//! panels sixteen sums, so that a register of W serves eight times and one of x twice. For each of them and each slice of 32 numbers there are
//! eight multiplications, and three operations (six for Q6_K) that scale what they give: some seven tenths of what the machine can multiply is
//! the most to be had.

use std::arch::x86_64::*;

use super::super::activations::RowBlock;
use super::super::ahead::Ahead;
use super::super::packing::{COLUMNS, Layout, Mins, Packing, SLICE, Scales};
use super::unpack::{halves, integer, min_pairs, scale_integers};

/// How far ahead of its use W is fetched when [`MANY_PANELS`] are read side by side: they share the first-level cache.
const PREFETCH_BYTES: usize = 2 * 1024;

/// Panels of which each is fetched on its own.
pub(super) const MANY_PANELS: usize = 4;

/// Distance of two rows' slices, in words of four numbers.
const ROW_WORDS: usize = 2 * SLICE / 4;

/// Bytes of an unpacked slice.
pub(super) const SLICE_BYTES: usize = SLICE * COLUMNS;

/// How the numbers of W lie in memory.
pub(super) trait Form {
    fn unit_bytes(layout: &Layout) -> usize;

    /// Register j of a slice, as [`integer`] gives it.
    ///
    /// # Safety
    /// `unit` is a whole unit of F in this form; the machine has AVX-512 BW.
    unsafe fn register<F: Packing>(unit: *const u8, slice: usize, j: usize) -> __m512i;
}

/// As a weight has them.
pub(super) struct Packed;

impl Form for Packed {
    #[inline(always)]
    fn unit_bytes(layout: &Layout) -> usize {
        layout.unit_bytes()
    }

    #[inline(always)]
    unsafe fn register<F: Packing>(unit: *const u8, slice: usize, j: usize) -> __m512i {
        // SAFETY: passed on from the caller.
        unsafe { integer::<F>(unit, slice, j) }
    }
}

/// In bytes, register after register.
pub(super) struct Unpacked;

impl Form for Unpacked {
    #[inline(always)]
    fn unit_bytes(layout: &Layout) -> usize {
        layout.slices * SLICE_BYTES
    }

    #[inline(always)]
    unsafe fn register<F: Packing>(unit: *const u8, slice: usize, j: usize) -> __m512i {
        // SAFETY: passed on from the caller.
        unsafe { _mm512_loadu_si512(unit.add(SLICE_BYTES * slice + 64 * j).cast()) }
    }
}

/// Neighbouring panels, or a stretch of them.
#[derive(Clone, Copy)]
pub(super) struct Stretch {
    /// The first panel's first unit as it lies in the weight, and the bytes from panel to panel.
    pub(super) packed: *const u8,
    pub(super) panel_bytes: usize,
    /// The same of the numbers, in their form.
    pub(super) numbers: *const u8,
    pub(super) numbers_bytes: usize,
    /// The first unit's number within the panel, and how many there are.
    pub(super) first: usize,
    pub(super) num_units: usize,
}

/// Some rows of a block, and where their results go.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) x: RowBlock,
    pub(super) first: usize,
    /// The first row's results of the first panel, followed by the other rows'; those of the next panel lie `distance` numbers further on.
    pub(super) results: *mut f32,
    pub(super) distance: usize,
    /// Whether results begin with this stretch, or go on.
    pub(super) fresh: bool,
}

/// R rows times P panels. A few panels ask for what is `ahead`; [`MANY_PANELS`] fetch what follows in each of them, and then the first bytes of
/// the panels that lie `following` bytes further on.
///
/// # Safety
/// The stretch has P panels of F with their numbers in the form N, the block has as many units, R rows from the first on, and results for them.
/// The machine has AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply<F: Packing, N: Form, const R: usize, const P: usize>(
    w: &Stretch,
    rows: &Rows,
    ahead: &mut Ahead,
    following: Option<isize>,
) {
    let layout = F::LAYOUT;
    let &Rows { x, first, results, distance, fresh } = rows;
    let (m, unit_bytes) = (x.num_rows, layout.unit_bytes());
    let mut sums = [[_mm512_setzero_ps(); R]; P];
    // SAFETY: units, slices, rows and results are where the caller promises; a prefetch may go anywhere.
    unsafe {
        if !fresh {
            for p in 0..P {
                for r in 0..R {
                    sums[p][r] = _mm512_loadu_ps(results.add(p * distance + r * COLUMNS));
                }
            }
        }
        for i in 0..w.num_units {
            let u = w.first + i;
            let (mut units, mut numbers) = ([w.packed; P], [w.numbers; P]);
            for p in 0..P {
                units[p] = w.packed.add(p * w.panel_bytes + i * unit_bytes);
                numbers[p] = w.numbers.add(p * w.numbers_bytes + i * N::unit_bytes(&layout));
            }
            // Where a panel ends, its stream goes on in the panels that follow, if there are any.
            let further = match (u * unit_bytes + PREFETCH_BYTES < w.panel_bytes, following) {
                (true, _) => PREFETCH_BYTES,
                (false, None) => 0,
                (false, Some(bytes)) => PREFETCH_BYTES.wrapping_sub(w.panel_bytes).wrapping_add_signed(bytes),
            };
            let mut scaled = [[_mm512_setzero_si512(); R]; P];
            let mut minimums = [[_mm512_setzero_si512(); R]; P];
            for slice in 0..layout.slices {
                let at = u * layout.slices + slice;
                let place = at * m + first;
                let quants = x.slice(at, first).cast::<i32>();
                if P < MANY_PANELS {
                    ahead.fetch();
                } else {
                    let lines = unit_bytes / 64;
                    for line in slice * lines / layout.slices..(slice + 1) * lines / layout.slices {
                        for p in 0..P {
                            let from = units[p].wrapping_add(further.wrapping_add(64 * line));
                            _mm_prefetch::<_MM_HINT_T0>(from.cast());
                        }
                    }
                }
                match layout.scales {
                    Scales::Plain => {
                        let dots = dots::<F, N, R, P, 0, 8>(numbers, slice, quants, x.offsets32.wrapping_add(place));
                        for p in 0..P {
                            let scale = halves(units[p].add(layout.scale(slice)));
                            for r in 0..R {
                                let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[p][r]), scale);
                                if layout.mins == Mins::Plain {
                                    let mins = halves(units[p].add(layout.min(slice)));
                                    part = _mm512_fmadd_ps(_mm512_set1_ps(*x.sums.add(place + r)), mins, part);
                                }
                                let scale = _mm512_set1_ps(*x.scales.add(place + r));
                                sums[p][r] = _mm512_fmadd_ps(part, scale, sums[p][r]);
                            }
                        }
                    }
                    Scales::Slices => {
                        let dots = dots::<F, N, R, P, 0, 8>(numbers, slice, quants, x.offsets32);
                        add_scaled::<F, R, P>(&mut scaled, &dots, units, slice, 0);
                    }
                    Scales::Halves => {
                        let offsets = x.offsets16.wrapping_add(2 * at * m + first);
                        let first = dots::<F, N, R, P, 0, 4>(numbers, slice, quants, offsets);
                        add_scaled::<F, R, P>(&mut scaled, &first, units, slice, 0);
                        let second = dots::<F, N, R, P, 4, 8>(numbers, slice, quants, offsets.wrapping_add(m));
                        add_scaled::<F, R, P>(&mut scaled, &second, units, slice, 1);
                    }
                }
                if layout.mins == Mins::Slices && slice % 2 == 1 {
                    for p in 0..P {
                        let mins = min_pairs::<F>(units[p], slice / 2);
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
                    sums[p][r] = _mm512_fmadd_ps(part, scale, sums[p][r]);
                }
            }
        }
        for p in 0..P {
            for r in 0..R {
                _mm512_storeu_ps(results.add(p * distance + r * COLUMNS), sums[p][r]);
            }
        }
    }
}

/// Sums of the products of registers FROM to TO of a slice.
///
/// # Safety
/// Each of `numbers` is a whole unit of F in the form N, `quants` are rows of x and `offsets` what the numbers' offset adds for each of them;
/// the machine has AVX-512 with VNNI.
#[inline(always)]
unsafe fn dots<F: Packing, N: Form, const R: usize, const P: usize, const FROM: usize, const TO: usize>(
    numbers: [*const u8; P],
    slice: usize,
    quants: *const i32,
    offsets: *const i32,
) -> [[__m512i; R]; P] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut dots = [[_mm512_setzero_si512(); R]; P];
        for r in 0..R {
            let start = offset::<F>(offsets.wrapping_add(r));
            for p in 0..P {
                dots[p][r] = start;
            }
        }
        for j in FROM..TO {
            let mut w = [_mm512_setzero_si512(); P];
            for p in 0..P {
                w[p] = N::register::<F>(numbers[p], slice, j);
            }
            for r in 0..R {
                let x = _mm512_set1_epi32(*quants.add(ROW_WORDS * r + j));
                for p in 0..P {
                    dots[p][r] = _mm512_dpbusd_epi32(dots[p][r], w[p], x);
                }
            }
        }
        dots
    }
}

/// Adds sums of products times the integers that scale them.
///
/// # Safety
/// `units` are whole units of F, whose scales are integers; the machine has AVX-512 with VNNI.
#[inline(always)]
unsafe fn add_scaled<F: Packing, const R: usize, const P: usize>(
    scaled: &mut [[__m512i; R]; P],
    dots: &[[__m512i; R]; P],
    units: [*const u8; P],
    slice: usize,
    half: usize,
) {
    for p in 0..P {
        // SAFETY: passed on from the caller.
        unsafe {
            let scale = scale_integers::<F>(units[p], slice, half);
            for r in 0..R {
                scaled[p][r] = _mm512_add_epi32(scaled[p][r], _mm512_mullo_epi32(dots[p][r], scale));
            }
        }
    }
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
