//! Matrix products `out[n][m] = x[n][k] · w[m][k] + bias[m]`, with w in any format. `README.md` in this folder is the
//! guide; [`kernel_for`] says which kernel runs.
//!
//! Each format has one definition of its arithmetic, whatever the number of rows:
//!
//! - Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, Q3_K to Q6_K ([`quantized`]): x is
//!   rounded to 8-bit integers, row by row; integers are multiplied and added exactly, and the scales are applied in
//!   the order that [`quantized::scalar`] defines. Integer sums do not depend on the instruction that computes them,
//!   so every instruction set gives the same bits, for one row and for many.
//! - F32, F16, BF16 ([`unquantized`]): f32 multiply-adds in a fixed order. With AMX, BF16 is multiplied by bf16 tiles
//!   instead.
//! - All others, among them NVFP4, FP8, Q2_K, IQ3_XXS, IQ1 and IQ2 ([`decoded`]): rows of w are decoded to f32 first.
//!
//! Threads divide panels of sixteen columns and blocks of sixteen rows among them ([`task_grid`]), never parts of a
//! sum.

pub(crate) mod decoded;
mod input;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod prefetch;
mod product;
mod quantized;
#[cfg(target_arch = "x86_64")]
mod result_tiles;
mod task_grid;
mod unquantized;
mod weight;

use std::sync::Mutex;

use pellucid_tensor::Activation;

pub(crate) use input::InputRows;
use kernel::{InputForm, Instructions, Kernel, kernel_for};
#[cfg(target_arch = "x86_64")]
use prefetch::PacedPrefetch;
pub(crate) use product::Product;
use product::ProductPart;
use quantized::activations::QuantizedRows;
#[cfg(target_arch = "aarch64")]
use quantized::neon;
use quantized::panel_layout::{NUM_INPUT_FORMS, QuantizedFormat, with_kernel_format};
use quantized::scalar;
#[cfg(target_arch = "x86_64")]
use quantized::{amx, avx2, avx512};
use task_grid::TaskGrid;
#[cfg(target_arch = "x86_64")]
use unquantized::{UnquantizedWeight, amx_bf16, eight_rows};
pub(crate) use weight::{LinearWeight, packed_bytes};
use weight::{PackedWeight, Stored};

use crate::idle_prefetch::{MAX_WEIGHTS, NextWeights, ProductHistory, WeightPanels};
#[cfg(target_arch = "x86_64")]
use crate::ops::elementwise;
use crate::pool::Pool;
use crate::simd::{Level, with_simd};

/// Rows of a block: rows of x are multiplied in blocks of sixteen, the last one smaller.
pub(crate) const BLOCK_ROWS: usize = 16;
/// Columns of a panel: one for each 32-bit lane of a 512-bit register.
pub(crate) const PANEL_COLUMNS: usize = 16;

/// Maximum number of products with one input that are computed together.
pub(crate) const MAX_PRODUCTS: usize = MAX_WEIGHTS;

/// Computes products, and keeps the memory that they need from step to step.
#[derive(Debug)]
pub(crate) struct Multiplier {
    level: Level,
    instructions: Instructions,
    inputs: Mutex<PreparedInputs>,
}

/// The rows of x in each [`InputForm`] that the kernels of a call need.
#[derive(Debug, Default)]
struct PreparedInputs {
    /// One for each group of formats that read the same integers:
    /// [`PanelLayout::input_form`](quantized::panel_layout::PanelLayout).
    quantized: [QuantizedRows; NUM_INPUT_FORMS],
    #[cfg(target_arch = "x86_64")]
    bf16: amx_bf16::Bf16Rows,
    #[cfg(target_arch = "x86_64")]
    interleaved: unquantized::InterleavedRows,
    history: ProductHistory,
}

impl Multiplier {
    pub(crate) fn new(level: Level) -> Self {
        Multiplier { level, instructions: Instructions::of(level), inputs: Mutex::default() }
    }

    fn kernel(&self, product: &Product<'_>, num_rows: usize) -> Kernel {
        kernel_for(product.weight.dtype, num_rows, self.instructions)
    }

