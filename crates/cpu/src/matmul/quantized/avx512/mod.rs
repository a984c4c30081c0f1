//! Products with quantized weights by AVX-512 VNNI: `vpdpbusd` multiplies 64 bytes and adds them up by fours, sixteen columns at once.
//!
//! Up to sixteen rows, as in decoding: W is read once, from end to end, and unpacked on the way ([`one_block`]); bound: reading W, up to a few rows.
//! One row goes through several panels side by side: the machine's own prefetchers follow as many streams, each in its page, where they could
//! run ahead in one only. More rows: for each stretch of K two panels are unpacked, scales too, into the first-level cache and used for all rows
//! ([`many_blocks`], [`unpacked_panels`]); bound: arithmetic.

mod many_blocks;
mod one_block;
mod packed_panels;
mod unpack_register;
mod unpacked_panels;

pub(super) use unpack_register::{halves, integer, integers, min_pairs, scale_integers};

use crate::matmul::ProductPart;
use crate::matmul::quantized::activations::QuantizedRows;
use crate::matmul::quantized::panel_layout::QuantizedFormat;
use crate::matmul::result_tiles::ResultSink;
use crate::matmul::weight::PackedWeight;

/// Some panels of one weight, or of two that `join` makes one of, for all rows, written to the product's output; one block of rows goes through
/// them in the thread's direction.
///
/// # Safety
/// The machine has AVX-512 with VNNI, and rows and weights have the same number of units of F. No other thread writes these panels, and
/// the output is alive.
pub(in crate::matmul) unsafe fn rows_times_panels<F: QuantizedFormat, const WEIGHTS: usize>(
    part: ProductPart<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &QuantizedRows,
    join: impl Fn(&mut [f32], &[f32]),
) {
    let direction = part.direction;
    let sink = ResultSink { part, num_rows: rows.num_rows() };
    // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
    unsafe {
        sink.fill::<WEIGHTS>(
            |i, panels, blocks, results| {
                if rows.num_blocks() == 1 {
                    one_block::multiply::<F>(weights[i], panels, direction, rows, results);
                } else {
                    many_blocks::multiply::<F>(weights[i], panels, rows, blocks, results);
                }
            },
            join,
        );
    }
}
