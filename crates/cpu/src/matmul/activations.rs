//! Rows of x as 8-bit integers, for products with quantized weights.
//!
//! Each group of numbers of a row (32, or 256 for the K formats) has one scale: `scale = largest / 127`, where largest is the greatest
//! magnitude, and `q = round(x * (127 / largest))` to nearest, ties to even. A row's integers depend on that row alone, and every
//! instruction set computes the same ones. The sums of the integers, over 16 and over 32, are exact and serve the formats whose
//! numbers have an offset or a minimum.
//!
//! Rows lie in blocks of sixteen, the last one smaller: of a block of m rows, slices 2 p and 2 p + 1 of row i are the 64 bytes at
//! (p m + i) 64. A row on its own is thus contiguous, and two slices of a whole block are one contiguous tile. Sums and scales lie slice
//! by slice, each with its m rows.

use super::packing::{Layout, SLICE};
use crate::memory::{Buffer, SharedSlice, block_stride};
use crate::pool::Pool;
use crate::simd::{Simd, vectorized};

/// Rows of a block.
pub(crate) const BLOCK: usize = 16;

/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even; the sum's low byte is that integer.
const ROUND: f32 = 12_582_912.0;

/// Quantized rows. The buffers keep their memory from step to step.
#[derive(Debug, Default)]
pub(crate) struct Quantized {
    num_rows: usize,
    num_slices: usize,
    /// Slices that share a scale.
    group: usize,
    /// Bytes of `quants` from block to block.
    stride: usize,
    quants: Buffer<i8>,
    /// Sums of 16, negated, what an offset of one adds to a product; for the K formats.
    sums16: Buffer<i32>,
    /// Sums of 32, negated; for the others.
    sums32: Buffer<i32>,
    /// Sums of 32 as they are, in f32.
    sums: Buffer<f32>,
    /// Those of two slices as i16; for the K formats.
    pairs: Buffer<[i16; 2]>,
    /// One for each group.
    scales: Buffer<f32>,
}

/// One block of rows, as kernels read it: the start of each array, whose order the head of this file gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlock {
    pub(crate) num_rows: usize,
    pub(crate) quants: *const i8,
    pub(crate) sums16: *const i32,
    pub(crate) sums32: *const i32,
    pub(crate) sums: *const f32,
    pub(crate) pairs: *const [i16; 2],
    pub(crate) scales: *const f32,
}

// SAFETY: the pointers are read-only views into a `Quantized` that outlives the operation.
unsafe impl Send for RowBlock {}
// SAFETY: as above.
unsafe impl Sync for RowBlock {}

impl RowBlock {
    /// A slice of a row. The next row's lies two slices further on.
    ///
    /// # Safety
    /// The block has that slice.
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, slice: usize, row: usize) -> *const i8 {
        // SAFETY: within the block's array by the caller's promise.
        unsafe { self.quants.add((slice / 2 * self.num_rows + row) * 2 * SLICE + slice % 2 * SLICE) }
    }
}

/// Kernels that work on whole blocks may read this many entries of sums and scales past the last.
const SPARE: usize = BLOCK;

impl Quantized {
    /// Quantizes rows of `depth` numbers for weights of this layout.
    pub(crate) fn fill<S: Simd>(&mut self, simd: S, pool: &Pool, x: &[f32], depth: usize, layout: &Layout) {
        // A unit is never cut: the last one is filled up with zeros.
        let num_slices = depth.div_ceil(SLICE).next_multiple_of(layout.slices);
        let group = layout.group;
        let num_rows = x.len() / depth;
        (self.num_rows, self.num_slices, self.group) = (num_rows, num_slices, group);
        let slices = num_rows * num_slices;
        let stride = block_stride(BLOCK * num_slices * SLICE);
        self.stride = stride;
        let num_blocks = self.num_blocks();
        let parts = Parts {
            quants: SharedSlice::new(self.quants.grow(num_blocks * stride)),
            sums16: SharedSlice::new(self.sums16.grow(2 * slices + SPARE)),
            sums32: SharedSlice::new(self.sums32.grow(slices + SPARE)),
            sums: SharedSlice::new(self.sums.grow(slices + SPARE)),
            pairs: SharedSlice::new(self.pairs.grow(slices / 2 + SPARE)),
            scales: SharedSlice::new(self.scales.grow(slices / group + SPARE)),
        };
        let quantize = |row: usize| {
            let m = rows_of_block(num_rows, row / BLOCK);
            let block = row / BLOCK;
            let (quants, start) = (block * stride, block * BLOCK * num_slices);
            let place = Place { quants, start, row: row % BLOCK, m, group };
            quantize_row(simd, &x[row * depth..(row + 1) * depth], num_slices, place, parts);
        };
        // Threads are worth waking for several rows only. A task is half a block, or a whole one where there are many: neighbours in a
        // block share cache lines, over which two threads would quarrel.
        let per_task = if num_rows < 4 * BLOCK { BLOCK / 2 } else { BLOCK };
        let task = |task: usize| (task * per_task..num_rows.min((task + 1) * per_task)).for_each(quantize);
        pool.run(num_rows.div_ceil(per_task), &task);
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.num_rows.div_ceil(BLOCK)
    }

