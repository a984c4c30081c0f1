//! Lines of the log that were lost, by reason: the program that writes the log counts them, `/metrics` reports them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;

/// Counts lines of the log that were not written.
#[derive(Debug, Default)]
pub struct LogLosses {
    queue_full: AtomicU64,
    write_failed: AtomicU64,
}

impl LogLosses {
    /// Counts a line that found the queue of the log full.
    pub fn count_queue_full(&self) {
        self.queue_full.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts lines whose write failed.
    pub fn count_write_failed(&self, num_lines: u64) {
        self.write_failed.fetch_add(num_lines, Ordering::Relaxed);
    }

    /// Returns the lines lost for any reason.
    pub fn total(&self) -> u64 {
        self.queue_full.load(Ordering::Relaxed) + self.write_failed.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Exports the counts at the time of a scrape.
#[derive(Debug)]
pub(crate) struct LogLossCollector(pub(crate) Arc<LogLosses>);

impl Collector for LogLossCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = [("queue_full", &self.0.queue_full), ("write_failed", &self.0.write_failed)]
            .map(|(reason, count)| (reason, ConstCounter::new(count.load(Ordering::Relaxed))));
        let metric_type = counts[0].1.metric_type();
        let help = "Lines of the log that could not be written, by reason";
        let mut family = encoder.encode_descriptor("pellucid_log_lines_dropped", help, None, metric_type)?;
        for (reason, counter) in counts {
            counter.encode(family.encode_family(&ReasonLabels { reason })?)?;
        }
        Ok(())
    }
}
