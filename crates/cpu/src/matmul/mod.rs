//! `out[n][m] = x[n][k] · w[m][k] + bias[m]`, with w in any format: what a product is, where its weight lies, who computes which part.
//!
//! Each format has one definition of its arithmetic, whatever the number of rows:
//!
//! - Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K: x is rounded to 8-bit integers, row by row ([`activations`]); integers are multiplied
//!   and added exactly, and the scales are applied in the order that [`scalar`] spells out. Integer sums do not depend on the
//!   instruction that computes them, so every instruction set, one row and many give the same bits.
//! - Every other format: rows of w are decoded to f32 ([`decoded`]).
//!
//! Threads share out panels of sixteen columns, never parts of a sum.

pub(crate) mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod decoded;
mod packing;
mod scalar;
mod weight;

use std::sync::Mutex;

use activations::Quantized;
use packing::{COLUMNS, Packing, with_packing};
pub(crate) use weight::LinearWeight;
use weight::{PackedWeight, Stored};

use crate::memory::SharedOutput;
use crate::pool::Pool;
use crate::simd::{Level, with_simd};

/// Products with one input that are computed together, at most.
pub(crate) const MAX_PRODUCTS: usize = 4;

/// From this many rows on, tiles are faster than vectors.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS: usize = 10;

/// One product of several with the same x.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) weight: &'a LinearWeight,
    pub(crate) bias: Option<&'a [f32]>,
    /// `[rows][columns of this product]`
    pub(crate) out: SharedOutput,
}

/// Which instructions multiply integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IntegerKernel {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// AMX for many rows, VNNI for few.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl IntegerKernel {
    fn of(level: Level) -> Self {
        match level {
            Level::Scalar(_) => IntegerKernel::Scalar,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => IntegerKernel::Avx2,
            // AVX-512 came before VNNI did; such machines multiply as AVX2 does.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) if is_x86_feature_detected!("avx512vnni") => IntegerKernel::Vnni,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => IntegerKernel::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Amx(..) => IntegerKernel::Amx,
        }
    }
}

/// Computes products, and keeps what they need from step to step.
#[derive(Debug)]
pub(crate) struct Multiplier {
    level: Level,
    kernel: IntegerKernel,
    /// The rows of x, in the two groupings that formats ask for.
    rows: Mutex<[Quantized; 2]>,
}

impl Multiplier {
    pub(crate) fn new(level: Level) -> Self {
        Multiplier { level, kernel: IntegerKernel::of(level), rows: Mutex::default() }
    }

    /// Computes products, at most [`MAX_PRODUCTS`], of the same rows x, each `depth` long.
    pub(crate) fn run<'a>(
        &self,
        pool: &Pool,
        x: &[f32],
        depth: usize,
        products: impl IntoIterator<Item = &'a Product<'a>>,
    ) {
        let mut rows = self.rows.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut packed = [None; MAX_PRODUCTS];
        let mut filled = [false; 2];
        for (i, product) in products.into_iter().enumerate() {
            assert_eq!(product.weight.depth, depth, "x is as wide as the weight");
            match &product.weight.stored {
                Stored::Packed(weight) => {
                    let grouping = grouping(weight.group);
                    if !filled[grouping] {
                        with_simd!(self.level, simd => rows[grouping].fill(simd, pool, x, depth, weight.group));
                        filled[grouping] = true;
                    }
                    packed[i] = Some((weight, product));
                }
                Stored::Rows(bytes) => with_simd!(self.level, simd => {
                    decoded::matmul(simd, pool, x, product, bytes);
                }),
            }
        }
        let num_panels =
            |slot: &Option<(&PackedWeight, &Product<'_>)>| slot.map_or(0, |(weight, _)| weight.num_panels());
        let total: usize = packed.iter().map(num_panels).sum();
        // Pieces small enough that a thread that was held up does not keep the other waiting for long.
        let per_task = total.div_ceil(pool.num_threads() * 8).max(1);
        pool.run(total.div_ceil(per_task), &|task| {
            let mut panels = task * per_task..((task + 1) * per_task).min(total);
            let mut start = 0;
            for (weight, product) in packed.iter().flatten() {
                let end = start + weight.num_panels();
                let here = panels.start.max(start)..panels.end.min(end);
                if !here.is_empty() {
                    let rows = &rows[grouping(weight.group)];
                    with_packing!(product.weight.dtype, F => {
                        self.panels::<F>(weight, product, here.start - start..here.end - start, rows)
                    });
                    panels.start = here.end;
                }
                start = end;
            }
        });
    }

    /// Some panels of one product, for all rows.
    fn panels<F: Packing>(
        &self,
        weight: &PackedWeight,
        product: &Product<'_>,
        panels: std::ops::Range<usize>,
        rows: &Quantized,
    ) {
        let num_units = rows.num_units();
        assert_eq!(num_units, weight.num_units, "x and the weight are cut alike");
        #[cfg(target_arch = "x86_64")]
        if self.kernel == IntegerKernel::Amx && rows.num_rows() >= AMX_ROWS {
            // SAFETY: tasks own disjoint panels, and the output stays borrowed until the pool has run.
            let mut put = |row: usize, panel: usize, results: &_| unsafe { product.put(row, panel, results) };
            // SAFETY: the kernel was chosen for this machine; rows and weight have as many units.
            unsafe { amx::rows_times_panels::<F>(weight, panels, rows, &mut put) };
            return;
        }
        for panel in panels {
            let bytes = weight.panel(panel);
            for block in 0..rows.num_blocks() {
                let x = rows.block(block);
                let mut put = |row: usize, results: &[f32; COLUMNS]| {
                    // SAFETY: tasks own disjoint panels, and the output stays borrowed until the pool has run.
                    unsafe { product.put(block * activations::BLOCK + row, panel, results) };
                };
                // SAFETY: panel and block have `num_units` units of F; the kernel was chosen for this machine.
                unsafe {
                    match self.kernel {
                        IntegerKernel::Scalar => {
                            (0..x.num_rows)
                                .for_each(|row| put(row, &scalar::row_times_panel::<F>(bytes, num_units, x, row)));
                        }
                        #[cfg(target_arch = "x86_64")]
                        IntegerKernel::Avx2 => {
                            let panel = bytes.as_ptr();
                            (0..x.num_rows)
                                .for_each(|row| put(row, &avx2::row_times_panel::<F>(panel, num_units, x, row)));
                        }
                        #[cfg(target_arch = "x86_64")]
                        IntegerKernel::Vnni | IntegerKernel::Amx => {
                            avx512::block_times_panel::<F>(bytes.as_ptr(), num_units, x, &mut put);
                        }
                    }
                }
            }
        }
    }
}

impl Product<'_> {
    fn num_columns(&self) -> usize {
        self.weight.num_columns
    }

    /// Writes sixteen results of a row (fewer in the last panel), with their bias.
    ///
    /// # Safety
    /// No other thread writes this panel, and the output is alive.
    #[inline(always)]
    unsafe fn put(&self, row: usize, panel: usize, results: &[f32; COLUMNS]) {
        let start = panel * COLUMNS;
        let width = COLUMNS.min(self.num_columns() - start);
        // SAFETY: passed on from the caller.
        let out = unsafe { self.out.part(row * self.num_columns() + start, width) };
        out.copy_from_slice(&results[..width]);
        if let Some(bias) = self.bias {
            out.iter_mut().zip(&bias[start..start + width]).for_each(|(out, bias)| *out += bias);
        }
    }
}

/// Which of the two groupings a group of so many slices belongs to.
fn grouping(group: usize) -> usize {
    usize::from(group != packing::Q4_0::LAYOUT.slices)
}
