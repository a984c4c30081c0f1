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

pub(crate) mod decoded;
mod input;
#[cfg(target_arch = "x86_64")]
mod prefetch;
mod quantized;
#[cfg(target_arch = "x86_64")]
mod result_tiles;
mod task_grid;
mod unquantized;
mod weight;

use std::ops::Range;
use std::sync::Mutex;

pub(crate) use input::InputRows;
#[cfg(target_arch = "x86_64")]
use prefetch::PacedPrefetch;
use quantized::activations::{InputOrder, QuantizedRows};
#[cfg(target_arch = "aarch64")]
use quantized::neon;
use quantized::panel_layout::{NUM_INPUT_FORMS, QuantizedFormat, with_quantized_format};
#[cfg(target_arch = "x86_64")]
use quantized::panel_layout::{PanelLayout, Scales};
use quantized::scalar;
#[cfg(target_arch = "x86_64")]
use quantized::{amx, avx2, avx512};
use task_grid::TaskGrid;
#[cfg(target_arch = "x86_64")]
use unquantized::amx_bf16;
pub(crate) use weight::LinearWeight;
use weight::{PackedWeight, Stored};

use pellucid_tensor::Activation;
#[cfg(target_arch = "x86_64")]
use pellucid_tensor::DType;

use crate::idle_prefetch::{self, MAX_WEIGHTS, NextWeights, WeightPanels};
use crate::memory::SharedOutput;
#[cfg(target_arch = "x86_64")]
use crate::ops::elementwise;
use crate::pool::{Direction, Pool};
use crate::simd::{Level, with_simd};

/// Rows of a block: rows of x are multiplied in blocks of sixteen, the last one smaller.
pub(crate) const BLOCK_ROWS: usize = 16;
/// Columns of a panel: one for each 32-bit lane of a 512-bit register.
pub(crate) const PANEL_COLUMNS: usize = 16;

/// Products with one input that are computed together, at most.
pub(crate) const MAX_PRODUCTS: usize = MAX_WEIGHTS;

