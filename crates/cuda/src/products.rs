//! Matrix products: the operand that an input becomes, and who multiplies it.

use pellucid_tensor::{DType, Error, Linear, Tensor};

use crate::backend::{CudaBackend, Purpose};
use crate::cublas::{self, Places, Shape};
use crate::kernels::fast::{self, FastRows};
use crate::kernels::linear::{LinearProduct, MAX_PARTS};
use crate::kernels::{GROUP_COLS, Operand, rows};
use crate::memory::{floats, floats_mut, memory, read};

/// Products of one input with several matrices: those of one format at once.
pub(crate) fn products(backend: &CudaBackend, x: &Tensor, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
    if x.rows() == 0 {
        return Ok(());
    }
    let mut rest = maps;
    while !rest.is_empty() {
        let dtype = rest[0].0.weight.dtype();
        let same = rest.iter().take(MAX_PARTS).take_while(|map| map.0.weight.dtype() == dtype).count();
        let (now, later) = rest.split_at_mut(same);
        backend.products(x, now)?;
        rest = later;
    }
    Ok(())
}

impl CudaBackend {
    /// The operand of an activation for weights of a format, made now unless it is there.
    pub(crate) fn operand(&self, x: &Tensor, dtype: DType) -> Result<Operand, Error> {
        let (rows, cols) = (x.rows(), x.cols());
        let (operand, must_fill) = memory(x).operand_for(&self.device, rows, cols, dtype == DType::BF16)?;
        if must_fill {
            rows::make_operand(&self.device, floats(x), rows, cols, operand)?;
        }
        Ok(operand)
    }

    /// Products of one input with matrices of one format.
    fn products(&self, x: &Tensor, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        let dtype = maps[0].0.weight.dtype();
        let parts: Vec<(u64, u64, u64, usize)> = maps
            .iter_mut()
            .map(|(linear, out)| {
                assert_eq!((x.cols(), out.cols()), (linear.weight.cols(), linear.weight.rows()));
                assert_eq!(x.rows(), out.rows());
                let bias = linear.bias.as_ref().map_or(0, floats);
                (read(&linear.weight), bias, floats_mut(out), linear.weight.rows())
            })
            .collect();
        if dtype == DType::F32 {
            self.settle()?;
            for part in parts {
                LinearProduct::new(Operand::NONE, x.rows(), x.cols(), &[part]).launch_plain(&self.device, floats(x))?;
            }
            return Ok(());
        }
        let pitch = x.cols().next_multiple_of(GROUP_COLS) as u32;
        let waiting = LinearProduct::new(Operand { pitch, ..Operand::NONE }, x.rows(), x.cols(), &parts);
        if self.products_wait(floats(x), waiting, dtype)? {
            return Ok(());
        }
        if self.fast_products(x, maps)? {
            return Ok(());
        }
        let operand = self.operand(x, dtype)?;
        let product = LinearProduct::new(operand, x.rows(), x.cols(), &parts);
        if self.pair_waits(product, dtype) {
            return Ok(());
        }
        match product.launch(&self.device, dtype, |bytes| self.scratch(Purpose::Slices, bytes))? {
            Some(left) => self.slices_wait(left),
            None => Ok(()),
        }
    }

    /// The same by cuBLASLt; false where it does not serve.
    fn fast_products(&self, x: &Tensor, maps: &mut [(&Linear, &mut Tensor)]) -> Result<bool, Error> {
        let (rows, cols) = (x.rows(), x.cols());
        let Some(cublas) = self.cublas.as_ref().filter(|_| rows >= cublas::LEAST_ROWS) else { return Ok(false) };
        if maps.iter().any(|(linear, _)| memory(&linear.weight).plain.is_none()) {
            return Ok(false);
        }
        let is_f16 = maps[0].0.weight.dtype() == DType::F16;
        let rounded = self.scratch(Purpose::RoundedRows, x.len() * 2)?;
        let scalars = self.scratch(Purpose::FastScalars, fast::SCALARS_BYTES)?;
        match is_f16 {
            true => FastRows { x: floats(x), out: rounded, scalars, len: x.len() as u64 }.launch(&self.device)?,
            false => rows::round(&self.device, floats(x), x.len(), rounded)?,
        }
        for (linear, out) in maps {
            let bias = linear.bias.as_ref().map_or(0, floats);
            let weight = memory(&linear.weight).plain.as_ref().expect("looked for above").address();
            let shape = Shape { rows, outputs: linear.weight.rows(), cols, has_bias: bias != 0, is_f16 };
            cublas.multiply(shape, Places { x: rounded, weight, bias, out: floats_mut(out), scalars })?;
        }
        Ok(true)
    }
}
