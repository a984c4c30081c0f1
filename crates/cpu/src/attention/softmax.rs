//! The arithmetic of attention over one tile of positions: scores, their exponentials, and the weighted sum of values.
//!
//! Every result depends only on its own query, by operations in a fixed order: a score sums over the head from its
//! first value to its last, an output sums over positions in ascending order. The number of queries in a register tile
//! does not matter.

use std::ops::Range;

use super::decoded_tile::TILE;
use super::lanes::{LANES, Lanes};

/// Vectors across a tile of keys, and across the part of a value that is summed at a time.
const VECTORS: usize = TILE / LANES;

/// `scores[i][j] = sum_d queries[i][d] * keys[d][j]` for the queries of one register tile.
///
/// # Safety
/// Each of `queries` points to `head_size` floats, each of `scores` to `TILE`; `keys` has `head_size` rows of `TILE`.
#[inline(always)]
pub(super) unsafe fn score<L: Lanes, const R: usize>(
    lanes: L,
    queries: [*const f32; R],
    keys: &[f32],
    head_size: usize,
    scores: [*mut f32; R],
) {
    assert!(keys.len() >= head_size * TILE);
    let mut sums = [[lanes.splat(0.0); VECTORS]; R];
    for d in 0..head_size {
        // SAFETY: keys are in bounds by the assertion, queries as the caller guarantees.
        unsafe {
            let row = keys.as_ptr().add(d * TILE);
            let mut key = [lanes.splat(0.0); VECTORS];
            for v in 0..VECTORS {
                key[v] = lanes.load(row.add(v * LANES));
            }
            for r in 0..R {
                let query = lanes.splat(*queries[r].add(d));
                for v in 0..VECTORS {
                    sums[r][v] = lanes.multiply_add(query, key[v], sums[r][v]);
                }
            }
        }
    }
    for r in 0..R {
        for v in 0..VECTORS {
            // SAFETY: passed on from the caller.
            unsafe { lanes.store(sums[r][v], scores[r].add(v * LANES)) };
        }
    }
}

/// How scores become weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    pub(super) scale: f32,
    pub(super) soft_cap: Option<f32>,
}

impl Softmax {
    /// Replaces the scores of `visible` by the weights `exp(score - largest)`. Returns the largest score and the sum of
    /// the weights.
    ///
    /// Sums run in sixteen lanes by position modulo sixteen, then in the tree of [`crate::math::sum_lanes`].
    #[inline(always)]
    pub(super) fn weights<L: Lanes>(self, lanes: L, scores: &mut [f32], visible: Range<usize>) -> (f32, f32) {
        let vectors = visible.start / LANES * LANES..visible.end.next_multiple_of(LANES);
        let scores = &mut scores[vectors.clone()];
        let visible = visible.start - vectors.start..visible.end - vectors.start;
        // A positive scale keeps the order of scores, so the largest can be found before scaling.
        let mut scale = self.scale;
        if self.soft_cap.is_some() || scale <= 0.0 {
            self.scale_and_cap(lanes, scores);
            scale = 1.0;
        }
        for i in (0..visible.start).chain(visible.end..scores.len()) {
            scores[i] = f32::NEG_INFINITY;
        }
        let start = scores.as_mut_ptr();
        // Four independent maximums, none of which waits for another.
        let mut largest = [lanes.splat(f32::NEG_INFINITY); 4];
        let whole = scores.len() / (4 * LANES) * 4 * LANES;
        // SAFETY: `scores` is whole vectors, and `place` is the start of one.
        let at = |place: usize| unsafe { lanes.load(start.add(place)) };
        for place in (0..whole).step_by(4 * LANES) {
            for i in 0..4 {
                largest[i] = lanes.max(largest[i], at(place + i * LANES));
            }
        }
        let [a, b, c, d] = largest;
        let fours = lanes.max(lanes.max(a, b), lanes.max(c, d));
        let rest = (whole..scores.len()).step_by(LANES);
        let largest = lanes.largest(rest.fold(fours, |largest, place| lanes.max(largest, at(place))));
        // The difference is taken before scaling: the largest score then has a weight of exactly one, and no other has
        // more.
        let (factor, shift) = (lanes.splat(scale), lanes.splat(largest));
        let mut sum = lanes.splat(0.0);
        for i in (0..scores.len()).step_by(LANES) {
            // SAFETY: `scores` is whole vectors.
            unsafe {
                let weight = lanes.exp(lanes.multiply(lanes.subtract(lanes.load(start.add(i)), shift), factor));
                sum = lanes.add(sum, weight);
                lanes.store(weight, start.add(i));
            }
        }
        (largest * scale, crate::math::sum_lanes(lanes.to_array(sum)))
    }

