//! Products with quantized weights with AVX-512 VNNI: `vpdpbusd` multiplies 64 bytes and adds them by fours, for
//! sixteen columns at once.
//!
//! Up to sixteen rows, as in decode: W is read once, sequentially, and unpacked in registers ([`one_block`],
//! [`packed_panels`]). Up to a few rows, reading W is the bound. One row is multiplied with several panels at a time:
//! hardware prefetchers follow several streams, each within its page, and a single stream would leave them idle.
//!
//! More rows: K is cut into parts. For each part, two panels are unpacked, with their scales, into the first-level
//! cache and multiplied with all rows ([`many_blocks`], [`unpacked_panels`]). Arithmetic is the bound.

mod many_blocks;
mod one_block;
mod packed_panels;
mod unpack_register;
mod unpacked_panels;

pub(super) use unpack_register::{float_scales, halves, integer, integers, min_pairs, scale_integers};

use crate::matmul::ProductPart;
use crate::matmul::quantized::activations::{InputOrder, QuantizedRows};
use crate::matmul::quantized::panel_layout::QuantizedFormat;
use crate::matmul::result_tiles::ResultSink;
use crate::matmul::weight::PackedWeight;

/// Multiplies up to sixteen rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results. Panels are taken in the thread's direction.
///
/// # Safety
/// The machine has AVX-512 with VNNI. There is one block of rows, and rows and weights have the same number of units of
/// F. No other thread writes these panels of the output.
pub(in crate::matmul) unsafe fn one_block_times_panels<F: QuantizedFormat, const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &QuantizedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    assert_eq!(rows.num_blocks(), 1, "rows of one block");
    let direction = part.direction;
    let sink = ResultSink { part, num_rows: rows.num_rows() };
    // SAFETY: passed on from the caller; there is a tile of results for every panel.
    unsafe {
        sink.fill::<WEIGHTS>(
            |i, panels, _, results| one_block::multiply::<F>(weights[i], panels, direction, rows, results),
            join,
        );
    }
}

/// Multiplies any number of rows with some panels of one weight, or of two whose results `join` combines, and writes
/// the results.
///
/// # Safety
/// As for [`one_block_times_panels`], for any number of blocks; rows are ordered by words.
pub(in crate::matmul) unsafe fn many_blocks_times_panels<F: QuantizedFormat, const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &QuantizedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    assert_eq!(rows.order(), InputOrder::ByWord, "this kernel reads x by words");
    let sink = ResultSink { part, num_rows: rows.num_rows() };
    // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
    unsafe {
        sink.fill::<WEIGHTS>(
            |i, panels, blocks, results| many_blocks::multiply::<F>(weights[i], panels, rows, blocks, results),
            join,
        );
    }
}
