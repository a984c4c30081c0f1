//! Passes over a whole row of logits in blocks of 64, written so that the compiler vectorizes them.
//!
//! The largest logit of each block is an index: steps find their few candidates without reading the other blocks again.
//! Every sum of floats here has one fixed order, and all other sums are of integers, so results have the same bits on
//! every machine.

use crate::Error;
use crate::exponential::{LEAST_EXPONENT, exp_of_nonpositive};

pub(crate) const BLOCK: usize = 64;
/// Values summed or compared in parallel. The order of a sum depends on it.
const LANES: usize = 16;

/// Writes the largest logit of each block to `maxima`. NaN is an error with its token.
pub(crate) fn scan(logits: &[f32], maxima: &mut Vec<f32>) -> Result<(), Error> {
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    maxima.clear();
    let mut nan = [0u32; LANES];
    for block in blocks {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for row in block.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                lanes[lane] = if row[lane] > lanes[lane] { row[lane] } else { lanes[lane] };
                nan[lane] |= u32::from(row[lane].is_nan());
            }
        }
        maxima.push(largest_lane(lanes));
    }
    if !rest.is_empty() {
        maxima.push(largest(rest));
    }
    if nan != [0; LANES] || rest.iter().any(|logit| logit.is_nan()) {
        let token = logits.iter().position(|logit| logit.is_nan()).unwrap_or_default() as u32;
        return Err(Error::NotANumber { token });
    }
    Ok(())
}

/// Returns the largest of the logits; -inf for none.
pub(crate) fn largest(logits: &[f32]) -> f32 {
    let (rows, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for row in rows {
        for lane in 0..LANES {
            lanes[lane] = if row[lane] > lanes[lane] { row[lane] } else { lanes[lane] };
        }
    }
    rest.iter().fold(largest_lane(lanes), |best, &logit| if logit > best { logit } else { best })
}

#[inline(always)]
fn largest_lane(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] = if other > lanes[lane] { other } else { lanes[lane] };
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the number of logits of a block above `low` and at or below `high`.
#[inline(always)]
pub(crate) fn num_between(block: &[f32; BLOCK], low: f32, high: f32) -> usize {
    block.iter().map(|&logit| u32::from(logit > low) & u32::from(logit <= high)).sum::<u32>() as usize
}

/// Totals of a set. With the handicap h = (largest - logit) / T, a candidate's probability is e^-h / total.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Mass {
    /// Sum of e^-h: at least 1, because the most probable candidate has h = 0.
    pub(crate) total: f64,
    /// Sum of h e^-h.
    pub(crate) handicap: f64,
}

impl Mass {
    /// Returns the entropy in nats: the mean of -ln p = h + ln total.
    pub(crate) fn entropy(&self) -> f64 {
        libm::log(self.total) + self.handicap / self.total
    }

    /// Returns the mass for sums in [`UNITS`].
    pub(crate) fn of_units(total: u64, handicap: u64) -> Mass {
        Mass { total: total as f64 / UNITS, handicap: handicap as f64 / UNITS }
    }
}

/// Units in the weight of the most probable candidate: 2^40. Weights are summed as whole units, so that the order of
/// adding does not matter. [`MAX_VOCAB_SIZE`](crate::MAX_VOCAB_SIZE) tokens with that weight sum to less than 2^64.
pub(crate) const UNITS: f64 = 1_099_511_627_776.0;

/// Returns a weight in whole units, rounded.
#[inline(always)]
pub(crate) fn units(weight: f32) -> u64 {
    (f64::from(weight) * UNITS + 0.5) as u64
}

/// Returns the sums of e^-h and of h e^-h over a block, in [`UNITS`]. No logit may be above `largest`.
#[inline(always)]
fn block_units(block: &[f32; BLOCK], largest: f32, inverse_temperature: f32) -> (u64, u64) {
    let (mut weights, mut handicaps) = ([0.0f32; LANES], [0.0f32; LANES]);
    for row in block.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let x = (row[lane] - largest) * inverse_temperature;
            let weight = exp_of_nonpositive(x);
            weights[lane] += weight;
            // Clamped, because x may be -inf where the weight is 0, and 0 times -inf is NaN.
            handicaps[lane] -= weight * if x > LEAST_EXPONENT { x } else { LEAST_EXPONENT };
        }
    }
    (units(sum_lanes(weights)), units(sum_lanes(handicaps)))
}

/// Returns the mass of a row. Skips blocks in which every weight is 0.
pub(crate) fn mass(logits: &[f32], maxima: &[f32], largest: f32, inverse_temperature: f32) -> Mass {
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    let (mut total, mut handicap) = (0, 0);
    let mut add = |block: &[f32; BLOCK]| {
        let units = block_units(block, largest, inverse_temperature);
        total += units.0;
        handicap += units.1;
    };
    for (block, &highest) in blocks.iter().zip(maxima) {
        if (highest - largest) * inverse_temperature >= LEAST_EXPONENT {
            add(block);
        }
    }
    if !rest.is_empty() {
        add(&padded(rest.iter().copied()));
    }
    Mass::of_units(total, handicap)
}

/// Returns at most a block of logits, filled up with -inf.
pub(crate) fn padded(logits: impl Iterator<Item = f32>) -> [f32; BLOCK] {
    let mut block = [f32::NEG_INFINITY; BLOCK];
    for (slot, logit) in block.iter_mut().zip(logits) {
        *slot = logit;
    }
    block
}

#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the number of logits above -inf, and the sum and the sum of squares of their distances from `origin`.
pub(crate) fn moments(logits: &[f32], origin: f64) -> (usize, f64, f64) {
    const WIDTH: usize = 8;
    let (mut counts, mut sums, mut squares) = ([0u32; WIDTH], [0.0f64; WIDTH], [0.0f64; WIDTH]);
    let (rows, rest) = logits.as_chunks::<WIDTH>();
    let last: [f32; WIDTH] = std::array::from_fn(|lane| rest.get(lane).copied().unwrap_or(f32::NEG_INFINITY));
    for row in rows.iter().chain([&last]) {
        for lane in 0..WIDTH {
            let counted = row[lane] > f32::NEG_INFINITY;
            let distance = if counted { f64::from(row[lane]) - origin } else { 0.0 };
            counts[lane] += u32::from(counted);
            sums[lane] += distance;
            squares[lane] += distance * distance;
        }
    }
    (counts.iter().sum::<u32>() as usize, sums.iter().sum(), squares.iter().sum())
}
