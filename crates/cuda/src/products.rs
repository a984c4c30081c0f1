//! Matrix products with fused prologue and epilogue: the norm before a product, the gate or the residual addition after
//! it.
//!
//! In a step of few rows, launches take as much time as reading the weights. So one launch computes the norm, the
//! product, and the gate or the addition to the residual stream. With many rows only two fusions remain: a BF16
//! product of gate and up gates its result, and a product with split K (columns cut into slices) leaves the sums of its
//! slices to the norm that reads them.
//!
//! The bits are those of the separate kernels. Outside of a step every operation launches its separate kernel.

use pellucid_tensor::{
    Activation, DType, Error, GatedMlpCall, Input, Linear, Output, Pending, Residual, RmsNorm, Tensor,
};

use crate::cublas::{self, Addresses, ProductShape};
use crate::driver::Buffer;
use crate::gpu::{Gpu, Purpose};
use crate::kernels::matmul::linear::{self, LinearProduct, MAX_PARTS, Maxima, SliceSums};
use crate::kernels::matmul::{few_rows_ring, many_rows_wgmma};
use crate::kernels::rows::cublas_input::{self, FastRows};
use crate::kernels::rows::elementwise::{self, Elementwise, GateRows};
use crate::kernels::rows::norm::{self, Norm};
use crate::kernels::{GROUP_COLS, Operand};
use crate::memory::{floats, floats_mut, memory, read};

/// Maximum rows of a fused launch, and maximum values of more than two rows of the residual stream: every block of the
/// product computes the operand of all rows, which beyond this takes longer than the launches that it saves.
const MAX_FUSED_ROWS: usize = 8;
const MAX_FUSED_VALUES: usize = 16 << 10;

/// Device memory for the largest magnitudes of gated rows: the product of gate and up finds them, and the product that
/// reads the gated rows uses them to scale its operand.
#[derive(Debug, Default)]
pub(crate) struct RowMaxima {
    buffer: Option<Buffer>,
    /// Whether the maxima are zeros. A product of gate and up needs zeros to find new maxima.
    pub(crate) are_clear: bool,
}

/// The last product of an operation. It is launched late if the operation after it may become its epilogue.
enum LastProduct {
    Complete,
    /// A product of few rows, not launched yet.
    Fused(LinearProduct, DType),
    /// Gate and up of many rows, not launched yet.
    GatePair(LinearProduct, DType),
    /// A launched product with split K. The sums of its slices are still to be added.
    Slices(LinearProduct),
}

/// A linear map and its output.
type Map<'a, 'b> = (&'a Linear, &'b mut Tensor);

impl Gpu {
    /// Whether operations are fused into one launch where the residual stream has `num_rows` rows of `width` values.
    pub(crate) fn fuses(&self, num_rows: usize, width: usize) -> bool {
        let is_small = num_rows <= 2 || num_rows <= MAX_FUSED_ROWS && num_rows * width <= MAX_FUSED_VALUES;
        num_rows > 0 && is_small && self.current.is_step()
    }

    pub(crate) fn linears(&mut self, x: Input<'_>, maps: &mut [Map<'_, '_>]) -> Result<(), Error> {
        let (x, norm) = self.prepare(x)?;
        let last = self.products(x, norm, maps, false)?;
        self.complete(last)
    }

    pub(crate) fn linear_to(&mut self, x: &Tensor, linear: &Linear, out: Output<'_>) -> Result<(), Error> {
        self.linear_of(x, false, linear, out)
    }

    /// Computes `out = W x + b`. `maxima_are_known` says that `row_maxima` holds the largest magnitudes of the rows of
    /// x.
    fn linear_of(&mut self, x: &Tensor, maxima_are_known: bool, linear: &Linear, out: Output<'_>) -> Result<(), Error> {
        let (out, residual) = match out {
            Output::Rows(out) => (out, None),
            Output::Residual(Residual { hidden, update, pending }) => {
                assert_eq!((hidden.rows(), hidden.cols()), (update.rows(), update.cols()));
                (update, Some((hidden, pending)))
            }
        };
        let last = self.products(x, None, &mut [(linear, out)], false)?;
        let residual = match (last, residual) {
            (LastProduct::Fused(mut product, dtype), Some((hidden, pending))) => {
                product.add_to(floats_mut(hidden));
                self.launch_fused(product, dtype, maxima_are_known)?;
                *pending = Pending::Nothing;
                return Ok(());
            }
            (LastProduct::Fused(product, dtype), None) => {
                return self.launch_fused(product, dtype, maxima_are_known).map(|_| ());
            }
            (LastProduct::Slices(product), Some((_, pending))) if self.current.is_step() => {
                *pending = Pending::PartialSums(Box::new(product));
                return Ok(());
            }
            (last, residual) => {
                self.complete(last)?;
                residual
            }
        };
        if let Some((_, pending)) = residual {
            *pending = Pending::Update;
        }
        Ok(())
    }

