//! The definition of a product with quantized weights, one number at a time. Every other instruction set gives these bits.
//!
//! For a row x, quantized to integers `q` with a scale `s` for each group of slices, and a column of W, group by group:
//!
//! ```text
//! part = 0
//! for each slice of the group (or half of one, where scales are of 16 numbers), ascending:
//!     part = fma(f32(sum of w q), d, part)            the sum is an exact integer; d is the slice's scale
//!     part = fma(f32(sum of q), m, part)              where slices have a minimum of their own (Q4_1, Q5_1)
//! part = fma(f32(sum over slices of m * sum of q), -dmin, part)    where a unit scales its minimums (Q4_K, Q5_K); exact integer
//! result = fma(part, s, result)
//! ```

use pellucid_tensor::quant::f16_to_f32;

use super::activations::RowBlock;
use super::packing::{COLUMNS, Layout, Mins, Packing, SLICE, Scales};

/// One row of a block times one panel.
///
/// # Safety
/// The block holds `num_units` units of F's grouping, and `row` is one of its rows.
pub(crate) unsafe fn row_times_panel<F: Packing>(
    panel: &[u8],
    num_units: usize,
    x: RowBlock,
    row: usize,
) -> [f32; COLUMNS] {
    let layout = F::LAYOUT;
    let m = x.num_rows;
    let mut results = [0.0; COLUMNS];
    for (u, unit) in panel.chunks_exact(layout.unit_bytes()).take(num_units).enumerate() {
        // SAFETY: by the layout of `activations`, these are entries of the row within the block's arrays.
        let slices = (0..layout.slices).map(|slice| unsafe {
            let at = u * layout.slices + slice;
            let quants = std::slice::from_raw_parts(x.quants.add((at * m + row) * SLICE), SLICE);
            (quants, *x.sums.add(at * m + row), *x.scales.add(at / layout.group * m + row))
        });
        let mut parts = [0.0f32; COLUMNS];
        let mut minimums = [0i32; COLUMNS];
        for (slice, (quants, sum, scale)) in slices.enumerate() {
            for c in 0..COLUMNS {
                let products =
                    quants.iter().enumerate().map(|(k, &q)| integer(&layout, unit, slice, k, c) * i32::from(q));
                if layout.scales == Scales::Halves {
                    let low: i32 = products.clone().take(16).sum();
                    parts[c] = (low as f32).mul_add(scale_of(&layout, unit, slice, 0, c), parts[c]);
                    let high: i32 = products.skip(16).sum();
                    parts[c] = (high as f32).mul_add(scale_of(&layout, unit, slice, 1, c), parts[c]);
                } else {
                    let dot: i32 = products.sum();
                    parts[c] = (dot as f32).mul_add(scale_of(&layout, unit, slice, 0, c), parts[c]);
                }
                match layout.mins {
                    Mins::None => {}
                    Mins::Plain => parts[c] = sum.mul_add(half_at(unit, layout.min(slice), c), parts[c]),
                    Mins::Slices => {
                        minimums[c] += i32::from(unit[layout.min(slice / 2 * 2) + 2 * c + slice % 2]) * sum as i32;
                    }
                }
            }
            if !(slice + 1).is_multiple_of(layout.group) {
                continue;
            }
            for c in 0..COLUMNS {
                if layout.mins == Mins::Slices {
                    parts[c] = (minimums[c] as f32).mul_add(-half_at(unit, layout.min_head(), c), parts[c]);
                }
                results[c] = parts[c].mul_add(scale, results[c]);
            }
            parts = [0.0; COLUMNS];
        }
    }
    results
}

/// The number k of a slice of a column, its offset subtracted.
fn integer(layout: &Layout, unit: &[u8], slice: usize, k: usize, column: usize) -> i32 {
    let (j, lane) = (k / 4, 4 * column + k % 4);
    let low = &unit[layout.low(slice)..];
    let high = |j: usize| unit[layout.high(slice) + lane + 64 * j];
    let stored = match layout.bits {
        8 => low[64 * j + lane],
        _ => low[64 * (j % 4) + lane] >> (4 * (j / 4)) & 0x0f,
    };
    let stored = match layout.bits {
        5 => stored | (high(0) >> j & 1) << 4,
        6 => stored | (high(j / 4) >> (2 * (j % 4)) & 3) << 4,
        _ => stored,
    };
    i32::from(stored) - layout.offset_shift.map_or(0, |shift| 1 << shift)
}

fn scale_of(layout: &Layout, unit: &[u8], slice: usize, half: usize, column: usize) -> f32 {
    let at = layout.scale(slice);
    match layout.scales {
        Scales::Plain => half_at(unit, at, column),
        Scales::Slices => half_at(unit, layout.head(), column) * f32::from(unit[at + column]),
        Scales::Halves => half_at(unit, layout.head(), column) * f32::from(unit[at + 16 * half + column] as i8),
    }
}

fn half_at(unit: &[u8], at: usize, column: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([unit[at + 2 * column], unit[at + 2 * column + 1]]))
}
