//! Operations that wait for the next one, to be done in the same launch.
//!
//! With a row or two a step is bound by the number of its launches as much as by its weights. So a norm waits for the products that read
//! it, and products wait for the sum, or the gate, that their results go into; anything else that comes launches what waits first. The
//! results are those of the separate kernels, to the bit, and everything that a caller could look at is written.

use pellucid_tensor::{DType, Error, Tensor};

use crate::backend::{CudaBackend, lock};
use crate::kernels::linear::LinearProduct;
use crate::kernels::norm::{self, Norm};

/// The most rows for which this pays: every block of a product makes the operand of all rows by itself.
const MAX_ROWS: usize = 2;

#[derive(Debug)]
pub(crate) enum Waiting {
    Norm { norm: Norm, num_rows: usize },
    Products { product: LinearProduct, dtype: DType },
}

impl CudaBackend {
    /// Launches what waits. Stands at the head of every operation that does not take it over.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let waiting = lock(&self.waiting).take();
        match waiting {
            None => Ok(()),
            Some(Waiting::Norm { norm, num_rows }) => norm::norm(&self.device, "rms_norm", num_rows, &norm),
            Some(Waiting::Products { product, dtype }) => product.launch_few(&self.device, dtype),
        }
    }

    fn may_wait(&self, num_rows: usize) -> bool {
        num_rows > 0 && num_rows <= MAX_ROWS && lock(&self.current).is_step()
    }

    /// Whether a norm of whole rows was left to wait; `norm` has its places.
    pub(crate) fn norm_waits(&self, norm: Norm, num_rows: usize) -> bool {
        let waits = self.may_wait(num_rows) && norm.y == 0;
        if waits {
            *lock(&self.waiting) = Some(Waiting::Norm { norm, num_rows });
        }
        waits
    }

    /// Whether products of x were left to wait, with the norm before them where x is one that waits.
    pub(crate) fn products_wait(&self, x: u64, mut product: LinearProduct, dtype: DType) -> Result<bool, Error> {
        let fits = self.may_wait(product.num_rows as usize) && product.few_fits(&self.device);
        let norm = match &*lock(&self.waiting) {
            Some(Waiting::Norm { norm, .. }) if fits && norm.out == x => Some(*norm),
            _ => None,
        };
        match norm {
            Some(norm) => product.take_norm(&norm),
            None => self.settle()?,
        }
        if !fits {
            return Ok(false);
        }
        product.take_plain(norm.map_or(x, |norm| norm.x));
        *lock(&self.waiting) = Some(Waiting::Products { product, dtype });
        Ok(true)
    }

    /// Takes over a sum `x += y` whose y is the product that waits, and launches both. False when it is not.
    pub(crate) fn sum_joins(&self, y: u64, x: u64) -> Result<bool, Error> {
        self.joins(|product| product.add_to(y, x))
    }

    /// The same for `gate = activation(gate) * up`.
    pub(crate) fn gate_joins(&self, activation: u32, up: &Tensor, gate: u64) -> Result<bool, Error> {
        let up = crate::memory::floats(up);
        self.joins(|product| product.gate_by(activation, gate, up))
    }

    fn joins(&self, take: impl FnOnce(&mut LinearProduct) -> bool) -> Result<bool, Error> {
        let joined = match &mut *lock(&self.waiting) {
            Some(Waiting::Products { product, .. }) => take(product),
            _ => false,
        };
        self.settle()?;
        Ok(joined)
    }
}