/// From this many rows on, tiles are faster than vectors, which take eight or up to four rows at a time: later where unpacking costs most.
#[cfg(target_arch = "x86_64")]
const fn amx_rows(layout: &PanelLayout) -> usize {
    match layout.scales {
        Scales::Float | Scales::PerSlice => 5,
        Scales::PerHalfSlice => 9,
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
struct ProductPart<'a> {
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
    inputs: Mutex<PreparedInputs>,
}

/// The rows of x in every form that a weight asked for.
#[derive(Debug, Default)]
struct PreparedInputs {
    /// For the integer kernels, in each of their forms.
    quantized: [QuantizedRows; NUM_INPUT_FORMS],
    #[cfg(target_arch = "x86_64")]
    rounded: amx_bf16::Bf16Rows,
    #[cfg(target_arch = "x86_64")]
    eights: unquantized::InterleavedRows,
    /// Of products.
    order: idle_prefetch::ProductHistory,
}

impl Multiplier {
    pub(crate) fn new(level: Level) -> Self {
        Multiplier { level, kernel: IntegerKernel::of(level), inputs: Mutex::default() }
    }

    /// Computes products, at most [`MAX_PRODUCTS`], of the same rows x, each `depth` long.
    pub(crate) fn run<'a>(&self, pool: &Pool, x: InputRows<'_>, products: impl IntoIterator<Item = &'a Product<'a>>) {
        if x.num_rows() == 0 {
            return;
        }
        let (mut shared, mut products) = ([None; MAX_PRODUCTS], products.into_iter());
        shared.iter_mut().zip(&mut products).for_each(|(slot, product)| *slot = Some(product));
        assert!(products.next().is_none(), "at most {MAX_PRODUCTS} products at once");
        let mut inputs = self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let x = self.prepare(&mut inputs, pool, x, shared.iter().flatten().copied());
        let (num_rows, x) = (x.num_rows(), unquantized::FloatRows { x: x.all(), depth: x.depth() });
        for product in shared.iter().flatten() {
            if let Stored::FileRows(bytes) = &product.weight.stored {
                with_simd!(self.level, simd => decoded::matmul(simd, pool, x.x, product, bytes));
            }
        }
        let total: usize = shared.iter().flatten().map(|product| product.weight.num_panels()).sum();
        let grid = TaskGrid::new(num_rows, total, pool.num_threads());
        let next_weights = inputs.order.after(weights_of(&shared, grid));
        let inputs = &*inputs;
        pool.run_from_both_ends(grid.num_tasks(), Some(next_weights), &|task, direction| {
            let (panels, blocks) = grid.task(task);
            let mut start = 0;
            for product in shared.iter().flatten() {
                let end = start + product.weight.num_panels();
                let here = panels.start.max(start)..panels.end.min(end);
                if !here.is_empty() {
                    let panels = here.start - start..here.end - start;
                    self.panels(ProductPart { product, panels, blocks: blocks.clone(), direction }, x, inputs);
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
        x: InputRows<'_>,
        products: &[Product<'_>; 2],
        activation: Activation,
    ) -> bool {
        let [gate, up] = products;
        assert_eq!(gate.num_columns(), up.num_columns(), "a gate for every number");
        let (num_rows, total) = (x.num_rows(), gate.weight.num_panels());
        let joins = match &gate.weight.stored {
            Stored::Packed(weight) => match self.kernel {
                IntegerKernel::Amx => num_rows >= amx_rows(&weight.layout),
                IntegerKernel::Vnni => num_rows > BLOCK_ROWS,
                _ => false,
            },
            Stored::Unquantized(_) if self.uses_bf16_tiles(gate.weight.dtype) => num_rows >= BF16_JOINED_ROWS,
            Stored::Unquantized(_) => num_rows > BLOCK_ROWS && self.uses_eights(num_rows),
            Stored::FileRows(_) => false,
        };
        let no_bias = products.iter().all(|product| product.bias.is_none());
        if !joins || gate.weight.dtype != up.weight.dtype || !no_bias {
            return false;
        }
        let mut inputs = self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.prepare(&mut inputs, pool, x, products.iter());
        let grid = TaskGrid::of_two(num_rows, total, pool.num_threads());
        let next_weights = inputs.order.after(weights_of(&[Some(gate)], grid));
        let inputs = &*inputs;
        let join = |gate: &mut [f32], up: &[f32]| {
            with_simd!(self.level, simd => elementwise::gate(simd, activation, up, gate));
        };
        pool.run_from_both_ends(grid.num_tasks(), Some(next_weights), &|task, direction| {
            let (panels, blocks) = grid.task(task);
            let part = ProductPart { product: gate, panels, blocks, direction };
            // SAFETY: the kernel was chosen for this machine; rows and weights have the same depth; tasks own disjoint panels, and the output
            // stays borrowed until the pool has run.
            unsafe {
                match (&gate.weight.stored, &up.weight.stored) {
                    (Stored::Packed(first), Stored::Packed(second)) => {
                        let rows = &inputs.quantized[first.layout.form()];
                        with_quantized_format!(gate.weight.dtype, F => {
                            self.wide_panels::<F, 2>(part, [first, second], rows, join);
                        });
                    }
                    (Stored::Unquantized(first), Stored::Unquantized(second))
                        if self.uses_bf16_tiles(gate.weight.dtype) =>
                    {
                        amx_bf16::rows_times_panels(part, [first, second], &inputs.rounded, join);
                    }
                    (Stored::Unquantized(first), Stored::Unquantized(second)) => {
                        unquantized::rows_times_panels(part, [first, second], &inputs.eights, join);
                    }
                    _ => unreachable!("weights of one format are stored alike"),
                }
            }
        });
        true
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run_gated(&self, _: &Pool, _: InputRows<'_>, _: &[Product<'_>; 2], _: Activation) -> bool {
        false
    }

    /// Brings x into every form that the products' weights ask for. It is ready then.
    fn prepare<'a, 'x>(
        &self,
        inputs: &mut PreparedInputs,
        pool: &Pool,
        mut x: InputRows<'x>,
        products: impl Iterator<Item = &'a Product<'a>>,
    ) -> InputRows<'x> {
        let mut ready = [false; NUM_INPUT_FORMS + 2];
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
                Stored::Unquantized(_) if self.uses_bf16_tiles(product.weight.dtype) => {
                    if !std::mem::replace(&mut ready[NUM_INPUT_FORMS], true) {
                        with_simd!(self.level, simd => inputs.rounded.fill(simd, pool, x));
                        x = x.taken();
                    }
                }
                #[cfg(target_arch = "x86_64")]
                Stored::Unquantized(_) if self.uses_eights(x.num_rows()) => {
                    if !std::mem::replace(&mut ready[NUM_INPUT_FORMS + 1], true) {
                        with_simd!(self.level, simd => inputs.eights.fill(simd, pool, x));
                        x = x.taken();
                    }
                }
                Stored::Unquantized(_) | Stored::FileRows(_) => {}
            }
        }
        x.ready(pool)
    }

    /// How so many rows of x are to lie for the integer kernel.
    fn order(&self, num_rows: usize) -> InputOrder {
        #[cfg(target_arch = "x86_64")]
        if self.kernel == IntegerKernel::Vnni && num_rows >= WORDS_ROWS {
            return InputOrder::ByWord;
        }
        let _ = num_rows;
        InputOrder::ByRow
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
    fn panels(&self, part: ProductPart<'_>, x: unquantized::FloatRows<'_>, inputs: &PreparedInputs) {
        let (product, dtype) = (part.product, part.product.weight.dtype);
        match &product.weight.stored {
            Stored::Packed(weight) => {
                let rows = &inputs.quantized[weight.layout.form()];
                with_quantized_format!(dtype, F => self.packed_panels::<F>(weight, part, rows));
            }
            #[cfg(target_arch = "x86_64")]
            Stored::Unquantized(weight) if self.uses_bf16_tiles(dtype) => {
                // SAFETY: the kernel was chosen for this machine; rows and weight have the same depth; tasks own disjoint parts, and the
                // output stays borrowed until the pool has run.
                unsafe { amx_bf16::rows_times_panels(part, [weight], &inputs.rounded, |_, _| {}) };
            }
            #[cfg(target_arch = "x86_64")]
            Stored::Unquantized(weight) if self.uses_eights(x.num_rows()) => {
                // SAFETY: as above.
                unsafe { unquantized::rows_times_panels(part, [weight], &inputs.eights, |_, _| {}) };
            }
            Stored::Unquantized(weight) => {
                let first_row = part.blocks.start * BLOCK_ROWS;
                let x = x.part(first_row..part.blocks.end * BLOCK_ROWS);
                for panel in part.panels {
                    // SAFETY: tasks own disjoint parts, and the output stays borrowed until the pool has run.
                    let mut put = |row: usize, results: &_| unsafe { product.put(first_row + row, panel, results) };
                    unquantized::rows_times_panel(self.level, dtype, weight.panel(panel), x, &mut put);
                }
            }
            Stored::FileRows(_) => unreachable!("it has no panels"),
        }
    }

    /// By tiles or, for few rows, by vectors: panels of one weight, or of two that `join` makes one of.
    ///
    /// # Safety
    /// The machine has what the kernel asks for; rows and weights have the same number of units of F. No other thread writes these panels, and the
    /// output is alive.
    #[cfg(target_arch = "x86_64")]
    unsafe fn wide_panels<F: QuantizedFormat, const WEIGHTS: usize>(
        &self,
        part: ProductPart<'_>,
        weights: [&PackedWeight; WEIGHTS],
        rows: &QuantizedRows,
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

    fn packed_panels<F: QuantizedFormat>(&self, weight: &PackedWeight, part: ProductPart<'_>, rows: &QuantizedRows) {
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
        let ProductPart { product, panels, blocks, .. } = part;
        for panel in panels {
            let bytes = weight.panel(panel);
            for block in blocks.clone() {
                let x = rows.block(block);
                let mut put = |row: usize, results: &[f32; PANEL_COLUMNS]| {
                    // SAFETY: tasks own disjoint panels, and the output stays borrowed until the pool has run.
                    unsafe { product.put(block * BLOCK_ROWS + row, panel, results) };
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
                            let work = avx2::PanelWork { panel: bytes.as_ptr(), num_units, x };
                            // The panel that is likely to be read after this one; the first block asks for it.
                            let next =
                                if block == blocks.start { weight.num_panels().min(panel + 2) } else { panel + 1 };
                            let mut ahead = PacedPrefetch::new(weight.panels(panel + 1..next), rows.num_slices());
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
fn weights_of(products: &[Option<&Product<'_>>], grid: TaskGrid) -> NextWeights {
    let mut next_weights = NextWeights { per_task: grid.panels_per_task, ..NextWeights::default() };
    if grid.splits_rows() {
        // Many rows have enough to do until more arrives.
        return next_weights;
    }
    for (panels, product) in next_weights.weights.iter_mut().zip(products.iter().flatten()) {
        let (bytes, panel_bytes) = product.weight.panels();
        *panels = WeightPanels { address: bytes.as_ptr().addr(), panel_bytes, num_panels: product.weight.num_panels() };
    }
    next_weights
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
    unsafe fn put(&self, row: usize, panel: usize, results: &[f32; PANEL_COLUMNS]) {
        let (start, num_columns) = (panel * PANEL_COLUMNS, self.num_columns());
        let width = PANEL_COLUMNS.min(num_columns - start);
        // SAFETY: passed on from the caller.
        let out = unsafe { self.out.part(row * num_columns + start, width) };
        match (<&mut [f32; PANEL_COLUMNS]>::try_from(&mut *out), self.bias) {
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
