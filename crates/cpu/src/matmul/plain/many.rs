//! Many rows by AVX-512: for each unit of K two panels become f32 and serve all rows, eight at a time, so that a number of x serves 32 columns.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::super::Product;
use super::super::activations::BLOCK;
use super::super::packing::COLUMNS;
use super::super::results::{Sink, Tile};
use super::{BF16, F16, F32, Numbers, PlainWeight, Rows, UNIT, units};
use pellucid_tensor::DType;

/// Panels that are multiplied together.
const PANELS: usize = 2;

/// Numbers of a unit of one panel.
type Unit = [[f32; COLUMNS]; UNIT];

#[repr(C, align(64))]
struct Scratch([Unit; PANELS]);

thread_local! {
    /// Kept by each thread so that a step allocates nothing after the first.
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch([[[0.0; COLUMNS]; UNIT]; PANELS])));
}

/// Some panels for all rows, written to the product's output.
///
/// # Safety
/// The machine has AVX-512; rows and weight have the same depth. No other thread writes these panels, and the output is alive.
pub(in crate::matmul) unsafe fn rows_times_panels(
    product: &Product<'_>,
    weight: &PlainWeight,
    panels: Range<usize>,
    x: Rows<'_>,
) {
    let multiply = match product.weight.dtype {
        DType::F32 => multiply::<F32>,
        DType::F16 => multiply::<F16>,
        DType::BF16 => multiply::<BF16>,
        _ => unreachable!("quantized formats have other kernels"),
    };
    let sink = Sink { product, panels, num_rows: x.num_rows() };
    // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
    unsafe { sink.fill::<1>(|_, panels, blocks, results| multiply(weight, panels, x, blocks, results), |_, _| {}) };
}

/// Some panels times some blocks of rows; results are `[panel][block]`.
///
/// # Safety
/// As for `rows_times_panels`, and results have a tile for every panel and block.
unsafe fn multiply<N: Numbers>(
    weight: &PlainWeight,
    panels: Range<usize>,
    x: Rows<'_>,
    blocks: Range<usize>,
    results: &mut [Tile<f32>],
) {
    let num_rows = x.num_rows();
    SCRATCH.with_borrow_mut(|scratch| {
        for unit in units(x.depth) {
            for start in panels.clone().step_by(PANELS) {
                let few = start..panels.end.min(start + PANELS);
                for (panel, numbers) in few.clone().zip(&mut scratch.0) {
                    // SAFETY: the panel has these numbers; features by the caller's promise.
                    unsafe { widen::<N>(weight.panel(panel).as_ptr(), unit.clone(), numbers) };
                }
                for block in blocks.clone() {
                    let at = (few.start - panels.start) * blocks.len() + block - blocks.start;
                    let end = num_rows.min((block + 1) * BLOCK);
                    let mut row = block * BLOCK;
                    while row < end {
                        let work = Work {
                            x: x.x[row * x.depth + unit.start..].as_ptr(),
                            depth: x.depth,
                            numbers: &scratch.0,
                            len: unit.len(),
                            results: results[at..].as_mut_ptr().cast::<f32>().wrapping_add(row % BLOCK * COLUMNS),
                            distance: blocks.len() * BLOCK * COLUMNS,
                            fresh: unit.start == 0,
                        };
                        macro_rules! rows {
                            ($rows:literal, $panels:literal) => {{
                                // SAFETY: so many rows and panels are there, and results for them; features by the caller's promise.
                                unsafe { rows_times::<$rows, $panels>(&work) };
                                $rows
                            }};
                        }
                        row += match (end - row, few.len()) {
                            (8.., 2) => rows!(8, 2),
                            (8.., _) => rows!(8, 1),
                            (4..=7, 2) => rows!(4, 2),
                            (4..=7, _) => rows!(4, 1),
                            (_, 2) => rows!(1, 2),
                            (_, _) => rows!(1, 1),
                        };
                    }
                }
            }
        }
    });
}

/// Numbers of a panel as f32.
///
/// # Safety
/// The panel has them; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
unsafe fn widen<N: Numbers>(panel: *const u8, unit: Range<usize>, numbers: &mut Unit) {
    for (k, numbers) in unit.zip(numbers) {
        // SAFETY: passed on from the caller.
        unsafe { _mm512_storeu_ps(numbers.as_mut_ptr(), N::sixteen(panel, k)) };
    }
}

/// Some rows of x times a unit of panels.
struct Work<'a> {
    /// The first row's numbers of the unit; those of the next row lie `depth` further on.
    x: *const f32,
    depth: usize,
    numbers: &'a [Unit; PANELS],
    /// Numbers of the unit.
    len: usize,
    /// The first row's results of the first panel, followed by the other rows'; those of the next panel lie `distance` numbers further on.
    results: *mut f32,
    distance: usize,
    /// Whether results begin with this unit.
    fresh: bool,
}

/// R rows times P panels.
///
/// # Safety
/// So many rows, panels and results are there; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
unsafe fn rows_times<const R: usize, const P: usize>(work: &Work<'_>) {
    let &Work { x, depth, numbers, len, results, distance, fresh } = work;
    let mut parts = [[_mm512_setzero_ps(); R]; P];
    // SAFETY: by the caller's promise.
    unsafe {
        for k in 0..len {
            let mut w = [_mm512_setzero_ps(); P];
            for p in 0..P {
                w[p] = _mm512_loadu_ps(numbers.get_unchecked(p).get_unchecked(k).as_ptr());
            }
            for r in 0..R {
                let x = _mm512_set1_ps(*x.add(r * depth + k));
                for p in 0..P {
                    parts[p][r] = _mm512_fmadd_ps(x, w[p], parts[p][r]);
                }
            }
        }
        for p in 0..P {
            for r in 0..R {
                let result = results.add(p * distance + r * COLUMNS);
                let before = if fresh { _mm512_setzero_ps() } else { _mm512_loadu_ps(result) };
                _mm512_storeu_ps(result, _mm512_add_ps(before, parts[p][r]));
            }
        }
    }
}
