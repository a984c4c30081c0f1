//! Predicts the time of a step from the times of earlier steps.
//!
//! The time of a step has three parts. One depends on the number of rows: the weights are read once, and each row costs
//! arithmetic. It is measured at powers of two and interpolated, because it is far from a line: on a GPU a hundred rows
//! cost hardly more than one, on a CPU with tiles sixteen cost as much as two. Keys and values are read once for each
//! chunk, and compared with each row of it; these two parts are proportional to what is read and compared.
//!
//! After each step the difference between the measured and the predicted time is distributed over the parts, in the
//! proportion in which they were predicted. The model follows the machine within a dozen steps.

use std::ops::AddAssign;

/// Number of row counts at which the time is measured: 1, 2, 4, ... 8192.
const NUM_KNOTS: usize = 14;
/// Weight of the newest measurement, once there were several.
const RATE: f64 = 0.2;
/// Rows that cost as much as reading the weights, until it is measured.
const PRIOR_FIXED_ROWS: f64 = 8.0;
/// Positions that cost as much to read as one row, and row-positions that cost as much to compare, until measured.
const PRIOR_READ: f64 = 1024.0;
const PRIOR_COMPARED: f64 = 4096.0;
/// A measurement counts as at most this multiple of its prediction: a pause of the whole machine teaches nothing.
const MAX_SURPRISE: f64 = 4.0;

/// The work of a step, or of a part of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Rows to compute.
    pub num_rows: usize,
    /// Positions whose keys and values are read, once for each chunk.
    pub num_read: u64,
    /// Pairs of a row and a position that attention compares.
    pub num_compared: u64,
}

impl Work {
    /// Returns the work of a chunk of `num_rows` tokens after `depth` tokens that are computed already.
    pub fn chunk(depth: usize, num_rows: usize) -> Work {
        let (depth, rows) = (depth as u64, num_rows as u64);
        Work { num_rows, num_read: depth + rows, num_compared: rows * depth + rows * (rows + 1) / 2 }
    }

    /// Returns the work of this and `other` in one step.
    #[must_use]
    pub fn and(mut self, other: Work) -> Work {
        self += other;
        self
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.num_rows += other.num_rows;
        self.num_read += other.num_read;
        self.num_compared += other.num_compared;
    }
}

/// The measured time of steps as a function of their work, in seconds.
#[derive(Debug, Clone, Default)]
pub struct StepCosts {
    by_rows: [f64; NUM_KNOTS],
    num_measured: [u32; NUM_KNOTS],
    /// Number of measured steps, and the number of the last one near each row count.
    num_steps: u64,
    last_measured: [u64; NUM_KNOTS],
    per_read: f64,
    per_compared: f64,
}

/// The two measured row counts around a number of rows, with their weights.
fn knots(num_rows: usize) -> [(usize, f64); 2] {
    let low = (num_rows.max(1).ilog2() as usize).min(NUM_KNOTS - 2);
    let width = (1usize << low) as f64;
    // Beyond the last one the line goes on.
    let high = (num_rows as f64 - width) / width;
    [(low, 1.0 - high), (low + 1, high)]
}

fn prior(knot: usize) -> f64 {
    PRIOR_FIXED_ROWS + (1usize << knot) as f64
}

impl StepCosts {
    /// Returns the predicted time of a step in seconds; 0 before the first measurement.
    pub fn predict(&self, work: Work) -> f64 {
        let [rows, read, compared] = self.parts(work);
        rows + read + compared
    }

    fn parts(&self, work: Work) -> [f64; 3] {
        if work.num_rows == 0 {
            return [0.0; 3];
        }
        let rows: f64 = knots(work.num_rows).iter().map(|&(knot, weight)| weight * self.by_rows[knot]).sum();
        [rows, self.per_read * work.num_read as f64, self.per_compared * work.num_compared as f64]
    }

    /// Whether none of the last `num_steps` steps had about the number of rows of `work`, so that its predicted time is
    /// derived from other steps.
    pub fn is_stale(&self, work: Work, num_steps: u64) -> bool {
        let near = knots(work.num_rows).into_iter().filter(|(_, weight)| *weight >= 0.5);
        near.map(|(knot, _)| self.last_measured[knot]).all(|last| last == 0 || self.num_steps - last >= num_steps)
    }

    /// Learns from a step that took `seconds`.
    pub fn measure(&mut self, work: Work, seconds: f64) {
        if work.num_rows == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        if self.num_measured.iter().all(|&count| count == 0) {
            let units = PRIOR_FIXED_ROWS
                + work.num_rows as f64
                + work.num_read as f64 / PRIOR_READ
                + work.num_compared as f64 / PRIOR_COMPARED;
            let unit = seconds / units;
            self.by_rows = std::array::from_fn(|knot| unit * prior(knot));
            (self.per_read, self.per_compared) = (unit / PRIOR_READ, unit / PRIOR_COMPARED);
        }
        self.num_steps += 1;
        let parts = self.parts(work);
        let predicted: f64 = parts.iter().sum();
        let error = seconds.min(MAX_SURPRISE * predicted) - predicted;
        let part_of_error = |part: f64| error * part / predicted;
        let around = knots(work.num_rows);
        let norm: f64 = around.iter().map(|(_, weight)| weight * weight).sum();
        for (knot, weight) in around {
            // The first measurements count more: the prior is a guess.
            let rate = RATE.max(1.0 / (1.0 + f64::from(self.num_measured[knot])));
            let change = rate * part_of_error(parts[0]) * weight / norm;
            self.by_rows[knot] = (self.by_rows[knot] + change).max(self.by_rows[knot] / 4.0);
            if weight >= 0.5 {
                self.num_measured[knot] += 1;
                self.last_measured[knot] = self.num_steps;
            }
        }
        self.per_read += RATE * part_of_error(parts[1]) / work.num_read as f64;
        self.per_compared += RATE * part_of_error(parts[2]) / work.num_compared as f64;
        self.complete();
    }

