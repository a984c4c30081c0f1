//! `out[n][m] = x[n][k] · w[m][k] + bias[m]`, with w in any format: what a product is, where its weight lies, who computes which part.
//!
//! Each format has one definition of its arithmetic, whatever the number of rows:
//!
//! - Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K: x is rounded to 8-bit integers, row by row ([`activations`]); integers are multiplied
//!   and added exactly, and the scales are applied in the order that [`scalar`] spells out. Integer sums do not depend on the
//!   instruction that computes them, so every instruction set, one row and many give the same bits.
//! - F32, F16, BF16: f32 multiply-adds in the order that [`plain`] gives; where there is AMX, BF16 goes by its tiles ([`bf16`]).
//! - Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4: rows of w are decoded to f32 first ([`decoded`]).
//!
//! Threads share out panels of sixteen columns and blocks of sixteen rows ([`grid`]), never parts of a sum.

pub(crate) mod activations;
#[cfg(target_arch = "x86_64")]
mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16;
pub(crate) mod decoded;
mod grid;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packing;
mod plain;
#[cfg(target_arch = "x86_64")]
mod results;
mod scalar;
mod source;
mod weight;

use std::ops::Range;
use std::sync::Mutex;

use activations::{Order, Quantized};
#[cfg(target_arch = "x86_64")]
use ahead::Ahead;
use grid::Grid;
use packing::{COLUMNS, FORMS, Packing, with_packing};
#[cfg(target_arch = "x86_64")]
use packing::{Layout, Scales};
pub(crate) use source::Source;
pub(crate) use weight::LinearWeight;
use weight::{PackedWeight, Stored};

use pellucid_tensor::Activation;
#[cfg(target_arch = "x86_64")]
use pellucid_tensor::DType;

use crate::memory::SharedOutput;
#[cfg(target_arch = "x86_64")]
use crate::ops::elementwise;
use crate::pool::{Direction, Pool};
use crate::simd::{Level, with_simd};
use crate::soon::{self, MAX_WEIGHTS, Panels, Soon};

/// Products with one input that are computed together, at most.
pub(crate) const MAX_PRODUCTS: usize = MAX_WEIGHTS;

/// From this many rows on, tiles are faster than vectors, which take eight or up to four rows at a time: later where unpacking costs most.
#[cfg(target_arch = "x86_64")]
const fn amx_rows(layout: &Layout) -> usize {
    match layout.scales {
        Scales::Plain | Scales::Slices => 5,
        Scales::Halves => 9,
    }
}

/// From this many rows on, x lies by words for AVX-512 without tiles, which then takes eight rows at a time.
#[cfg(target_arch = "x86_64")]
const WORDS_ROWS: usize = 5;

/// From this many rows on, two products in BF16 are computed as one: with fewer, threads read on in one weight.
#[cfg(target_arch = "x86_64")]
const BF16_JOINED_ROWS: usize = 3;

/// From this many rows on, products in F32, F16 and BF16 without tiles take eight at a time.
#[cfg(target_arch = "x86_64")]
const EIGHTS_ROWS: usize = 5;

/// One product of several with the same x.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) weight: &'a LinearWeight,
    pub(crate) bias: Option<&'a [f32]>,
    /// `[rows][columns of this product]`
    pub(crate) out: SharedOutput,
}

/// What a task computes.
struct Part<'a> {
    product: &'a Product<'a>,
    panels: Range<usize>,
    /// Of rows.
    blocks: Range<usize>,
    /// Where the thread is likely to go on.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "its kernels go upwards"))]
    direction: Direction,
}

/// Which instructions multiply integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IntegerKernel {
    Scalar,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDotProducts,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
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
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) if neon::has_dot_products() => IntegerKernel::NeonDotProducts,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => IntegerKernel::Neon,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) if is_x86_feature_detected!("avxvnni") => IntegerKernel::AvxVnni,
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
    inputs: Mutex<Inputs>,
}

/// The rows of x in every form that a weight asked for.
#[derive(Debug, Default)]
struct Inputs {
    /// For the integer kernels, in each of their forms.
    quantized: [Quantized; FORMS],
    #[cfg(target_arch = "x86_64")]
    rounded: bf16::BfRows,
    #[cfg(target_arch = "x86_64")]
    eights: plain::Eights,
    /// Of products.
    order: soon::Order,
}

impl Multiplier {
    pub(crate) fn new(level: Level) -> Self {
        Multiplier { level, kernel: IntegerKernel::of(level), inputs: Mutex::default() }
    }

