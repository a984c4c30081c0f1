//! Products with quantized weights by AVX-512 VNNI: `vpdpbusd` multiplies 64 bytes and adds them up by fours, sixteen columns at once.
//!
//! Up to sixteen rows, as in decoding: W is read once, from end to end, and unpacked on the way ([`few`]); bound: reading W, up to a few rows.
//! One row goes through several panels side by side: the machine's own prefetchers follow as many streams, each in its page, where they could
//! run ahead in one only. More rows: for each stretch of K two panels are unpacked, scales too, into the first-level cache and used for all rows
//! ([`many`], [`unpacked`]); bound: arithmetic.

mod few;
mod kernel;
mod many;
mod unpack;
mod unpacked;

pub(super) use unpack::{halves, integer, integers, min_pairs, scale_integers};

use super::Part;
use super::activations::Quantized;
use super::packing::Packing;
use super::results::Sink;
use super::weight::PackedWeight;

/// Some panels of one weight, or of two that `join` makes one of, for all rows, written to the product's output; one block of rows goes through
/// them in the thread's direction.
///
/// # Safety
/// The machine has AVX-512 with VNNI, and rows and weights have the same number of units of F. No other thread writes these panels, and
/// the output is alive.
pub(super) unsafe fn rows_times_panels<F: Packing, const WEIGHTS: usize>(
    part: Part<'_>,
    weights: [&PackedWeight; WEIGHTS],
    rows: &Quantized,
    join: impl Fn(&mut [f32], &[f32]),
) {
    let direction = part.direction;
    let sink = Sink { part, num_rows: rows.num_rows() };
    // SAFETY: passed on from the caller; there is a tile of results for every panel and block.
    unsafe {
        sink.fill::<WEIGHTS>(
            |i, panels, blocks, results| {
                if rows.num_blocks() == 1 {
                    few::multiply::<F>(weights[i], panels, direction, rows, results);
                } else {
                    many::multiply::<F>(weights[i], panels, rows, blocks, results);
                }
            },
            join,
        );
    }
}
