//! The definition of a product with quantized weights, one value at a time. Every other instruction set gives the same
//! bits.
//!
//! For a row x, quantized to integers `q` with a scale `s` for each group of slices, and a column of W, group by group:
//!
//! ```text
//! part = f32(sum of w q) * d                       32 values with a float scale d
//! part = fma(f32(sum of q), m, part)               if they have a minimum m (Q4_1, Q5_1)
//!
//! part = f32(sum over slices of scale * sum of w q) * d            256 values, with integer scales of slices or halves
//! part = fma(f32(sum over slices of m * sum of q), -dmin, part)    if slices have minimums (Q4_K, Q5_K)
//!
//! result = fma(part, s, result)
//! ```
//! All sums before a conversion to f32 are exact integers.

use std::ops::Range;

use pellucid_tensor::quant::f16_to_f32;

use crate::matmul::PANEL_COLUMNS;
use crate::matmul::quantized::activations::RowBlock;
use crate::matmul::quantized::panel_layout::{Mins, PanelLayout, QuantizedFormat, SLICE_LEN, Scales};

/// One row of a block times one panel.
///
/// # Safety
/// The block has `num_units` units of F, and `row` is one of its rows; rows are ordered by row.
pub(crate) unsafe fn row_times_panel<F: QuantizedFormat>(
    panel: &[u8],
    num_units: usize,
    x: RowBlock<'_>,
    row: usize,
) -> [f32; PANEL_COLUMNS] {
    let layout = F::LAYOUT;
    let m = x.num_rows;
    let mut results = [0.0; PANEL_COLUMNS];
    for (u, unit) in panel.chunks_exact(layout.unit_bytes()).take(num_units).enumerate() {
        // SAFETY: by the layout in `activations`, these are entries of the row within the block's arrays.
        let slices = (0..layout.slices).map(|slice| unsafe {
            let at = u * layout.slices + slice;
            let quants = std::slice::from_raw_parts(x.slice(at, row), SLICE_LEN);
            (quants, *x.sums.add(at * m + row), *x.scales.add(at / layout.group * m + row))
        });
        let mut scaled = [0i32; PANEL_COLUMNS];
        let mut minimums = [0i32; PANEL_COLUMNS];
        for (slice, (quants, sum, scale)) in slices.enumerate() {
            let dot = |c: usize, numbers: Range<usize>| -> i32 {
                numbers.map(|k| integer(&layout, unit, slice, k, c) * i32::from(quants[k])).sum()
            };
            for c in 0..PANEL_COLUMNS {
                if layout.scaled_by_floats() {
                    let mut part = dot(c, 0..SLICE_LEN) as f32 * float_scale(&layout, unit, slice, c);
                    if layout.mins == Mins::Float {
                        part = sum.mul_add(half_at(unit, layout.min(slice), c), part);
                    }
                    results[c] = part.mul_add(scale, results[c]);
                    continue;
                }
                for half in 0..2 {
                    let numbers = half * SLICE_LEN / 2..(half + 1) * SLICE_LEN / 2;
                    scaled[c] += scale_of(&layout, unit, slice, half, c) * dot(c, numbers);
                }
                if layout.mins == Mins::PerSlice {
                    minimums[c] += i32::from(unit[layout.min(slice / 2 * 2) + 2 * c + slice % 2]) * sum as i32;
                }
                if slice + 1 == layout.slices {
                    let mut part = scaled[c] as f32 * half_at(unit, layout.head(), c);
                    if layout.mins == Mins::PerSlice {
                        part = (minimums[c] as f32).mul_add(-half_at(unit, layout.min_head(), c), part);
                    }
                    results[c] = part.mul_add(scale, results[c]);
                }
            }
        }
    }
    results
}

/// Value k of a slice of a column, with its offset subtracted.
fn integer(layout: &PanelLayout, unit: &[u8], slice: usize, k: usize, column: usize) -> i32 {
    let (j, lane) = (k / 4, 4 * column + k % 4);
    let low = &unit[layout.low(slice)..];
    let high = |j: usize| unit[layout.high(slice) + lane + 64 * j];
    if layout.bits == 8 {
        return i32::from(low[64 * j + lane] as i8);
    }
    let stored = low[64 * (j % 4) + lane] >> (4 * (j / 4)) & 0x0f;
    let stored = match layout.bits {
        4 => layout.integers.map_or(stored, |integers| integers[usize::from(stored)]),
        5 => stored | (high(0) >> j & 1) << 4,
        6 => stored | (high(j / 4) >> (2 * (j % 4)) & 3) << 4,
        _ => stored,
    };
    i32::from(stored) - layout.offset_shift.map_or(0, |shift| 1 << shift)
}

/// The float scale of a slice.
fn float_scale(layout: &PanelLayout, unit: &[u8], slice: usize, column: usize) -> f32 {
    let at = layout.scale(slice);
    match layout.scales {
        Scales::Single => {
            let bytes: &[u8; 4] = unit[at + 4 * column..][..4].try_into().expect("four bytes");
            f32::from_le_bytes(*bytes)
        }
        Scales::BrainFloat => f32::from_bits(u32::from(bits_at(unit, at, column)) << 16),
        _ => half_at(unit, at, column),
    }
}

/// The integer scale of a slice, or of half a slice.
fn scale_of(layout: &PanelLayout, unit: &[u8], slice: usize, half: usize, column: usize) -> i32 {
    let at = layout.scale(slice) + column;
    match layout.scales {
        Scales::PerHalfSlice => i32::from(unit[at + 16 * half] as i8),
        _ => i32::from(unit[at]),
    }
}

fn half_at(unit: &[u8], at: usize, column: usize) -> f32 {
    f16_to_f32(bits_at(unit, at, column))
}

fn bits_at(unit: &[u8], at: usize, column: usize) -> u16 {
    u16::from_le_bytes([unit[at + 2 * column], unit[at + 2 * column + 1]])
}
