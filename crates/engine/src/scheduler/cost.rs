//! Predicts the time of a step from the times of earlier steps.
//!
//! The time of a step has three parts. One depends on the number of rows: the weights are read once, and each row costs
//! arithmetic. It is measured at some row counts and interpolated, because it is far from a line: on a GPU a hundred
//! rows cost hardly more than one, on a CPU with tiles sixteen cost as much as two. Keys and values are read once for
//! each chunk, and compared with each row of it; these two parts are proportional to what is read and compared.
//!
//! After each step the difference between the measured and the predicted time is distributed over the parts, in the
//! proportion in which they were predicted. The model follows the machine within a dozen steps.

use std::ops::AddAssign;

/// Row counts at which the time is measured, if chunks of prompts are what varies.
const POWERS: &[usize] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
/// Row counts at which the time is measured, if single rows matter. Kernels compute rows in groups of 4, 8, 16 or more,
/// so the time may jump after a power of two.
const SINGLE_ROWS: &[usize] = &[
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 512, 1024,
    2048, 4096, 8192,
];
/// Weight of the newest measurement, once there were several.
const RATE: f64 = 0.2;
/// Weight of a measurement that is shorter than predicted, if the last one near its row count was far from its
/// prediction, or is `OLD` steps or more ago. Noise only lengthens steps, so the value was too high.
const RATE_DOWN: f64 = 0.6;
const OLD: u64 = 32;
/// Multiple or part of its predicted time from which on a measurement raises a doubt: a pause, or a change.
const FAR: f64 = 1.25;
/// Number of steps after which a value in doubt should be measured again.
const DOUBT_LASTS: u64 = 4;
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
#[derive(Debug, Clone)]
pub struct StepCosts {
    row_counts: &'static [usize],
    /// Whether row counts are so close that a line leads from each to the next. Between powers of two that were not
    /// measured it may not.
    distinguishes_rows: bool,
    /// For each row count its time, the number of steps near it, and the number of the last of them.
    by_rows: Vec<f64>,
    num_measured: Vec<u32>,
    last_measured: Vec<u64>,
    /// Whether the last step near it was far from its prediction.
    is_in_doubt: Vec<bool>,
    /// Number of measured steps.
    num_steps: u64,
    per_read: f64,
    per_compared: f64,
}

impl Default for StepCosts {
    fn default() -> StepCosts {
        StepCosts::at(POWERS, false)
    }
}

impl StepCosts {
    /// Returns costs that distinguish four rows from five.
    pub fn of_single_rows() -> StepCosts {
        StepCosts::at(SINGLE_ROWS, true)
    }

    fn at(row_counts: &'static [usize], distinguishes_rows: bool) -> StepCosts {
        let len = row_counts.len();
        StepCosts {
            row_counts,
            distinguishes_rows,
            by_rows: vec![0.0; len],
            num_measured: vec![0; len],
            last_measured: vec![0; len],
            is_in_doubt: vec![false; len],
            num_steps: 0,
            per_read: 0.0,
            per_compared: 0.0,
        }
    }

    /// Returns the two row counts around a number of rows, as indices, with their weights.
    fn knots(&self, num_rows: usize) -> [(usize, f64); 2] {
        let above = self.row_counts.partition_point(|&rows| rows <= num_rows.max(1));
        let low = above.clamp(1, self.row_counts.len() - 1) - 1;
        let (from, to) = (self.row_counts[low] as f64, self.row_counts[low + 1] as f64);
        // Beyond the last one the line goes on.
        let high = (num_rows.max(1) as f64 - from) / (to - from);
        [(low, 1.0 - high), (low + 1, high)]
    }

    /// Returns the relative time of a step with a row count, until it is measured.
    fn prior(&self, knot: usize) -> f64 {
        PRIOR_FIXED_ROWS + self.row_counts[knot] as f64
    }

    /// Returns the predicted time of a step in seconds; 0 before the first measurement.
    pub fn predict(&self, work: Work) -> f64 {
        let [rows, read, compared] = self.parts(work);
        rows + read + compared
    }