    /// Derives the row counts that were not measured from the nearest that was, and lets no step be cheaper than one
    /// with fewer rows.
    fn complete(&mut self) {
        let is_measured = self.num_measured.map(|count| count > 0);
        for knot in 0..NUM_KNOTS {
            let nearest = (0..NUM_KNOTS).filter(|&other| is_measured[other]).min_by_key(|&other| other.abs_diff(knot));
            if let Some(nearest) = nearest.filter(|_| !is_measured[knot]) {
                self.by_rows[knot] = self.by_rows[nearest] * prior(knot) / prior(nearest);
            }
        }
        // A measured value keeps what was measured; those that are derived give way.
        for knot in (0..NUM_KNOTS - 1).rev().filter(|&knot| !is_measured[knot]) {
            self.by_rows[knot] = self.by_rows[knot].min(self.by_rows[knot + 1]);
        }
        for knot in 1..NUM_KNOTS {
            self.by_rows[knot] = self.by_rows[knot].max(self.by_rows[knot - 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A CPU: weights in 4 ms, rows of 0.6 ms, tiles of 16 rows, long contexts expensive.
    fn cpu(work: Work) -> f64 {
        let tiles = if work.num_rows > 1 { work.num_rows.div_ceil(16) as f64 * 16.0 } else { 1.0 };
        4e-3 + 6e-4 * tiles.min(work.num_rows as f64 * 3.0)
            + 1.1e-6 * work.num_read as f64
            + 2.3e-7 * work.num_compared as f64
    }

    /// A GPU: the first 128 rows are free.
    fn gpu(work: Work) -> f64 {
        8e-3 + 4e-5 * work.num_rows.saturating_sub(128) as f64 + 1e-8 * work.num_compared as f64
    }

    /// A prompt in chunks, its decode, and the decode of several sequences.
    fn train(costs: &mut StepCosts, machine: fn(Work) -> f64) {
        for round in 0..4 {
            for depth in (0..6000).step_by(256) {
                let work = Work::chunk(depth, 256);
                costs.measure(work, machine(work));
            }
            for depth in (10..3000).step_by(100) {
                for num_sequences in [1, 1, 4, 16] {
                    let mut work = Work::default();
                    (0..num_sequences).for_each(|_| work += Work::chunk(depth + round, 1));
                    costs.measure(work, machine(work));
                }
            }
        }
    }

    #[test]
    fn predictions_follow_measurements() {
        for (machine, tolerance) in [(cpu as fn(Work) -> f64, 0.4), (gpu, 0.4)] {
            let mut costs = StepCosts::default();
            train(&mut costs, machine);
            let chunk = Work::chunk;
            for work in [chunk(20, 1), chunk(2500, 1), chunk(0, 256), chunk(4000, 256)] {
                let (expected, found) = (machine(work), costs.predict(work));
                assert!((found / expected - 1.0).abs() < tolerance, "{work:?}: {found} for {expected}");
            }
        }
    }

    #[test]
    fn repeated_steps_are_predicted_exactly_and_a_change_is_followed() {
        let (mut costs, work) = (StepCosts::default(), Work::chunk(100, 5));
        assert_eq!(costs.predict(work), 0.0, "nothing is known yet");
        costs.measure(work, 0.01);
        assert!((costs.predict(work) - 0.01).abs() < 1e-9);
        (0..20).for_each(|_| costs.measure(work, 0.03));
        assert!((costs.predict(work) / 0.03 - 1.0).abs() < 0.1, "{}", costs.predict(work));
    }

    #[test]
    fn a_number_of_rows_that_was_not_measured_lately_is_stale() {
        let mut costs = StepCosts::default();
        let (one, many) = (Work::chunk(10, 1), Work::chunk(10, 16));
        assert!(costs.is_stale(one, 3), "nothing was measured");
        costs.measure(one, 0.01);
        assert!(!costs.is_stale(one, 3) && costs.is_stale(many, 3));
        (0..2).for_each(|_| costs.measure(many, 0.02));
        assert!(!costs.is_stale(one, 3) && !costs.is_stale(many, 3));
        costs.measure(many, 0.02);
        assert!(costs.is_stale(one, 3) && !costs.is_stale(many, 3));
    }

    #[test]
    fn predictions_grow_with_the_work_and_are_finite() {
        let mut costs = StepCosts::default();
        for i in 0..500usize {
            let work = Work::chunk(i * 37 % 5000, 1 + i * 7919 % 600);
            costs.measure(work, [0.001, 3.0, 0.02, f64::NAN, 0.0][i % 5]);
        }
        let mut last = 0.0;
        for rows in 1..20_000 {
            let found = costs.predict(Work::chunk(0, rows));
            assert!(found.is_finite() && found >= last - 1e-9, "{rows} rows: {found} after {last}");
            last = found;
        }
    }
}
