//! Operations that wait for the next one, to be done in the same launch.
//!
//! With a row or two a step is bound by the number of its launches as much as by its weights. So a norm waits for the products that read
//! it, and products wait for the sum, or the gate, that their results go into, as does what experts gave for its sum; anything else that
//! comes launches what waits first. With any number of rows the turning of queries and keys waits for the attention that reads them, and
//! with many a pair of products for the gate that makes one of them, and the slices of a product for the norm that adds them up. The
//! results are those of the separate kernels, to the bit, and everything that a caller could look at is written, but for the turned queries
//! and keys, what a gate was made of and a product that goes into a sum with the norm after it: within a step nothing else reads those.

use pellucid_tensor::{DType, Error};

use crate::backend::{CudaBackend, lock};
use crate::driver::Buffer;
use crate::kernels::expert_products::AddExperts;
use crate::kernels::linear::{self, LinearProduct, Maxima, SliceSums};
use crate::kernels::norm::{self, Norm};
use crate::kernels::store::{self, TurnParameter};
use crate::kernels::{Operand, stream, wide};

/// The most rows for which this pays: every block of a product makes the operand of all rows by itself.
const MAX_ROWS: usize = 2;

#[derive(Debug)]
enum Waiting {
    Norm {
        norm: Norm,
        num_rows: usize,
    },
    Products {
        product: LinearProduct,
        dtype: DType,
    },
    Turn(TurnParameter),
    /// What experts gave, to be added up.
    Experts {
        sum: AddExperts,
        num_rows: usize,
    },
    /// What a product of some rows left to be added up.
    Slices(LinearProduct),
    /// Of many rows, a pair that may be a gate and what it gates.
    Pair {
        product: LinearProduct,
        dtype: DType,
    },
}

/// What waits, and where the largest magnitudes of gated rows stand.
#[derive(Debug, Default)]
pub(crate) struct Fusion {
    waiting: Option<Waiting>,
    maxima: Option<Buffer>,
    /// They are zeros, for the next gate to find them.
    maxima_are_clear: bool,
    /// They are those of the activation at this address, for the product that comes right after.
    maxima_of: Option<u64>,
}

impl Fusion {
    pub(crate) fn forget(&mut self) {
        self.waiting = None;
        self.maxima_are_clear = false;
        self.maxima_of = None;
    }
}

