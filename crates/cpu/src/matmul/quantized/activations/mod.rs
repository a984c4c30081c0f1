//! [`QuantizedRows`]: rows of x as 8-bit integers, for products with quantized weights.
//!
//! Each group of values of a row (32, or 256 for the K formats) has one scale: `scale = largest / 127`, where `largest`
//! is the greatest magnitude, and `q = round(x * (127 / largest))`, to nearest with ties to even. A row's integers
//! depend only on that row, and every instruction set computes the same ones. Ranks exchange rows rounded by the same
//! formula ([`pellucid_tensor::RoundedGroups`]). The sums of 16 and of 32 integers are exact; formats with an offset or
//! a minimum need them.
//!
//! Rows are stored in blocks of sixteen, the last one smaller, in one of two orders ([`InputOrder`]):
//!
//! - by row: in a block of m rows, slices 2 p and 2 p + 1 of row i are the 64 bytes at (p m + i) 64. A single row is
//!   thus contiguous, and two slices of a whole block are one contiguous tile;
//! - by word, for kernels that multiply the same four values of several rows in turn: word j of slice s of row i is the
//!   four bytes at ((8 s + j) 16 + i) 4, whatever the number of rows.
//!
//! Sums and scales are stored slice by slice, with m rows each.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::marker::PhantomData;

use crate::math::ROUND;
use crate::matmul::BLOCK_ROWS;
use crate::matmul::input::InputRows;
use crate::matmul::quantized::panel_layout::{PanelLayout, SLICE_LEN};
use crate::memory::{Buffer, block_stride};
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
#[cfg(target_arch = "x86_64")]
use crate::simd::Isa;
use crate::simd::{Simd, vectorized};

/// Words of four values in a slice.
pub(crate) const SLICE_WORDS: usize = SLICE_LEN / 4;

/// The order of the integers of a block; the head of this file gives the offsets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum InputOrder {
    #[default]
    ByRow,
    ByWord,
}

/// Quantized rows. The buffers keep their memory from step to step.
#[derive(Debug, Default)]
pub(crate) struct QuantizedRows {
    num_rows: usize,
    num_slices: usize,
    order: InputOrder,
    /// Slices that share a scale.
    group: usize,
    /// Bytes of `quants` from block to block.
    stride: usize,
    quants: Buffer<i8>,
    /// Sums of 16 integers times the negated offset of W, for the K formats: what the offset adds to a product.
    offsets16: Buffer<i32>,
    /// Sums of 32 integers times the negated offset of W, for the other formats.
    offsets32: Buffer<i32>,
    /// Sums of 32 integers, in f32.
    sums: Buffer<f32>,
    /// Sums of 32 integers of two slices, for the K formats.
    pairs: Buffer<[i16; 2]>,
    /// The scale of each group.
    scales: Buffer<f32>,
}

/// One block of rows, as kernels read it: the start of each array. The head of this file gives the offsets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlock<'a> {
    pub(crate) num_rows: usize,
    pub(crate) quants: *const i8,
    pub(crate) offsets16: *const i32,
    pub(crate) offsets32: *const i32,
    pub(crate) sums: *const f32,
    pub(crate) pairs: *const [i16; 2],
    pub(crate) scales: *const f32,
    rows: PhantomData<&'a QuantizedRows>,
}

// SAFETY: the pointers are read-only views into a `QuantizedRows` that is borrowed for 'a.
unsafe impl Send for RowBlock<'_> {}
// SAFETY: see `Send`.
unsafe impl Sync for RowBlock<'_> {}

impl RowBlock<'_> {
    /// Returns a slice of a row, if rows are ordered by row. The next row's slice is two slices further on.
    ///
    /// # Safety
    /// The block has that slice and that row.
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, slice: usize, row: usize) -> *const i8 {
        // SAFETY: the caller guarantees that the offset is within the array.
        unsafe { self.quants.add((slice / 2 * self.num_rows + row) * 2 * SLICE_LEN + slice % 2 * SLICE_LEN) }
    }

    /// Returns the first word of a slice of a row, if rows are ordered by word. The next row's word follows it; the
    /// row's next word is [`BLOCK_ROWS`] words further on.
    ///
    /// # Safety
    /// The block has that slice and that row.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) unsafe fn words(&self, slice: usize, row: usize) -> *const i32 {
        // SAFETY: the caller guarantees that the offset is within the array.
        unsafe { self.quants.cast::<i32>().add(slice * SLICE_WORDS * BLOCK_ROWS + row) }
    }

    /// The same rows from `slice` on, which begins a unit of a layout with a scale for each slice.
    ///
    /// # Safety
    /// The block has that slice.
    #[cfg(target_arch = "x86_64")]
    pub(crate) unsafe fn at_slice(self, slice: usize) -> Self {
        let at = slice * self.num_rows;
        // SAFETY: the caller guarantees that the offsets are within the arrays.
        unsafe {
            RowBlock {
                quants: self.quants.add(at * SLICE_LEN),
                sums: self.sums.add(at),
                scales: self.scales.add(at),
                ..self
            }
        }
    }
}