    /// Bytes from the integers of a block to those of the next.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn block_bytes(&self) -> usize {
        self.stride
    }

    pub(crate) fn num_slices(&self) -> usize {
        self.num_slices
    }

    pub(crate) fn block(&self, block: usize) -> RowBlock {
        let start = block * BLOCK * self.num_slices;
        RowBlock {
            num_rows: rows_of_block(self.num_rows, block),
            quants: self.quants[block * self.stride..].as_ptr(),
            sums16: self.sums16[2 * start..].as_ptr(),
            sums32: self.sums32[start..].as_ptr(),
            sums: self.sums[start..].as_ptr(),
            pairs: self.pairs[start / 2..].as_ptr(),
            scales: self.scales[start / self.group..].as_ptr(),
        }
    }
}

fn rows_of_block(num_rows: usize, block: usize) -> usize {
    BLOCK.min(num_rows - block * BLOCK)
}

/// The arrays of a [`Quantized`] while several threads fill them, a row each.
#[derive(Clone, Copy)]
struct Parts {
    quants: SharedSlice<i8>,
    sums16: SharedSlice<i32>,
    sums32: SharedSlice<i32>,
    sums: SharedSlice<f32>,
    pairs: SharedSlice<[i16; 2]>,
    scales: SharedSlice<f32>,
}

/// Where a row goes.
#[derive(Clone, Copy)]
struct Place {
    /// Where the integers of the row's block begin.
    quants: usize,
    /// First slice of the row's block.
    start: usize,
    /// Row within the block, and the block's rows.
    row: usize,
    m: usize,
    group: usize,
}

vectorized! {
    fn quantize_row<S: Simd>(x: &[f32], num_slices: usize, place: Place, parts: Parts) {
        let Place { quants: block, start, row, m, group } = place;
        // A row of x ends with a slice, but perhaps not with a group.
        let (slices, _) = x.as_chunks::<SLICE>();
        let mut scale_at = start / group + row;
        for first in (0..num_slices).step_by(group) {
            let numbers = slices.get(first..).unwrap_or(&[]);
            let numbers = &numbers[..group.min(numbers.len())];
            // The order of magnitudes is that of their bits, NaN last: a row with a NaN must not look like a clean one.
            let largest = numbers.iter().flatten().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
            let largest = f32::from_bits(largest);
            let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
            // SAFETY: this row's own places, by the layout at the head of the file; each thread has rows of its own.
            unsafe { parts.scales.write(scale_at, largest / 127.0) };
            scale_at += m;
            let mut previous = 0;
            for s in first..first + group {
                let slice = slices.get(s).unwrap_or(&[0.0; SLICE]);
                let mut integers = [0i32; SLICE];
                for i in 0..SLICE {
                    integers[i] = (slice[i] * inverse + ROUND).to_bits() as i8 as i32;
                }
                let low: i32 = integers[..16].iter().sum();
                let high: i32 = integers[16..].iter().sum();
                let (at, sum) = (start + s * m, low + high);
                // SAFETY: as above.
                unsafe {
                    let quants = parts.quants.part(block + (s / 2 * m + row) * 2 * SLICE + s % 2 * SLICE, SLICE);
                    for i in 0..SLICE {
                        quants[i] = integers[i] as i8;
                    }
                    parts.sums.write(at + row, sum as f32);
                    if group == 1 {
                        parts.sums32.write(at + row, -sum);
                        continue;
                    }
                    parts.sums16.write(2 * at + row, -low);
                    parts.sums16.write(2 * at + m + row, -high);
                    if s % 2 == 1 {
                        parts.pairs.write((at - m) / 2 + row, [previous as i16, sum as i16]);
                    }
                }
                previous = sum;
            }
        }
    }
}