impl CudaBackend {
    /// Launches what waits. Stands at the head of every operation that does not take it over.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let mut fusion = lock(&self.fusion);
        match fusion.waiting.take() {
            None => Ok(()),
            Some(Waiting::Norm { norm, num_rows }) => norm::norm(&self.device, "rms_norm", num_rows, &norm),
            Some(Waiting::Products { mut product, dtype }) => {
                self.place_maxima(&mut fusion, &mut product)?;
                product.launch_few(&self.device, dtype)
            }
            Some(Waiting::Turn(turn)) => store::turn_and_store(&self.device, &turn),
            Some(Waiting::Experts { sum, num_rows }) => sum.launch(&self.device, num_rows),
            Some(Waiting::Pair { product, dtype }) => {
                let left = wide::launch(&self.device, dtype, product, |_| unreachable!("pairs are whole"))?;
                assert!(left.is_none());
                Ok(())
            }
            Some(Waiting::Slices(product)) => product.combine(&self.device),
        }
    }

    /// A gate finds the largest magnitudes of its rows, the product after it knows them, any other product clears them.
    fn place_maxima(&self, fusion: &mut Fusion, product: &mut LinearProduct) -> Result<(), Error> {
        let address = match &fusion.maxima {
            Some(buffer) => buffer.address(),
            None => fusion.maxima.insert(self.device.allocate(4 * MAX_ROWS)?).address(),
        };
        let known = fusion.maxima_of.take() == Some(product.input());
        let gates = product.is_gated() && fusion.maxima_are_clear;
        match (known, gates) {
            (true, _) => product.maxima(address, Maxima::Known),
            (false, true) => {
                product.maxima(address, Maxima::Found);
                fusion.maxima_of = Some(product.first_output());
            }
            (false, false) => product.maxima(address, Maxima::Cleared),
        }
        fusion.maxima_are_clear = !known && !gates;
        Ok(())
    }

    fn may_wait(&self, num_rows: usize) -> bool {
        num_rows > 0 && num_rows <= MAX_ROWS && lock(&self.current).is_step()
    }

    /// Whether a norm of whole rows was left to wait; `norm` has its places.
    pub(crate) fn norm_waits(&self, norm: Norm, num_rows: usize) -> bool {
        let waits = self.may_wait(num_rows) && norm.y == 0 && linear::takes_norm(norm.width);
        if waits {
            lock(&self.fusion).waiting = Some(Waiting::Norm { norm, num_rows });
        }
        waits
    }

    /// Whether products of x were left to wait, with the norm before them where x is one that waits, or launched with those that waited.
    pub(crate) fn products_wait(&self, x: u64, mut product: LinearProduct, dtype: DType) -> Result<bool, Error> {
        // `linear_few` makes the operands of rows one after the other, which costs more than launches.
        let pays = product.num_rows == 1 || stream::serves(&self.device, dtype, &product);
        let fits = pays
            && self.may_wait(product.num_rows as usize)
            && product.few_fits(&self.device, dtype)
            && linear::makes_operand(product.cols as usize);
        if fits && self.launch_with_waiting(x, &product, dtype)? {
            return Ok(true);
        }
        let norm = match &lock(&self.fusion).waiting {
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
        lock(&self.fusion).waiting = Some(Waiting::Products { product, dtype });
        Ok(true)
    }

    /// Launches products of x together with those that wait, if they have the same input in another format. False when nothing was done.
    fn launch_with_waiting(&self, x: u64, product: &LinearProduct, dtype: DType) -> Result<bool, Error> {
        let mut fusion = lock(&self.fusion);
        let Some(Waiting::Products { product: first, dtype: first_type }) = fusion.waiting else { return Ok(false) };
        let Some(both) = first.with(x, product) else { return Ok(false) };
        let launched = stream::launch_two(&self.device, (&first, first_type), (product, dtype), &both)?;
        if launched {
            // Neither is a gate nor reads one: the next product clears the largest magnitudes.
            fusion.forget();
        }
        Ok(launched)
    }

    /// Whether the turning of queries and keys, and the storing of keys and values, was left to wait for the attention that comes next.
    pub(crate) fn turn_waits(&self, turn: &TurnParameter) -> bool {
        let waits = lock(&self.current).is_step();
        if waits {
            lock(&self.fusion).waiting = Some(Waiting::Turn(*turn));
        }
        waits
    }

    /// What waits to be turned, if the attention that comes next takes it over; anything else that waits is launched.
    pub(crate) fn turn_joins(
        &self,
        takes: impl FnOnce(&TurnParameter) -> bool,
    ) -> Result<Option<TurnParameter>, Error> {
        let mut fusion = lock(&self.fusion);
        match fusion.waiting {
            Some(Waiting::Turn(turn)) if takes(&turn) => {
                fusion.waiting = None;
                Ok(Some(turn))
            }
            _ => {
                drop(fusion);
                self.settle()?;
                Ok(None)
            }
        }
    }

    /// Adds up what experts gave, or lets it wait for the sum that it goes into.
    pub(crate) fn experts_wait(&self, sum: AddExperts, num_rows: usize) -> Result<(), Error> {
        if !self.may_wait(num_rows) {
            return sum.launch(&self.device, num_rows);
        }
        lock(&self.fusion).waiting = Some(Waiting::Experts { sum, num_rows });
        Ok(())
    }

    /// Takes over a sum `x += y` whose y is the product that waits, or what experts gave, and launches both. False when it is neither.
    pub(crate) fn sum_joins(&self, y: u64, x: u64) -> Result<bool, Error> {
        if let Some(Waiting::Experts { sum, .. }) = &mut lock(&self.fusion).waiting
            && sum.out == y
        {
            sum.residual = x;
        } else {
            return self.joins(|product| product.add_to(y, x));
        }
        self.settle()?;
        Ok(true)
    }

    /// The same for `gate = activation(gate) * up`. A pair of many rows goes on waiting.
    pub(crate) fn gate_joins(&self, activation: u32, up: u64, gate: u64) -> Result<bool, Error> {
        if matches!(lock(&self.fusion).waiting, Some(Waiting::Pair { .. })) {
            return Ok(false);
        }
        self.joins(|product| product.gate_by(activation, gate, up))
    }

    /// Adds up what a product left, or lets it wait for the norm that reads it.
    pub(crate) fn slices_wait(&self, product: LinearProduct) -> Result<(), Error> {
        if !lock(&self.current).is_step() {
            return product.combine(&self.device);
        }
        lock(&self.fusion).waiting = Some(Waiting::Slices(product));
        Ok(())
    }

    /// What waits to be added up to y, for a norm that comes next.
    pub(crate) fn slices_join(&self, y: u64) -> Option<SliceSums> {
        let mut fusion = lock(&self.fusion);
        let Some(Waiting::Slices(product)) = &fusion.waiting else { return None };
        let sums = product.slice_sums(y)?;
        fusion.waiting = None;
        Some(sums)
    }

    /// Whether products of many rows were left to wait for a gate.
    pub(crate) fn pair_waits(&self, product: LinearProduct, dtype: DType) -> bool {
        let waits = lock(&self.current).is_step() && wide::gates(&self.device, dtype, &product);
        if waits {
            lock(&self.fusion).waiting = Some(Waiting::Pair { product, dtype });
        }
        waits
    }

    /// Takes over a gate whose result is also rounded to `result`, and launches all of it. False when it is not that of the pair that waits.
    pub(crate) fn pair_joins(
        &self,
        activation: u32,
        up: u64,
        gate: u64,
        result: Option<Operand>,
    ) -> Result<bool, Error> {
        let joined = match (&mut lock(&self.fusion).waiting, result) {
            (Some(Waiting::Pair { product, .. }), Some(result)) if result.is_bf16 != 0 => {
                product.round_to(result);
                product.gate_by(activation, gate, up)
            }
            _ => false,
        };
        self.settle()?;
        Ok(joined)
    }

    fn joins(&self, take: impl FnOnce(&mut LinearProduct) -> bool) -> Result<bool, Error> {
        let joined = match &mut lock(&self.fusion).waiting {
            Some(Waiting::Products { product, .. }) => take(product),
            _ => false,
        };
        self.settle()?;
        Ok(joined)
    }
}