    /// `scores = cap(scale * scores)`
    #[inline(always)]
    fn scale_and_cap<L: Lanes>(self, lanes: L, scores: &mut [f32]) {
        for i in (0..scores.len()).step_by(LANES) {
            let start = scores[i..].as_mut_ptr();
            // SAFETY: `scores` is whole vectors.
            unsafe {
                let mut score = lanes.multiply(lanes.load(start), lanes.splat(self.scale));
                if let Some(cap) = self.soft_cap {
                    score = capped(lanes, score, cap);
                }
                lanes.store(score, start);
            }
        }
    }
}

/// `cap * tanh(x / cap)`, with tanh y = 1 - 2 / (e^2y + 1).
#[inline(always)]
fn capped<L: Lanes>(lanes: L, x: L::Vector, cap: f32) -> L::Vector {
    let (one, two, cap) = (lanes.splat(1.0), lanes.splat(2.0), lanes.splat(cap));
    let power = lanes.exp(lanes.multiply(lanes.divide(x, cap), two));
    lanes.multiply(lanes.subtract(one, lanes.divide(two, lanes.add(power, one))), cap)
}

/// `sums[i] += sum_j weights[i][j] * values[j]` over the positions of `range`, for the queries of one register tile.
///
/// # Safety
/// Each of `weights` points to `TILE` floats, each of `sums` to `stride`, which is the length of a row of `values` and
/// whole vectors.
#[inline(always)]
pub(super) unsafe fn accumulate<L: Lanes, const R: usize>(
    lanes: L,
    weights: [*const f32; R],
    values: &[f32],
    range: Range<usize>,
    sums: [*mut f32; R],
) {
    let stride = values.len() / TILE;
    assert!(range.end <= TILE && stride.is_multiple_of(LANES));
    let mut column = 0;
    while column < stride {
        let values = &values[column..];
        // SAFETY: a row has at least the vectors that are taken; the caller guarantees weights and sums.
        unsafe {
            let sums = sums.map(|sums| sums.add(column));
            match (stride - column) / LANES {
                1 => accumulate_columns::<L, R, 1>(lanes, weights, values, stride, range.clone(), sums),
                2 => accumulate_columns::<L, R, 2>(lanes, weights, values, stride, range.clone(), sums),
                3 => accumulate_columns::<L, R, 3>(lanes, weights, values, stride, range.clone(), sums),
                _ => accumulate_columns::<L, R, VECTORS>(lanes, weights, values, stride, range.clone(), sums),
            }
        }
        column += VECTORS * LANES;
    }
}

/// # Safety
/// As for [`accumulate`], and a row of `values` has at least `C` vectors from its start.
#[inline(always)]
unsafe fn accumulate_columns<L: Lanes, const R: usize, const C: usize>(
    lanes: L,
    weights: [*const f32; R],
    values: &[f32],
    stride: usize,
    range: Range<usize>,
    sums: [*mut f32; R],
) {
    // SAFETY: passed on from the caller; row j of the tile begins at j * stride.
    unsafe {
        let mut totals = [[lanes.splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                totals[r][c] = lanes.load(sums[r].add(c * LANES));
            }
        }
        for j in range {
            let row = values.as_ptr().add(j * stride);
            let mut value = [lanes.splat(0.0); C];
            for c in 0..C {
                value[c] = lanes.load(row.add(c * LANES));
            }
            for r in 0..R {
                let weight = lanes.splat(*weights[r].add(j));
                for c in 0..C {
                    totals[r][c] = lanes.multiply_add(weight, value[c], totals[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                lanes.store(totals[r][c], sums[r].add(c * LANES));
            }
        }
    }
}