    /// Adds the pending update to the residual stream.
    pub(crate) fn join(&mut self, residual: &mut Residual) -> Result<(), Error> {
        let Residual { hidden, update, pending } = residual;
        match std::mem::take(pending) {
            Pending::Nothing => return Ok(()),
            Pending::Update => {}
            Pending::PartialSums(sums) => product_of(&*sums).combine(&self.device)?,
        }
        self.add(update, hidden)
    }

    pub(crate) fn add(&mut self, y: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()));
        let parameter = Elementwise { x: floats_mut(x), y: floats(y), len: x.len() as u64, cap: 0.0, activation: 0 };
        elementwise::launch(&self.device, "add", parameter)
    }

    pub(crate) fn gated_mlp(&mut self, call: GatedMlpCall<'_>, residual: &mut Residual) -> Result<(), Error> {
        let GatedMlpCall { mlp, activation, norm, normed, gate, up, adds_to_stream } = call;
        let input = match norm {
            Some(RmsNorm { weight, eps }) => Input::Joined { residual: &mut *residual, weight, eps, normed },
            None => Input::Rows(normed),
        };
        let maxima_are_known = self.gated(input, [(&mlp.gate, &mut *gate), (&mlp.up, up)], activation)?;
        let out = if adds_to_stream { Output::Residual(residual) } else { Output::Rows(&mut residual.update) };
        self.linear_of(gate, maxima_are_known, &mlp.down, out)
    }

    /// `gate = activation(gate x) * (up x)`. Returns whether the largest magnitudes of the gated rows are in
    /// `row_maxima`.
    pub(crate) fn gated(
        &mut self,
        x: Input<'_>,
        [(gate, gate_out), (up, up_out)]: [Map<'_, '_>; 2],
        activation: Activation,
    ) -> Result<bool, Error> {
        let (x, norm) = self.prepare(x)?;
        assert_eq!((gate_out.rows(), gate_out.cols()), (up_out.rows(), up_out.cols()));
        let last = self.products(x, norm, &mut [(gate, &mut *gate_out), (up, &mut *up_out)], true)?;
        let code = elementwise::activation_code(activation);
        match last {
            LastProduct::Fused(mut product, dtype) if product.is_pair() && activation != Activation::SquaredRelu => {
                product.gate_by(code);
                self.launch_fused(product, dtype, false)
            }
            LastProduct::GatePair(mut product, dtype) => {
                let is_epilogue = activation != Activation::SquaredRelu;
                let operand = operand_of_gate(gate_out).filter(|operand| operand.is_bf16 != 0 && is_epilogue);
                if let Some(operand) = operand {
                    product.round_to(operand);
                    product.gate_by(code);
                }
                self.complete(LastProduct::GatePair(product, dtype))?;
                if operand.is_none() {
                    self.gate(code, up_out, gate_out)?;
                }
                Ok(false)
            }
            last => {
                self.complete(last)?;
                self.gate(code, up_out, gate_out)?;
                Ok(false)
            }
        }
    }

    /// `gate = activation(gate) * up`, and the operand of `gate` if a product is known to read it.
    pub(crate) fn gate(&mut self, activation: u32, up: &Tensor, gate: &mut Tensor) -> Result<(), Error> {
        assert_eq!((gate.rows(), gate.cols()), (up.rows(), up.cols()));
        let (x, y) = (floats_mut(gate), floats(up));
        match operand_of_gate(gate) {
            Some(operand) => {
                let parameter = GateRows { x, y, cols: gate.cols() as u32, activation, operand };
                elementwise::gate(&self.device, gate.rows(), &parameter)
            }
            None => {
                let parameter = Elementwise { x, y, len: gate.len() as u64, cap: 0.0, activation };
                elementwise::launch(&self.device, "gate", parameter)
            }
        }
    }

    /// Computes the rows of an input.
    pub(crate) fn input<'a>(&mut self, input: Input<'a>) -> Result<&'a Tensor, Error> {
        let (x, norm) = self.prepare(input)?;
        self.launch_norm(norm, x)?;
        Ok(x)
    }

    /// Returns the rows of an input. If a norm comes back too, the rows are not computed yet: the norm has to be fused
    /// into the product that reads them, or launched before it.
    fn prepare<'a>(&mut self, input: Input<'a>) -> Result<(&'a Tensor, Option<Norm>), Error> {
        match input {
            Input::Rows(x) => Ok((x, None)),
            Input::Normed { x, weight, eps, normed } => {
                let norm = self.norm_for_product(x, norm_of(weight, None, eps), normed)?;
                Ok((normed, norm))
            }
            Input::Joined { residual: Residual { hidden, update, pending }, weight, eps, normed } => {
                assert_eq!((hidden.rows(), hidden.cols()), (update.rows(), update.cols()));
                assert_eq!((hidden.rows(), hidden.cols()), (normed.rows(), normed.cols()));
                let norm = norm_of(weight, None, eps);
                let norm = match std::mem::take(pending) {
                    Pending::Nothing => {
                        let norm = self.norm_for_product(hidden, norm, normed)?;
                        return Ok((normed, norm));
                    }
                    Pending::Update => Norm { y: floats(update), ..norm },
                    Pending::PartialSums(sums) => Norm { slices: slice_sums(product_of(&*sums)), ..norm },
                };
                self.norm("rms_norm", floats_mut(hidden), norm, normed)?;
                Ok((normed, None))
            }
        }
    }

    /// Launches an RMSNorm of x, or returns it where a product of few rows can compute it.
    fn norm_for_product(&mut self, x: &Tensor, norm: Norm, out: &mut Tensor) -> Result<Option<Norm>, Error> {
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        let is_whole = norm.width as usize == out.cols();
        if is_whole && self.fuses(out.rows(), out.cols()) && linear::takes_norm(norm.width) {
            return Ok(Some(Norm { x: floats(x), out: floats_mut(out), ..norm }));
        }
        self.norm("rms_norm", floats(x), norm, out)?;
        Ok(None)
    }

    /// Computes the RMSNorm of each group of `weight.len()` values: of a row, or of a head.
    pub(crate) fn rms_norm(&mut self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        let left = self.norm_for_product(x, norm_of(weight, None, eps), out)?;
        self.launch_norm(left, out)
    }

    /// Launches a norm of whole rows, if there is one, which writes `out`, and the operand of `out` too if a product is
    /// known to read it.
    fn launch_norm(&self, norm: Option<Norm>, out: &Tensor) -> Result<(), Error> {
        norm.map_or(Ok(()), |norm| norm::norm(&self.device, "rms_norm", out.rows(), &with_operand_of(out, norm)))
    }

    /// Launches `norm`, whose addresses of input and output are not set yet. Writes the operand of `out` too if a
    /// product is known to read it.
    pub(crate) fn norm(&self, kernel: &'static str, x: u64, norm: Norm, out: &mut Tensor) -> Result<(), Error> {
        assert!(out.cols().is_multiple_of(norm.width as usize));
        let mut norm = Norm { x, out: floats_mut(out), ..norm };
        if norm.width as usize == out.cols() {
            norm = with_operand_of(out, norm);
        }
        norm::norm(&self.device, kernel, out.len() / norm.width as usize, &norm)
    }

    /// Multiplies the rows of x, or of `norm`, with several matrices, those of one format in one launch. Every product
    /// but the last is launched; the last is returned, because it may get an epilogue. `are_gated` says that the maps
    /// are gate and up of a gated MLP.
    fn products(
        &mut self,
        x: &Tensor,
        mut norm: Option<Norm>,
        maps: &mut [Map<'_, '_>],
        are_gated: bool,
    ) -> Result<LastProduct, Error> {
        let mut last = LastProduct::Complete;
        if x.rows() == 0 {
            return Ok(last);
        }
        let mut rest = maps;
        while !rest.is_empty() {
            let dtype = rest[0].0.weight.dtype();
            let same = rest.iter().take(MAX_PARTS).take_while(|map| map.0.weight.dtype() == dtype).count();
            let (now, later) = rest.split_at_mut(same);
            last = self.products_of_format(x, &mut norm, last, now, are_gated)?;
            rest = later;
        }
        Ok(last)
    }

    /// Multiplies with matrices of one format. `before` is the product with the previous format, which is completed or
    /// launched together with this one.
    fn products_of_format(
        &mut self,
        x: &Tensor,
        norm: &mut Option<Norm>,
        before: LastProduct,
        maps: &mut [Map<'_, '_>],
        are_gated: bool,
    ) -> Result<LastProduct, Error> {
        let dtype = maps[0].0.weight.dtype();
        let (rows, cols) = (x.rows(), x.cols());
        let parts: Vec<(u64, u64, u64, usize)> = maps
            .iter_mut()
            .map(|(linear, out)| {
                assert_eq!((cols, out.cols()), (linear.weight.cols(), linear.weight.rows()));
                assert_eq!(rows, out.rows());
                let bias = linear.bias.as_ref().map_or(0, floats);
                (read(&linear.weight), bias, floats_mut(out), linear.weight.rows())
            })
            .collect();
        let pitch = cols.next_multiple_of(GROUP_COLS) as u32;
        let mut product = LinearProduct::new(Operand { pitch, ..Operand::NONE }, rows, cols, &parts);
        if dtype != DType::F32 && self.can_fuse(&product, dtype) {
            if self.launch_both(&before, (&product, dtype))? {
                return Ok(LastProduct::Complete);
            }
            self.complete(before)?;
            match norm.take() {
                Some(norm) => product.make_operand_of_norm(&norm),
                None => product.make_operand_of(floats(x)),
            }
            return Ok(LastProduct::Fused(product, dtype));
        }
        self.complete(before)?;
        if dtype == DType::F32 {
            for part in parts {
                let product = LinearProduct::new(Operand::NONE, rows, cols, &[part]);
                match norm.take() {
                    Some(norm) => product.launch_f32_normed(&self.device, &norm)?,
                    None => product.launch_f32(&self.device, floats(x))?,
                }
            }
            return Ok(LastProduct::Complete);
        }
        self.launch_norm(norm.take(), x)?;
        if self.cublas_products(x, maps)? {
            return Ok(LastProduct::Complete);
        }
        let product = LinearProduct::new(self.operand(x, dtype)?, rows, cols, &parts);
        if are_gated && self.current.is_step() && many_rows_wgmma::gates(&self.device, dtype, &product) {
            return Ok(LastProduct::GatePair(product, dtype));
        }
        let device = self.device.clone();
        let left = product.launch(&device, dtype, |bytes| self.scratch(Purpose::Slices, bytes))?;
        Ok(left.map_or(LastProduct::Complete, LastProduct::Slices))
    }

    /// Whether a product can have a fused prologue and epilogue.
    fn can_fuse(&self, product: &LinearProduct, dtype: DType) -> bool {
        let (rows, cols) = (product.num_rows as usize, product.cols as usize);
        // `linear_few` makes the operands of rows one after the other, which costs more than launches.
        let pays = rows == 1 || few_rows_ring::serves(&self.device, dtype, product);
        // The residual stream is on one side of the product.
        pays && self.fuses(rows, cols.min(product.num_outputs()))
            && product.few_fits(&self.device, dtype)
            && linear::makes_operand(cols)
    }

    /// Launches a product together with the one before it, which has the same input in another format. Returns false,
    /// and launches nothing, if no kernel can.
    fn launch_both(&mut self, before: &LastProduct, (second, dtype): (&LinearProduct, DType)) -> Result<bool, Error> {
        let LastProduct::Fused(first, first_type) = before else { return Ok(false) };
        let Some(both) = first.with(second) else { return Ok(false) };
        let launched = few_rows_ring::launch_two(&self.device, (first, *first_type), (second, dtype), &both)?;
        if launched {
            // This launch leaves the row maxima as they are: the next product clears them.
            self.row_maxima.are_clear = false;
        }
        Ok(launched)
    }

    /// Completes a product without an epilogue.
    fn complete(&mut self, last: LastProduct) -> Result<(), Error> {
        match last {
            LastProduct::Complete => Ok(()),
            LastProduct::Fused(product, dtype) => self.launch_fused(product, dtype, false).map(|_| ()),
            LastProduct::GatePair(product, dtype) => {
                let left = many_rows_wgmma::launch(&self.device, dtype, product, |_| {
                    unreachable!("pairs are not cut into slices")
                })?;
                assert!(left.is_none());
                Ok(())
            }
            LastProduct::Slices(product) => product.combine(&self.device),
        }
    }

    /// Launches a product of few rows. What it does with `row_maxima`: a gated product finds the maxima of its
    /// rows, if they are clear; the product after it uses them (`are_known`); any other product clears them. Returns
    /// whether maxima were found.
    fn launch_fused(&mut self, mut product: LinearProduct, dtype: DType, are_known: bool) -> Result<bool, Error> {
        let RowMaxima { buffer, are_clear } = &mut self.row_maxima;
        let address = match buffer {
            Some(buffer) => buffer.address(),
            None => buffer.insert(self.device.allocate(4 * MAX_FUSED_ROWS)?).address(),
        };
        let finds = !are_known && product.is_gated() && *are_clear;
        let maxima = match (are_known, finds) {
            (true, _) => Maxima::Known,
            (false, true) => Maxima::Found,
            (false, false) => Maxima::Cleared,
        };
        product.maxima(address, maxima);
        *are_clear = maxima == Maxima::Cleared;
        product.launch_few(&self.device, dtype)?;
        Ok(finds)
    }

    /// Returns the operand of an activation for weights of a format; makes it if it is missing or outdated.
    pub(crate) fn operand(&self, x: &Tensor, dtype: DType) -> Result<Operand, Error> {
        let (rows, cols) = (x.rows(), x.cols());
        let (operand, must_fill) = memory(x).operand_for(&self.device, rows, cols, dtype == DType::BF16)?;
        if must_fill {
            elementwise::make_operand(&self.device, floats(x), rows, cols, operand)?;
        }
        Ok(operand)
    }

    /// Multiplies with cuBLASLt. Returns false, and does nothing, without the library, with few rows, or if a weight
    /// has no plain copy.
    fn cublas_products(&mut self, x: &Tensor, maps: &mut [Map<'_, '_>]) -> Result<bool, Error> {
        let (rows, cols) = (x.rows(), x.cols());
        let serves = self.cublas.is_some() && rows >= cublas::LEAST_ROWS;
        if !serves || maps.iter().any(|(linear, _)| memory(&linear.weight).plain.is_none()) {
            return Ok(false);
        }
        let is_f16 = maps[0].0.weight.dtype() == DType::F16;
        let rounded = self.scratch(Purpose::RoundedRows, x.len() * 2)?;
        let scalars = self.scratch(Purpose::FastScalars, cublas_input::SCALARS_BYTES)?;
        match is_f16 {
            true => FastRows { x: floats(x), out: rounded, scalars, len: x.len() as u64 }.launch(&self.device)?,
            false => elementwise::round(&self.device, floats(x), x.len(), rounded)?,
        }
        let cublas = self.cublas.as_mut().expect("checked above");
        for (linear, out) in maps {
            let bias = linear.bias.as_ref().map_or(0, floats);
            let weight = memory(&linear.weight).plain.as_ref().expect("checked above").address();
            let shape = ProductShape { rows, outputs: linear.weight.rows(), cols, has_bias: bias != 0, is_f16 };
            cublas.multiply(shape, Addresses { x: rounded, weight, bias, out: floats_mut(out), scalars })?;
        }
        Ok(true)
    }
}