/// Entries after the last sums and scales: kernels that work on whole blocks read sixteen entries where a block has
/// fewer rows.
const SPARE: usize = BLOCK_ROWS;

impl QuantizedRows {
    /// Quantizes rows for weights of this layout; returns the rows, computed.
    pub(crate) fn fill<'x, S: Simd>(
        &mut self,
        simd: S,
        pool: &Pool,
        x: InputRows<'x>,
        layout: &PanelLayout,
        order: InputOrder,
    ) -> InputRows<'x> {
        let (num_rows, depth) = (x.num_rows(), x.depth());
        // Units are whole: the last one is filled up with zeros.
        let num_slices = depth.div_ceil(SLICE_LEN).next_multiple_of(layout.slices);
        let (group, offset) = (layout.group, layout.shared_offset());
        (self.num_rows, self.num_slices, self.order, self.group) = (num_rows, num_slices, order, group);
        let slices = num_rows * num_slices;
        let stride = block_stride(BLOCK_ROWS * num_slices * SLICE_LEN);
        self.stride = stride;
        let num_blocks = self.num_blocks();
        let arrays = RowArrays {
            quants: SharedSlice::new(self.quants.grow(num_blocks * stride)),
            offsets16: SharedSlice::new(self.offsets16.grow(2 * slices + SPARE)),
            offsets32: SharedSlice::new(self.offsets32.grow(slices + SPARE)),
            sums: SharedSlice::new(self.sums.grow(slices + SPARE)),
            pairs: SharedSlice::new(self.pairs.grow(slices / 2 + SPARE)),
            scales: SharedSlice::new(self.scales.grow(slices / group + SPARE)),
        };
        // A task is half a block, or a whole block if there are many rows: adjacent rows share cache lines, which two
        // threads would pass back and forth. For fewer rows than a task, waking threads is not worth it.
        let per_task = if num_rows < 4 * BLOCK_ROWS { BLOCK_ROWS / 2 } else { BLOCK_ROWS };
        pool.run(num_rows.div_ceil(per_task), &|task| {
            let rows = task * per_task..num_rows.min((task + 1) * per_task);
            let block = rows.start / BLOCK_ROWS;
            let destination = Destination {
                quants: block * stride,
                start: block * BLOCK_ROWS * num_slices,
                row: rows.start % BLOCK_ROWS,
                m: rows_of_block(num_rows, block),
                order,
                group,
                offset,
            };
            // SAFETY: each task has its own rows.
            let x = unsafe { x.take(rows.clone()) };
            // Sixteen rows at a time are faster from four rows on; one row is quantized sixteen slices at a time. Both
            // need whole units.
            #[cfg(target_arch = "x86_64")]
            if S::ISA == Isa::Avx512 && depth == num_slices * SLICE_LEN {
                // SAFETY: the value `simd` proves the instructions; each task has its own rows.
                unsafe {
                    match (num_rows, rows.len()) {
                        (1, _) if group == 1 && order == InputOrder::ByRow => {
                            return avx512::quantize_slices(x, destination, arrays);
                        }
                        (_, 4..) => return avx512::quantize_rows(x, depth, destination, arrays),
                        _ => {}
                    }
                }
            }
            quantize_rows(simd, x, depth, num_slices, destination, arrays);
        });
        // SAFETY: each task took its own rows, and all tasks are done.
        unsafe { x.taken() }
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn order(&self) -> InputOrder {
        self.order
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.num_rows.div_ceil(BLOCK_ROWS)
    }

    /// Bytes from the integers of one block to those of the next.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn block_bytes(&self) -> usize {
        self.stride
    }

    pub(crate) fn num_slices(&self) -> usize {
        self.num_slices
    }

    pub(crate) fn block(&self, block: usize) -> RowBlock<'_> {
        let start = block * BLOCK_ROWS * self.num_slices;
        RowBlock {
            num_rows: rows_of_block(self.num_rows, block),
            quants: self.quants[block * self.stride..].as_ptr(),
            offsets16: self.offsets16[2 * start..].as_ptr(),
            offsets32: self.offsets32[start..].as_ptr(),
            sums: self.sums[start..].as_ptr(),
            pairs: self.pairs[start / 2..].as_ptr(),
            scales: self.scales[start / self.group..].as_ptr(),
            rows: PhantomData,
        }
    }
}

