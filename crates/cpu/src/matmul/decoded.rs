//! Products with formats that have no kernel: rows of W are decoded to f32 first.
//!
//! A few rows of W are decoded and multiplied with all rows of x while they are in the cache. Decoding costs the same
//! for one row of x as for many; for one row it is most of the work, so the decoder's arithmetic is the bound and not
//! memory. Bytes moved: W once, x once for each group of columns that a thread takes.

use std::cell::RefCell;
use std::ops::Range;

use pellucid_tensor::{DType, quant};

use super::{LinearWeight, Product};
use crate::memory::HostMemory;
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::{Simd, vectorized};

/// A weight in the file's format.
#[derive(Clone, Copy)]
struct StoredRows<'a> {
    dtype: DType,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> StoredRows<'a> {
    fn row(&self, row: usize) -> &'a [u8] {
        let row_bytes = self.dtype.bytes_for(self.cols).expect("rows are whole blocks");
        &self.bytes[row * row_bytes..(row + 1) * row_bytes]
    }
}

vectorized! {
    /// Decodes a row with the scalar decoders of `tensor`, compiled for the instruction set.
    pub(crate) fn decode_row<S: Simd>(dtype: DType, row: &[u8], out: &mut [f32]) {
        quant::decode(dtype, row, out);
    }
}

thread_local! {
    /// Decoded rows of W; kept by each thread, so that only the first step allocates.
    static DECODED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Columns of a task: whole tiles, and few enough that tasks divide evenly.
fn columns_per_task(num_cols: usize, num_threads: usize) -> usize {
    const TILE: usize = 8;
    (num_cols / (num_threads * 8)).next_multiple_of(TILE).clamp(TILE, 64)
}

/// Computes a product whose weight is stored in the file's format.
pub(super) fn matmul<S: Simd>(simd: S, pool: &Pool, x: &[f32], product: &Product<'_>, bytes: &HostMemory) {
    let LinearWeight { dtype, num_columns: num_cols, depth: k, .. } = *product.weight;
    let w = StoredRows { dtype, cols: k, bytes: bytes.bytes() };
    let num_rows = x.len() / k;
    let (bias, output) = (product.bias, product.out);
    let per_task = columns_per_task(num_cols, pool.num_threads());
    pool.run(num_cols.div_ceil(per_task), &|task| {
        let columns = task * per_task..((task + 1) * per_task).min(num_cols);
        DECODED.with_borrow_mut(|decoded| {
            decoded.resize(S::TILE_COLS * w.cols, 0.0);
            let mut column = columns.start;
            while column < columns.end {
                let group = column..columns.end.min(column + S::TILE_COLS);
                for (i, c) in group.clone().enumerate() {
                    decode_row(simd, w.dtype, w.row(c), &mut decoded[i * w.cols..(i + 1) * w.cols]);
                }
                let panel = DecodedColumns { x, decoded, k: w.cols, num_rows, num_cols, columns: group.clone(), bias };
                // SAFETY: tasks own disjoint columns.
                unsafe { panel.multiply(simd, &output) };
                column = group.end;
            }
        });
    });
}

/// Up to `TILE_COLS` decoded rows of W, to be multiplied with every row of x.
struct DecodedColumns<'a> {
    x: &'a [f32],
    decoded: &'a [f32],
    k: usize,
    num_rows: usize,
    num_cols: usize,
    columns: Range<usize>,
    bias: Option<&'a [f32]>,
}

impl DecodedColumns<'_> {
    /// # Safety
    /// No other thread writes these columns of `output`.
    unsafe fn multiply<S: Simd>(&self, simd: S, output: &SharedSlice<'_, f32>) {
        // SAFETY: passed on from the caller.
        unsafe {
            match self.columns.len() {
                1 => self.all_rows::<S, 1>(simd, output),
                2 => self.all_rows::<S, 2>(simd, output),
                3 => self.all_rows::<S, 3>(simd, output),
                _ => self.all_rows::<S, 4>(simd, output),
            }
        }
    }

    /// # Safety
    /// As for `multiply`.
    unsafe fn all_rows<S: Simd, const C: usize>(&self, simd: S, output: &SharedSlice<'_, f32>) {
        let mut row = 0;
        while row < self.num_rows {
            let rows = (self.num_rows - row).min(S::TILE_ROWS);
            // SAFETY: passed on from the caller.
            unsafe {
                match rows {
                    1 => self.tile::<S, 1, C>(simd, row, output),
                    2 => self.tile::<S, 2, C>(simd, row, output),
                    3 => self.tile::<S, 3, C>(simd, row, output),
                    4 => self.tile::<S, 4, C>(simd, row, output),
                    5 => self.tile::<S, 5, C>(simd, row, output),
                    _ => self.tile::<S, 6, C>(simd, row, output),
                }
            }
            row += rows;
        }
    }

    /// # Safety
    /// As for `multiply`.
    unsafe fn tile<S: Simd, const R: usize, const C: usize>(&self, simd: S, row: usize, output: &SharedSlice<'_, f32>) {
        let x: [&[f32]; R] = std::array::from_fn(|r| &self.x[(row + r) * self.k..(row + r + 1) * self.k]);
        let w: [&[f32]; C] = std::array::from_fn(|c| &self.decoded[c * self.k..(c + 1) * self.k]);
        let products = simd.dot_tile(x, w);
        for r in 0..R {
            // SAFETY: the caller guarantees that no other thread writes these columns.
            let out = unsafe { output.part((row + r) * self.num_cols + self.columns.start, C) };
            for c in 0..C {
                out[c] = products[r][c] + self.bias.map_or(0.0, |bias| bias[self.columns.start + c]);
            }
        }
    }
}