    /// Computes products, at most [`MAX_PRODUCTS`], of the same rows x, each `depth` long.
    pub(crate) fn run<'a>(&self, pool: &Pool, x: Source<'_>, products: impl IntoIterator<Item = &'a Product<'a>>) {
        if x.num_rows() == 0 {
            return;
        }
        let (mut shared, mut products) = ([None; MAX_PRODUCTS], products.into_iter());
        shared.iter_mut().zip(&mut products).for_each(|(slot, product)| *slot = Some(product));
        assert!(products.next().is_none(), "at most {MAX_PRODUCTS} products at once");
        let mut inputs = self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let x = self.prepare(&mut inputs, pool, x, shared.iter().flatten().copied());
        let (num_rows, x) = (x.num_rows(), plain::Rows { x: x.all(), depth: x.depth() });
        for product in shared.iter().flatten() {
            if let Stored::Rows(bytes) = &product.weight.stored {
                with_simd!(self.level, simd => decoded::matmul(simd, pool, x.x, product, bytes));
            }
        }
        let total: usize = shared.iter().flatten().map(|product| product.weight.num_panels()).sum();
        let grid = Grid::new(num_rows, total, pool.num_threads());
        let soon = inputs.order.after(weights_of(&shared, grid));
        let inputs = &*inputs;
        pool.run_from_both_ends(grid.num_tasks(), Some(soon), &|task, direction| {
            let (panels, blocks) = grid.task(task);
            let mut start = 0;
            for product in shared.iter().flatten() {
                let end = start + product.weight.num_panels();
                let here = panels.start.max(start)..panels.end.min(end);
                if !here.is_empty() {
                    let panels = here.start - start..here.end - start;
                    self.panels(Part { product, panels, blocks: blocks.clone(), direction }, x, inputs);
                }
                start = end;
            }
        });
    }

    /// Computes two products of the same rows as one: the first becomes `activation(first) * second`, and of the second nothing is written. A
    /// task has the same panels of both, and joins what comes of them while it is in its cache. False, and nothing done, where that is not
    /// faster than one after the other: for few rows, whose threads read on in one weight, and without AVX-512.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn run_gated(
        &self,
        pool: &Pool,
        x: Source<'_>,
        products: &[Product<'_>; 2],
        activation: Activation,
    ) -> bool {
        let [gate, up] = products;
        assert_eq!(gate.num_columns(), up.num_columns(), "a gate for every number");
        let (num_rows, total) = (x.num_rows(), gate.weight.num_panels());
        let joins = match &gate.weight.stored {
            Stored::Packed(weight) => match self.kernel {
                IntegerKernel::Amx => num_rows >= amx_rows(&weight.layout),
                IntegerKernel::Vnni => num_rows > activations::BLOCK,
                _ => false,
            },
            Stored::Plain(_) if self.uses_bf16_tiles(gate.weight.dtype) => num_rows >= BF16_JOINED_ROWS,
            Stored::Plain(_) => num_rows > activations::BLOCK && self.uses_eights(num_rows),
            Stored::Rows(_) => false,
        };
        let no_bias = products.iter().all(|product| product.bias.is_none());
        if !joins || gate.weight.dtype != up.weight.dtype || !no_bias {
            return false;
        }
        let mut inputs = self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.prepare(&mut inputs, pool, x, products.iter());
        let grid = Grid::of_two(num_rows, total, pool.num_threads());
        let soon = inputs.order.after(weights_of(&[Some(gate)], grid));
        let inputs = &*inputs;
        let join = |gate: &mut [f32], up: &[f32]| {
            with_simd!(self.level, simd => elementwise::gate(simd, activation, up, gate));
        };
        pool.run_from_both_ends(grid.num_tasks(), Some(soon), &|task, direction| {
            let (panels, blocks) = grid.task(task);
            let part = Part { product: gate, panels, blocks, direction };
            // SAFETY: the kernel was chosen for this machine; rows and weights have the same depth; tasks own disjoint panels, and the output
            // stays borrowed until the pool has run.
            unsafe {
                match (&gate.weight.stored, &up.weight.stored) {
                    (Stored::Packed(first), Stored::Packed(second)) => {
                        let rows = &inputs.quantized[first.layout.form()];
                        with_packing!(gate.weight.dtype, F => {
                            self.wide_panels::<F, 2>(part, [first, second], rows, join);
                        });
                    }
                    (Stored::Plain(first), Stored::Plain(second)) if self.uses_bf16_tiles(gate.weight.dtype) => {
                        bf16::rows_times_panels(part, [first, second], &inputs.rounded, join);
                    }
                    (Stored::Plain(first), Stored::Plain(second)) => {
                        plain::rows_times_panels(part, [first, second], &inputs.eights, join);
                    }
                    _ => unreachable!("weights of one format are stored alike"),
                }
            }
        });
        true
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run_gated(&self, _: &Pool, _: Source<'_>, _: &[Product<'_>; 2], _: Activation) -> bool {
        false
    }

    /// Brings x into every form that the products' weights ask for. It is ready then.
    fn prepare<'a, 'x>(
        &self,
        inputs: &mut Inputs,
        pool: &Pool,
        mut x: Source<'x>,
        products: impl Iterator<Item = &'a Product<'a>>,
    ) -> Source<'x> {
        let mut ready = [false; FORMS + 2];
        for product in products {
            assert_eq!(product.weight.depth, x.depth(), "x is as wide as the weight");
            match &product.weight.stored {
                Stored::Packed(weight) => {
                    let form = weight.layout.form();
                    if !std::mem::replace(&mut ready[form], true) {
                        let rows = &mut inputs.quantized[form];
                        let order = self.order(x.num_rows());
                        with_simd!(self.level, simd => rows.fill(simd, pool, x, &weight.layout, order));
                        x = x.taken();
                    }
                }
                #[cfg(target_arch = "x86_64")]
                Stored::Plain(_) if self.uses_bf16_tiles(product.weight.dtype) => {
                    if !std::mem::replace(&mut ready[FORMS], true) {
                        with_simd!(self.level, simd => inputs.rounded.fill(simd, pool, x));
                        x = x.taken();
                    }
                }
                #[cfg(target_arch = "x86_64")]
                Stored::Plain(_) if self.uses_eights(x.num_rows()) => {
                    if !std::mem::replace(&mut ready[FORMS + 1], true) {
                        with_simd!(self.level, simd => inputs.eights.fill(simd, pool, x));
                        x = x.taken();
                    }
                }
                Stored::Plain(_) | Stored::Rows(_) => {}
            }
        }
        x.ready(pool)
    }

    /// How so many rows of x are to lie for the integer kernel.
    fn order(&self, num_rows: usize) -> Order {
        #[cfg(target_arch = "x86_64")]
        if self.kernel == IntegerKernel::Vnni && num_rows >= WORDS_ROWS {
            return Order::Words;
        }
        let _ = num_rows;
        Order::Rows
    }

    #[cfg(target_arch = "x86_64")]
    fn uses_bf16_tiles(&self, dtype: DType) -> bool {
        self.kernel == IntegerKernel::Amx && dtype == DType::BF16
    }

    /// Whether so many rows of a plain format go by eights, where they do not go by tiles.
    #[cfg(target_arch = "x86_64")]
    fn uses_eights(&self, num_rows: usize) -> bool {
        matches!(self.level, Level::Avx512(_) | Level::Amx(..)) && num_rows >= EIGHTS_ROWS
    }

    /// Some panels of one product, for some rows, by the kernel of its format.
    fn panels(&self, part: Part<'_>, x: plain::Rows<'_>, inputs: &Inputs) {
        let (product, dtype) = (part.product, part.product.weight.dtype);
        match &product.weight.stored {
            Stored::Packed(weight) => {
                let rows = &inputs.quantized[weight.layout.form()];
                with_packing!(dtype, F => self.packed_panels::<F>(weight, part, rows));
            }
            #[cfg(target_arch = "x86_64")]
            Stored::Plain(weight) if self.uses_bf16_tiles(dtype) => {
                // SAFETY: the kernel was chosen for this machine; rows and weight have the same depth; tasks own disjoint parts, and the
                // output stays borrowed until the pool has run.
                unsafe { bf16::rows_times_panels(part, [weight], &inputs.rounded, |_, _| {}) };
            }
            #[cfg(target_arch = "x86_64")]
            Stored::Plain(weight) if self.uses_eights(x.num_rows()) => {
                // SAFETY: as above.
                unsafe { plain::rows_times_panels(part, [weight], &inputs.eights, |_, _| {}) };
            }
            Stored::Plain(weight) => {
                let first_row = part.blocks.start * activations::BLOCK;
                let x = x.part(first_row..part.blocks.end * activations::BLOCK);
                for panel in part.panels {
                    // SAFETY: tasks own disjoint parts, and the output stays borrowed until the pool has run.
                    let mut put = |row: usize, results: &_| unsafe { product.put(first_row + row, panel, results) };
                    plain::rows_times_panel(self.level, dtype, weight.panel(panel), x, &mut put);
                }
            }
            Stored::Rows(_) => unreachable!("it has no panels"),
        }
    }

    /// By tiles or, for few rows, by vectors: panels of one weight, or of two that `join` makes one of.
    ///
    /// # Safety
    /// The machine has what the kernel asks for; rows and weights have the same number of units of F. No other thread writes these panels, and the
    /// output is alive.
    #[cfg(target_arch = "x86_64")]
    unsafe fn wide_panels<F: Packing, const WEIGHTS: usize>(
        &self,
        part: Part<'_>,
        weights: [&PackedWeight; WEIGHTS],
        rows: &Quantized,
        join: impl Fn(&mut [f32], &[f32]),
    ) {
        // SAFETY: passed on from the caller.
        unsafe {
            if self.kernel == IntegerKernel::Amx && rows.num_rows() >= amx_rows(&F::LAYOUT) {
                amx::rows_times_panels::<F, WEIGHTS>(part, weights, rows, join);
            } else {
                avx512::rows_times_panels::<F, WEIGHTS>(part, weights, rows, join);
            }
        }
    }

    fn packed_panels<F: Packing>(&self, weight: &PackedWeight, part: Part<'_>, rows: &Quantized) {
        let num_units = weight.num_units;
        assert_eq!(num_units * weight.layout.slices, rows.num_slices(), "x and the weight are cut alike");
        // SAFETY: the kernel was chosen for this machine; rows and weight have as many units; tasks own disjoint panels, and the output
        // stays borrowed until the pool has run.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            if matches!(self.kernel, IntegerKernel::Vnni | IntegerKernel::Amx) {
                return self.wide_panels::<F, 1>(part, [weight], rows, |_, _| {});
            }
        }
        let Part { product, panels, blocks, .. } = part;
        for panel in panels {
            let bytes = weight.panel(panel);
            for block in blocks.clone() {
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
                        #[cfg(target_arch = "aarch64")]
                        IntegerKernel::Neon => {
                            neon::block_times_panel::<F>(bytes.as_ptr(), num_units, x, &mut put);
                        }
                        #[cfg(target_arch = "aarch64")]
                        IntegerKernel::NeonDotProducts => {
                            neon::block_times_panel_by_dot_products::<F>(bytes.as_ptr(), num_units, x, &mut put);
                        }
                        #[cfg(target_arch = "x86_64")]
                        IntegerKernel::Avx2 | IntegerKernel::AvxVnni => {
                            let work = avx2::Work { panel: bytes.as_ptr(), num_units, x };
                            // The panel that is likely to be read after this one; the first block asks for it.
                            let next =
                                if block == blocks.start { weight.num_panels().min(panel + 2) } else { panel + 1 };
                            let mut ahead = Ahead::new(weight.panels(panel + 1..next), rows.num_slices());
                            if self.kernel == IntegerKernel::AvxVnni {
                                avx2::block_times_panel_by_dots::<F>(work, &mut ahead, &mut put);
                            } else {
                                avx2::block_times_panel::<F>(work, &mut ahead, &mut put);
                            }
                        }
                        #[cfg(target_arch = "x86_64")]
                        IntegerKernel::Vnni | IntegerKernel::Amx => unreachable!("they return above"),
                    }
                }
            }
        }
    }
}

/// What threads read of the weights of products.
fn weights_of(products: &[Option<&Product<'_>>], grid: Grid) -> Soon {
    let mut soon = Soon { per_task: grid.panels_per_task, ..Soon::default() };
    if grid.splits_rows() {
        // Many rows have enough to do until more arrives.
        return soon;
    }
    for (panels, product) in soon.weights.iter_mut().zip(products.iter().flatten()) {
        let (bytes, panel_bytes) = product.weight.panels();
        *panels = Panels { address: bytes.as_ptr().addr(), panel_bytes, num_panels: product.weight.num_panels() };
    }
    soon
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
        let (start, num_columns) = (panel * COLUMNS, self.num_columns());
        let width = COLUMNS.min(num_columns - start);
        // SAFETY: passed on from the caller.
        let out = unsafe { self.out.part(row * num_columns + start, width) };
        match (<&mut [f32; COLUMNS]>::try_from(&mut *out), self.bias) {
            // A copy of known length is one instruction; others are a call.
            (Ok(out), None) => *out = *results,
            (_, bias) => {
                for (c, out) in out.iter_mut().enumerate() {
                    *out = results[c] + bias.map_or(0.0, |bias| bias[start + c]);
                }
            }
        }
    }
}