fn rows_of_block(num_rows: usize, block: usize) -> usize {
    BLOCK_ROWS.min(num_rows - block * BLOCK_ROWS)
}

/// The arrays of [`QuantizedRows`] while several threads fill them, each its own rows.
#[derive(Clone, Copy)]
struct RowArrays<'a> {
    quants: SharedSlice<'a, i8>,
    offsets16: SharedSlice<'a, i32>,
    offsets32: SharedSlice<'a, i32>,
    sums: SharedSlice<'a, f32>,
    pairs: SharedSlice<'a, [i16; 2]>,
    scales: SharedSlice<'a, f32>,
}

/// Offsets at which the integers, sums and scales of some rows of a block are written.
#[derive(Clone, Copy)]
struct Destination {
    /// Offset of the block's integers.
    quants: usize,
    /// Offset of the block in arrays with an entry for each slice and row.
    start: usize,
    /// The first row within the block, and the number of rows of the block.
    row: usize,
    m: usize,
    order: InputOrder,
    group: usize,
    /// The offset of W.
    offset: i32,
}

vectorized! {
    /// Quantizes some rows of a block, group by group: the results of the rows of a group are adjacent in memory.
    fn quantize_rows<S: Simd>(
        x: &[f32],
        depth: usize,
        num_slices: usize,
        destination: Destination,
        arrays: RowArrays<'_>,
    ) {
        for first in (0..num_slices).step_by(destination.group) {
            for (i, x) in x.chunks_exact(depth).enumerate() {
                // A row of x ends with a slice, but perhaps not with a group.
                let (slices, _) = x.as_chunks::<SLICE_LEN>();
                let numbers = slices.get(first..).unwrap_or(&[]);
                let numbers = &numbers[..destination.group.min(numbers.len())];
                let destination = Destination { row: destination.row + i, ..destination };
                // SAFETY: `QuantizedRows::fill` gives each thread its own rows.
                unsafe { quantize_group(numbers, first, destination, arrays) };
            }
        }
    }
}

/// Quantizes one group of one row, from slice `first` on; slices that `numbers` lacks are zeros.
///
/// # Safety
/// No other thread writes this row.
#[inline(always)]
unsafe fn quantize_group(numbers: &[[f32; SLICE_LEN]], first: usize, destination: Destination, arrays: RowArrays<'_>) {
    let Destination { start, row, m, group, offset, .. } = destination;
    // Magnitudes are ordered like their bits, with NaN last: a NaN must become the scale, so that it reaches the
    // results.
    let mut lanes = [0u32; 16];
    for slice in numbers {
        for i in 0..SLICE_LEN {
            lanes[i % 16] = lanes[i % 16].max(slice[i].to_bits() & 0x7fff_ffff);
        }
    }
    let largest = f32::from_bits(lanes.into_iter().fold(0, u32::max));
    let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
    // SAFETY: by the layout at the head of this file, only this row has this entry.
    unsafe { arrays.scales.write((start + first * m) / group + row, largest / 127.0) };
    let mut previous = 0;
    for s in first..first + group {
        let slice = numbers.get(s - first).unwrap_or(&[0.0; SLICE_LEN]);
        let mut integers = [0i32; SLICE_LEN];
        for i in 0..SLICE_LEN {
            // The low byte of the sum is the rounded integer.
            integers[i] = (slice[i] * inverse + ROUND).to_bits() as i8 as i32;
        }
        let low: i32 = integers[..16].iter().sum();
        let high: i32 = integers[16..].iter().sum();
        let (at, sum) = (start + s * m, low + high);
        // SAFETY: by the layout at the head of this file, only this row has these entries.
        unsafe {
            put_integers(integers.map(|integer| integer as i8), s, destination, arrays);
            arrays.sums.write(at + row, sum as f32);
            if group == 1 {
                arrays.offsets32.write(at + row, -sum * offset);
                continue;
            }
            arrays.offsets16.write(2 * at + row, -low * offset);
            arrays.offsets16.write(2 * at + m + row, -high * offset);
            if s % 2 == 1 {
                arrays.pairs.write((at - m) / 2 + row, [previous as i16, sum as i16]);
            }
        }
        previous = sum;
    }
}