    /// Computes up to [`MAX_PRODUCTS`] products of the same rows.
    pub(crate) fn run<'a>(&self, pool: &Pool, x: InputRows<'_>, products: impl IntoIterator<Item = &'a Product<'a>>) {
        if x.num_rows() == 0 {
            return;
        }
        let (mut shared, mut products) = ([None; MAX_PRODUCTS], products.into_iter());
        for (slot, product) in shared.iter_mut().zip(&mut products) {
            *slot = Some((product, self.kernel(product, x.num_rows())));
        }
        assert!(products.next().is_none(), "at most {MAX_PRODUCTS} products at once");
        let mut inputs = self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let x = self.prepare(&mut inputs, pool, x, shared.iter().flatten().copied());
        let (num_rows, x) = (x.num_rows(), unquantized::FloatRows { x: x.all(), depth: x.depth() });
        for (product, _) in shared.iter().flatten() {
            if let Stored::FileRows(bytes) = &product.weight.stored {
                with_simd!(self.level, simd => decoded::matmul(simd, pool, x.x, product, bytes));
            }
        }
        let total: usize = shared.iter().flatten().map(|(product, _)| product.weight.num_panels()).sum();
        let grid = TaskGrid::new(num_rows, total, pool.num_threads());
        let next_weights =
            inputs.history.record(weights_of(shared.iter().flatten().map(|(product, _)| *product), grid));
        let inputs = &*inputs;
        pool.run_from_both_ends(grid.num_tasks(), Some(next_weights), &|task, direction| {
            let (panels, blocks) = grid.task(task);
            let mut start = 0;
            for &(product, kernel) in shared.iter().flatten() {
                let end = start + product.weight.num_panels();
                let here = panels.start.max(start)..panels.end.min(end);
                if !here.is_empty() {
                    let panels = here.start - start..here.end - start;
                    let part = ProductPart { product, panels, blocks: blocks.clone(), direction };
                    self.multiply_part(kernel, part, x, inputs);
                }
                start = end;
            }
        });
    }

    /// Computes a gated pair of products of the same rows as one: the first becomes `activation(first) * second`, the
    /// second is not written. A task computes the same panels of both and combines them while they are in its cache.
    /// Returns false, having done nothing, where two separate products are as fast ([`Kernel::fuses_gate`]).
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn run_gated(
        &self,
        pool: &Pool,
        x: InputRows<'_>,
        products: &[Product<'_>; 2],
        activation: Activation,
    ) -> bool {
        let [gate, up] = products;
        assert_eq!(gate.num_columns(), up.num_columns(), "a gate for every value");
        let (num_rows, total) = (x.num_rows(), gate.weight.num_panels());
        let kernel = self.kernel(gate, num_rows);
        let no_bias = products.iter().all(|product| product.bias.is_none());
        if !kernel.fuses_gate(num_rows) || gate.weight.dtype != up.weight.dtype || !no_bias {
            return false;
        }
        let mut inputs = self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.prepare(&mut inputs, pool, x, products.iter().map(|product| (product, kernel)));
        let grid = TaskGrid::of_two(num_rows, total, pool.num_threads());
        let next_weights = inputs.history.record(weights_of([gate].into_iter(), grid));
        let inputs = &*inputs;
        let join = |gate: &mut [f32], up: &[f32]| {
            with_simd!(self.level, simd => elementwise::gate(simd, activation, up, gate));
        };
        pool.run_from_both_ends(grid.num_tasks(), Some(next_weights), &|task, direction| {
            let (panels, blocks) = grid.task(task);
            let part = ProductPart { product: gate, panels, blocks, direction };
            // SAFETY: `kernel_for` chose the kernel for this machine; `prepare` checked that rows and weights have the
            // same depth; tasks own disjoint parts of the output.
            unsafe {
                match (&gate.weight.stored, &up.weight.stored) {
                    (Stored::Packed(first), Stored::Packed(second)) => {
                        let rows = &inputs.quantized[first.layout.input_form()];
                        with_kernel_format!(gate.weight.dtype, F => {
                            wide_panels::<F, 2>(kernel, part, [first, second], rows, join);
                        });
                    }
                    (Stored::Unquantized(first), Stored::Unquantized(second)) => {
                        float_panels(kernel, part, [first, second], inputs, join);
                    }
                    _ => unreachable!("weights of one format are stored alike"),
                }
            }
        });
        true
    }

    /// Returns false: only x86 kernels compute gated pairs as one.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run_gated(&self, _: &Pool, _: InputRows<'_>, _: &[Product<'_>; 2], _: Activation) -> bool {
        false
    }

    /// Brings x into every form that the kernels of the products read, and returns it computed.
    fn prepare<'a, 'x>(
        &self,
        inputs: &mut PreparedInputs,
        pool: &Pool,
        mut x: InputRows<'x>,
        products: impl Iterator<Item = (&'a Product<'a>, Kernel)>,
    ) -> InputRows<'x> {
        // The first ones are those of `PreparedInputs::quantized`.
        #[cfg(target_arch = "x86_64")]
        const BF16: usize = NUM_INPUT_FORMS;
        #[cfg(target_arch = "x86_64")]
        const INTERLEAVED: usize = NUM_INPUT_FORMS + 1;
        let mut is_ready = [false; NUM_INPUT_FORMS + 2];
        for (product, kernel) in products {
            assert_eq!(product.weight.depth, x.depth(), "x is as wide as the weight");
            match (kernel.input_form(), &product.weight.stored) {
                (InputForm::Quantized(order), Stored::Packed(weight)) => {
                    let form = weight.layout.input_form();
                    if !std::mem::replace(&mut is_ready[form], true) {
                        let rows = &mut inputs.quantized[form];
                        x = with_simd!(self.level, simd => rows.fill(simd, pool, x, &weight.layout, order));
                    }
                }
                #[cfg(target_arch = "x86_64")]
                (InputForm::Bf16, _) if !is_ready[BF16] => {
                    is_ready[BF16] = true;
                    x = with_simd!(self.level, simd => inputs.bf16.fill(simd, pool, x));
                }
                #[cfg(target_arch = "x86_64")]
                (InputForm::Interleaved, _) if !is_ready[INTERLEAVED] => {
                    is_ready[INTERLEAVED] = true;
                    x = with_simd!(self.level, simd => inputs.interleaved.fill(simd, pool, x));
                }
                _ => {}
            }
        }
        x.ready(pool)
    }

    /// Computes a part of a product with its kernel.
    fn multiply_part(
        &self,
        kernel: Kernel,
        part: ProductPart<'_>,
        x: unquantized::FloatRows<'_>,
        inputs: &PreparedInputs,
    ) {
        let (product, dtype) = (part.product, part.product.weight.dtype);
        match (kernel, &product.weight.stored) {
            (_, Stored::Packed(weight)) => {
                let rows = &inputs.quantized[weight.layout.input_form()];
                with_kernel_format!(dtype, F => packed_panels::<F>(kernel, weight, part, rows));
            }
            (Kernel::FloatFourRows, Stored::Unquantized(weight)) => {
                let first_row = part.blocks.start * BLOCK_ROWS;
                let x = x.part(first_row..part.blocks.end * BLOCK_ROWS);
                for panel in part.panels {
                    // SAFETY: tasks own disjoint parts of the output.
                    let mut put = |row: usize, results: &_| unsafe { product.put(first_row + row, panel, results) };
                    unquantized::rows_times_panel(self.level, dtype, weight.panel(panel), x, &mut put);
                }
            }
            #[cfg(target_arch = "x86_64")]
            (_, Stored::Unquantized(weight)) => {
                // SAFETY: `kernel_for` chose the kernel for this machine; `prepare` checked that rows and weight have
                // the same depth; tasks own disjoint parts of the output.
                unsafe { float_panels(kernel, part, [weight], inputs, |_, _| {}) };
            }
            _ => unreachable!("{kernel:?} does not multiply panels of {dtype} on this machine"),
        }
    }
}