/// The product that `sums` holds: the partial sums of this backend are a product whose slices are not added yet.
fn product_of(sums: &(dyn std::any::Any + Send)) -> &LinearProduct {
    sums.downcast_ref().expect("partial sums of the CUDA backend")
}

fn slice_sums(product: &LinearProduct) -> SliceSums {
    product.slice_sums().expect("one product whose slices are left")
}

/// The operand of gated rows, to be written with them.
fn operand_of_gate(gate: &Tensor) -> Option<Operand> {
    if elementwise::has_pieces(gate.cols()) { memory(gate).operand_to_write(gate.rows()) } else { None }
}

/// A norm of whole rows that writes the operand of `out` too, if a product is known to read it.
fn with_operand_of(out: &Tensor, norm: Norm) -> Norm {
    match memory(out).operand_to_write(out.rows()) {
        Some(operand) => Norm { with_operand: 1, operand, ..norm },
        None => norm,
    }
}

/// A norm without the addresses of what it reads and writes.
pub(crate) fn norm_of(weight: &Tensor, bias: Option<&Tensor>, eps: f32) -> Norm {
    Norm {
        x: 0,
        y: 0,
        slices: SliceSums::NONE,
        weight: floats(weight),
        bias: bias.map_or(0, floats),
        out: 0,
        width: weight.len() as u32,
        eps,
        with_operand: 0,
        operand: Operand::NONE,
        num_groups: 0,
    }
}
