//! Percentiles of repeated measurements.

use std::time::Duration;

use serde::Serialize;

/// Percentiles of durations, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Percentiles {
    pub(super) p50_ms: f64,
    pub(super) p90_ms: f64,
    pub(super) p99_ms: f64,
}

impl Percentiles {
    /// Returns `None` if there is no measurement.
    pub(super) fn of(durations: impl Iterator<Item = Duration>) -> Option<Percentiles> {
        let mut sorted: Vec<f64> = durations.map(|duration| duration.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |percent| percentile(&sorted, percent);
        Some(Percentiles { p50_ms: at(50.0)?, p90_ms: at(90.0)?, p99_ms: at(99.0)? })
    }
}

/// Returns the smallest measurement that at least `percent` percent of all do not exceed.
pub(super) fn percentile(sorted: &[f64], percent: f64) -> Option<f64> {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Returns the median, which ignores rounds that other load on the machine slowed down.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    percentile(values, 50.0).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measurements() {
        let sorted: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&sorted, 50.0), Some(100.0));
        assert_eq!(percentile(&sorted, 99.0), Some(198.0));
        assert_eq!(percentile(&[7.0], 99.0), Some(7.0));
        assert_eq!(percentile(&[], 50.0), None);
        let spread = Percentiles::of([3u64, 1, 2].map(Duration::from_millis).into_iter()).expect("three of them");
        assert_eq!(spread, Percentiles { p50_ms: 2.0, p90_ms: 3.0, p99_ms: 3.0 });
        assert_eq!(median(&mut [5.0, 1.0, 3.0]), 3.0);
    }
}