/// Multiplies some panels of one weight, or of two that `join` combines, with a kernel for AVX-512 VNNI or AMX.
///
/// # Safety
/// The machine has the instructions of the kernel; `rows` are in its input form, and have the same number of units of F
/// as the weights. No other thread writes these panels of the output.
#[cfg(target_arch = "x86_64")]
unsafe fn wide_panels<F: QuantizedFormat, const WEIGHTS: usize>(
    kernel: Kernel,
    part: ProductPart<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &QuantizedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    for weight in weights {
        let num_slices = weight.num_units * F::LAYOUT.slices;
        assert_eq!((weight.layout, num_slices), (F::LAYOUT, rows.num_slices()), "rows and weights have the same units");
    }
    // SAFETY: passed on from the caller.
    unsafe {
        match kernel {
            Kernel::Avx512ByRow | Kernel::Avx512ByWord => {
                avx512::one_block_times_panels::<F, WEIGHTS>(part, weights, rows, join);
            }
            Kernel::Avx512ManyBlocks => avx512::many_blocks_times_panels::<F, WEIGHTS>(part, weights, rows, join),
            Kernel::AmxOneBlock => amx::one_block_times_panels::<F, WEIGHTS>(part, weights, rows, join),
            Kernel::AmxManyBlocks => amx::many_blocks_times_panels::<F, WEIGHTS>(part, weights, rows, join),
            _ => unreachable!("{kernel:?} is no kernel for AVX-512 VNNI or AMX"),
        }
    }
}