    fn parts(&self, work: Work) -> [f64; 3] {
        if work.num_rows == 0 {
            return [0.0; 3];
        }
        let rows: f64 = self.knots(work.num_rows).iter().map(|&(knot, weight)| weight * self.by_rows[knot]).sum();
        [rows, self.per_read * work.num_read as f64, self.per_compared * work.num_compared as f64]
    }

    /// Whether no step had about the number of rows of `work` yet.
    pub fn is_guess(&self, work: Work) -> bool {
        self.nearest(work).all(|knot| self.num_measured[knot] == 0)
    }

    /// Whether none of the last `num_steps` steps had about the number of rows of `work`, so that its predicted time is
    /// derived from other steps.
    pub fn is_stale(&self, work: Work, num_steps: u64) -> bool {
        self.is_guess(work) || self.nearest(work).all(|knot| self.num_steps - self.last_measured[knot] >= num_steps)
    }

    /// Whether the predicted time should be measured again: it is stale, or was far off a few steps ago.
    pub fn is_doubtful(&self, work: Work, num_steps: u64) -> bool {
        let doubts = self.nearest(work).any(|knot| self.is_in_doubt[knot]);
        self.is_stale(work, if doubts { num_steps.min(DOUBT_LASTS) } else { num_steps })
    }

    /// Returns the row counts, as indices, for which a step of this work is a measurement.
    fn nearest(&self, work: Work) -> impl Iterator<Item = usize> {
        self.knots(work.num_rows).into_iter().filter(|(_, weight)| *weight >= 0.5).map(|(knot, _)| knot)
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
            self.by_rows = (0..self.row_counts.len()).map(|knot| unit * self.prior(knot)).collect();
            (self.per_read, self.per_compared) = (unit / PRIOR_READ, unit / PRIOR_COMPARED);
        }
        self.num_steps += 1;
        let parts = self.parts(work);
        let predicted: f64 = parts.iter().sum();
        let around = self.knots(work.num_rows);
        // A prediction for a row count that was never measured is a guess, and a measurement may be far from it.
        let is_known = !self.is_guess(work);
        let counted = if is_known { seconds.min(MAX_SURPRISE * predicted) } else { seconds };
        let error = counted - predicted;
        let part_of_error = |part: f64| error * part / predicted;
        let norm: f64 = around.iter().map(|(_, weight)| weight * weight).sum();
        for (knot, weight) in around {
            let is_old = self.num_steps - self.last_measured[knot] >= OLD;
            let usual = if (is_old || self.is_in_doubt[knot]) && error < 0.0 { RATE_DOWN } else { RATE };
            // The first measurements count more: the prior is a guess.
            let rate = usual.max(1.0 / (1.0 + f64::from(self.num_measured[knot])));
            let change = rate * part_of_error(parts[0]) * weight / norm;
            self.by_rows[knot] = (self.by_rows[knot] + change).max(self.by_rows[knot] / 4.0);
            if weight >= 0.5 {
                self.num_measured[knot] += 1;
                self.last_measured[knot] = self.num_steps;
                self.is_in_doubt[knot] = !(predicted / FAR..=predicted * FAR).contains(&seconds);
            }
        }
        self.per_read += RATE * part_of_error(parts[1]) / work.num_read as f64;
        self.per_compared += RATE * part_of_error(parts[2]) / work.num_compared as f64;
        self.complete();
    }

    /// Returns the time of a row count that was not measured, derived from those that were; `None` if none was.
    fn derived(&self, knot: usize, is_measured: &[bool]) -> Option<f64> {
        let below = (0..knot).rev().find(|&other| is_measured[other]);
        let above = (knot..is_measured.len()).find(|&other| is_measured[other]);
        let rows = |knot: usize| self.row_counts[knot] as f64;
        if let (Some(below), Some(above), true) = (below, above, self.distinguishes_rows) {
            let part = (rows(knot) - rows(below)) / (rows(above) - rows(below));
            return Some(self.by_rows[below] + part * (self.by_rows[above] - self.by_rows[below]));
        }
        let nearest = below.into_iter().chain(above).min_by_key(|&other| other.abs_diff(knot))?;
        Some(self.by_rows[nearest] * self.prior(knot) / self.prior(nearest))
    }

    /// Derives the row counts that were not measured, and lets no step be cheaper than one with fewer rows.
    fn complete(&mut self) {
        let num_knots = self.row_counts.len();
        let is_measured: Vec<bool> = self.num_measured.iter().map(|&count| count > 0).collect();
        for knot in (0..num_knots).filter(|&knot| !is_measured[knot]) {
            if let Some(seconds) = self.derived(knot, &is_measured) {
                self.by_rows[knot] = seconds;
            }
        }
        // A measured value keeps what was measured; those that are derived give way.
        for knot in (0..num_knots - 1).rev().filter(|&knot| !is_measured[knot]) {
            self.by_rows[knot] = self.by_rows[knot].min(self.by_rows[knot + 1]);
        }
        for knot in 1..num_knots {
            self.by_rows[knot] = self.by_rows[knot].max(self.by_rows[knot - 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::simulated_machines::{cpu, gpu};

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
    fn the_first_measurement_replaces_a_guess() {
        let (mut costs, one, many) = (StepCosts::default(), Work::chunk(10, 1), Work::chunk(10, 256));
        costs.measure(many, 0.01);
        // Far from what 256 rows suggest: on a GPU one row takes almost as long.
        costs.measure(one, 0.008);
        assert!((costs.predict(one) / 0.008 - 1.0).abs() < 0.1, "{}", costs.predict(one));
        // A pause of the machine counts as at most four predicted times.
        costs.measure(one, 1.0);
        assert!(costs.predict(one) < 0.03, "{}", costs.predict(one));
    }

    #[test]
    fn a_shorter_time_is_believed_if_the_last_one_is_old() {
        let (one, many) = (Work::chunk(10, 1), Work::chunk(10, 256));
        let time_after = |num_others: usize, seconds: f64| {
            let mut costs = StepCosts::default();
            (0..20).for_each(|_| costs.measure(one, 0.002));
            (0..num_others).for_each(|_| costs.measure(many, 0.003));
            costs.measure(one, seconds);
            costs.predict(one)
        };
        assert!(time_after(64, 0.001) < 0.0015, "{}", time_after(64, 0.001));
        assert!(time_after(4, 0.001) > 0.0017, "a fresh value changes slowly: {}", time_after(4, 0.001));
        assert!(time_after(64, 0.004) < 0.0025, "a longer time may be noise: {}", time_after(64, 0.004));
    }

    #[test]
    fn a_time_that_is_far_from_its_prediction_is_soon_measured_again() {
        let (one, many) = (Work::chunk(10, 1), Work::chunk(10, 256));
        let mut costs = StepCosts::default();
        assert!(costs.is_guess(one));
        (0..20).for_each(|_| costs.measure(one, 0.001));
        (0..6).for_each(|_| costs.measure(many, 0.002));
        assert!(!costs.is_doubtful(one, 64) && !costs.is_guess(one));
        // Pauses, as when a GPU records steps of a new size.
        (0..4).for_each(|_| costs.measure(one, 0.003));
        let polluted = costs.predict(one);
        assert!(polluted > 0.0015 && !costs.is_doubtful(one, 64), "{polluted}");
        (0..4).for_each(|_| costs.measure(many, 0.002));
        assert!(costs.is_doubtful(one, 64) && !costs.is_stale(one, 64));
        costs.measure(one, 0.001);
        assert!(costs.predict(one) - 0.001 < 0.5 * (polluted - 0.001), "{} of {polluted}", costs.predict(one));
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
    fn a_jump_after_a_tile_is_seen_where_single_rows_matter() {
        let (mut costs, mut coarse) = (StepCosts::of_single_rows(), StepCosts::default());
        for round in 0..40 {
            for num_rows in [1, 8, 16, 17, 20, 32] {
                let work = Work::chunk(100 + round, num_rows);
                costs.measure(work, cpu(work));
                coarse.measure(work, cpu(work));
            }
        }
        let error = |costs: &StepCosts, num_rows| {
            let work = Work::chunk(120, num_rows);
            (costs.predict(work) / cpu(work) - 1.0).abs()
        };
        for num_rows in [16, 17, 20, 32] {
            assert!(error(&costs, num_rows) < 0.1, "{num_rows} rows: {}", error(&costs, num_rows));
        }
        assert!(error(&coarse, 17) > 0.1, "which powers of two cannot show");
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