/// Writes the integers of a slice of a row.
///
/// # Safety
/// No other thread writes this row.
#[inline(always)]
unsafe fn put_integers(integers: [i8; SLICE_LEN], slice: usize, destination: Destination, arrays: RowArrays<'_>) {
    let Destination { quants, row, m, .. } = destination;
    // SAFETY: by the layout at the head of this file, only this row has these bytes.
    unsafe {
        match destination.order {
            InputOrder::ByRow => {
                let at = quants + (slice / 2 * m + row) * 2 * SLICE_LEN + slice % 2 * SLICE_LEN;
                arrays.quants.part(at, SLICE_LEN).copy_from_slice(&integers);
            }
            InputOrder::ByWord => {
                for (j, word) in integers.as_chunks::<4>().0.iter().enumerate() {
                    let at = quants + ((slice * SLICE_WORDS + j) * BLOCK_ROWS + row) * 4;
                    arrays.quants.part(at, 4).copy_from_slice(word);
                }
            }
        }
    }
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use pellucid_tensor::DType;

    use super::*;
    use crate::matmul::quantized::panel_layout::{QuantizedFormat, with_quantized_format};
    use crate::simd::{Avx512, Scalar};

    /// Zero, huge, denormal and NaN values are quantized alike too.
    #[test]
    fn sixteen_rows_at_a_time_are_quantized_as_one_is_in_both_orders() {
        const DEPTH: usize = 24 * SLICE_LEN;
        let Some(simd) = Avx512::detect() else { return };
        let pool = Pool::new(1).expect("no thread but this one");
        for (dtype, num_rows) in [
            (DType::Q4_0, 77),
            (DType::Q4_1, 16),
            (DType::Q8_0, 4),
            (DType::Q4_K, 21),
            (DType::Q6_K, 70),
            (DType::Q5_0, 1),
        ] {
            let layout = with_quantized_format!(dtype, F => F::LAYOUT).expect("a packed format");
            let mut x: Vec<f32> = (0..num_rows * DEPTH).map(|i| ((i * 7919 + 13) % 1009) as f32 / 97.0 - 5.0).collect();
            x[..SLICE_LEN].fill(0.0);
            for (i, special) in [f32::NAN, f32::INFINITY, -1e38, 1e-40].into_iter().enumerate() {
                x[i % num_rows * DEPTH + (i + 1) * SLICE_LEN + 3 * i] = special;
            }
            let filled = |order: InputOrder| {
                let (mut fast, mut plain) = (QuantizedRows::default(), QuantizedRows::default());
                fast.fill(simd, &pool, InputRows::rows(&x, DEPTH), &layout, order);
                plain.fill(Scalar, &pool, InputRows::rows(&x, DEPTH), &layout, order);
                let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(fast.quants[..] == plain.quants[..] && fast.offsets32[..] == plain.offsets32[..], "{dtype}");
                assert!(fast.pairs[..] == plain.pairs[..] && fast.offsets16[..] == plain.offsets16[..], "{dtype}");
                assert!(bits(&fast.sums) == bits(&plain.sums) && bits(&fast.scales) == bits(&plain.scales), "{dtype}");
                fast
            };
            let (by_rows, by_words) = (filled(InputOrder::ByRow), filled(InputOrder::ByWord));
            for (row, slice) in (0..num_rows).flat_map(|row| (0..by_rows.num_slices()).map(move |slice| (row, slice))) {
                let [rows, words] = [&by_rows, &by_words].map(|quantized| quantized.block(row / BLOCK_ROWS));
                for j in 0..SLICE_WORDS {
                    // SAFETY: the blocks have the row and the slice.
                    let [one, other] = unsafe {
                        [
                            rows.slice(slice, row % BLOCK_ROWS).cast::<i32>().add(j).read_unaligned(),
                            words.words(slice, row % BLOCK_ROWS).add(j * BLOCK_ROWS).read(),
                        ]
                    };
                    assert_eq!(one, other, "{dtype}: row {row}, slice {slice}, word {j}");
                }
            }
        }
    }
}