/// Multiplies some panels of one unquantized weight, or of two that `join` combines, with a kernel that needs x in a
/// form of its own.
///
/// # Safety
/// The machine has the instructions of the kernel; `inputs` holds x in its form, as deep as the weights. No other
/// thread writes these panels of the output.
#[cfg(target_arch = "x86_64")]
unsafe fn float_panels<const WEIGHTS: usize>(
    kernel: Kernel,
    part: ProductPart<'_>,
    weights: [&UnquantizedWeight; WEIGHTS],
    inputs: &PreparedInputs,
    join: impl Fn(&mut [f32], &[f32]),
) {
    let PreparedInputs { bf16, interleaved, .. } = inputs;
    // SAFETY: passed on from the caller.
    unsafe {
        match kernel {
            Kernel::FloatEightRows => eight_rows::one_block_times_panels(part, weights, interleaved, join),
            Kernel::FloatEightRowsManyBlocks => eight_rows::many_blocks_times_panels(part, weights, interleaved, join),
            Kernel::Bf16AmxOneBlock => amx_bf16::one_block_times_panels(part, weights, bf16, join),
            Kernel::Bf16AmxManyBlocks => amx_bf16::many_blocks_times_panels(part, weights, bf16, join),
            _ => unreachable!("{kernel:?} does not read x in a form of its own"),
        }
    }
}

/// Multiplies some panels of a quantized weight.
fn packed_panels<F: QuantizedFormat>(
    kernel: Kernel,
    weight: &PackedWeight,
    part: ProductPart<'_>,
    rows: &QuantizedRows,
) {
    let num_units = weight.num_units;
    assert_eq!(num_units * weight.layout.slices, rows.num_slices(), "x and the weight have the same number of slices");
    #[cfg(target_arch = "x86_64")]
    if matches!(
        kernel,
        Kernel::Avx512ByRow
            | Kernel::Avx512ByWord
            | Kernel::Avx512ManyBlocks
            | Kernel::AmxOneBlock
            | Kernel::AmxManyBlocks
    ) {
        // SAFETY: `kernel_for` chose the kernel for this machine; rows and weight have the same number of units by the
        // assertion; tasks own disjoint parts of the output.
        return unsafe { wide_panels::<F, 1>(kernel, part, [weight], rows, |_, _| {}) };
    }
    let ProductPart { product, panels, blocks, .. } = part;
    for panel in panels {
        let bytes = weight.panel(panel);
        for block in blocks.clone() {
            let x = rows.block(block);
            let mut put = |row: usize, results: &[f32; PANEL_COLUMNS]| {
                // SAFETY: tasks own disjoint parts of the output.
                unsafe { product.put(block * BLOCK_ROWS + row, panel, results) };
            };
            // SAFETY: panel and block have `num_units` units of F; `kernel_for` chose the kernel for this machine.
            unsafe {
                match kernel {
                    Kernel::QuantizedScalar => {
                        (0..x.num_rows)
                            .for_each(|row| put(row, &scalar::row_times_panel::<F>(bytes, num_units, x, row)));
                    }
                    #[cfg(target_arch = "aarch64")]
                    Kernel::QuantizedNeon => {
                        neon::block_times_panel::<F>(bytes.as_ptr(), num_units, x, &mut put);
                    }
                    #[cfg(target_arch = "aarch64")]
                    Kernel::QuantizedNeonDotProduct => {
                        neon::block_times_panel_by_dot_products::<F>(bytes.as_ptr(), num_units, x, &mut put);
                    }
                    #[cfg(target_arch = "x86_64")]
                    Kernel::QuantizedAvx2 | Kernel::QuantizedAvxVnni => {
                        let work = avx2::PanelWork { panel: bytes.as_ptr(), num_units, x };
                        // The first block prefetches the panel that is probably read after this one.
                        let next = if block == blocks.start { weight.num_panels().min(panel + 2) } else { panel + 1 };
                        let mut ahead = PacedPrefetch::new(weight.panels(panel + 1..next), rows.num_slices());
                        if kernel == Kernel::QuantizedAvxVnni {
                            avx2::block_times_panel_by_vnni::<F>(work, &mut ahead, &mut put);
                        } else {
                            avx2::block_times_panel::<F>(work, &mut ahead, &mut put);
                        }
                    }
                    _ => unreachable!("{kernel:?} does not multiply quantized weights on this machine"),
                }
            }
        }
    }
}

/// The weights of products, as threads will read them.
fn weights_of<'a>(products: impl Iterator<Item = &'a Product<'a>>, grid: TaskGrid) -> NextWeights {
    let mut weights = NextWeights { per_task: grid.panels_per_task, ..NextWeights::default() };
    if grid.splits_rows() {
        // With many rows, arithmetic takes longer than reading weights.
        return weights;
    }
    for (panels, product) in weights.weights.iter_mut().zip(products) {
        let (bytes, panel_bytes) = product.weight.panels();
        *panels = WeightPanels { address: bytes.as_ptr().addr(), panel_bytes, num_panels: product.weight.num_panels() };
    }
    weights
}
