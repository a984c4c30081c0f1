//! A tensor: a format and a shape over memory that only its own backend can open.

use std::any::Any;
use std::fmt;

use crate::DType;

/// Bytes on some device. Each backend has its own type and finds it again by downcasting; no other code can access it.
pub trait Memory: Any + Send + Sync + fmt::Debug {
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A matrix of `rows` x `cols` values, row-major; a vector is a matrix of one row.
///
/// Transformers need no more than two dimensions at this boundary: heads are ranges of a row, layers and experts are
/// separate tensors, and the blocks of the KV memory are rows.
#[derive(Debug)]
pub struct Tensor {
    dtype: DType,
    rows: usize,
    cols: usize,
    memory: Box<dyn Memory>,
}

impl Tensor {
    /// For backends: `memory` holds at least `rows * cols` values of `dtype`.
    pub fn new(dtype: DType, rows: usize, cols: usize, memory: Box<dyn Memory>) -> Self {
        Tensor { dtype, rows, cols, memory }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    pub fn memory_mut(&mut self) -> &mut dyn Memory {
        &mut *self.memory
    }

    /// For backends: the same memory read as another number of rows, after they made sure that it is large enough.
    pub fn set_rows(&mut self, rows: usize) {
        self.rows = rows;
    }
}
