//! Statistics of the engines at the time of a scrape.

use pellucid_engine::{DrafterKind, EngineStats, GAP_BOUNDS_S, GapHistogram};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::models::{ModelLabel, WithModel};

/// Share of KV blocks that requests hold or have reserved. At 1, no request starts before another ends.
pub(super) fn kv_use(stats: &EngineStats) -> f64 {
    (stats.blocks_in_use + stats.blocks_reserved) as f64 / stats.num_blocks.max(1) as f64
}

/// Exports the statistics of engines, each with the model that it has as a label, if there are several.
#[derive(Debug)]
pub(super) struct EngineCollector {
    pub(super) engines: Vec<(Option<String>, EngineStats)>,
    pub(super) prefix: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScopeLabels {
    scope: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DraftLabels {
    drafter: &'static str,
    result: &'static str,
}

/// A histogram of gaps, as the engine counted it.
struct GapMetric(GapHistogram);

impl EncodeMetric for GapMetric {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let bounds = GAP_BOUNDS_S.into_iter().chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.0.counts).collect();
        encoder.encode_histogram::<NoLabelSet>(self.0.sum.as_secs_f64(), self.0.count(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Name, help and value of a statistic.
type Statistic<V> = (&'static str, &'static str, fn(&EngineStats) -> V);

const GAUGES: [Statistic<f64>; 11] = [
    ("requests_waiting", "Requests in the queue", |stats| stats.num_waiting as f64),
    ("sequences_running", "Sequences in the batch", |stats| stats.num_running as f64),
    ("kv_blocks_in_use", "KV blocks that requests hold", |stats| stats.blocks_in_use as f64),
    ("kv_blocks_reserved", "KV blocks reserved for running requests", |stats| stats.blocks_reserved as f64),
    ("kv_blocks_idle", "KV blocks of the prefix cache that can be evicted", |stats| stats.blocks_idle as f64),
    (
        "kv_window_blocks_taken",
        "KV blocks of layers with sliding windows that are in use or kept in the prefix cache",
        |stats| stats.window_blocks_taken as f64,
    ),
    ("kv_window_blocks_kept", "KV blocks of layers with sliding windows that are kept in the prefix cache", |stats| {
        stats.window_blocks_kept as f64
    }),
    (
        "kv_window_blocks",
        "KV blocks of layers with sliding windows; 0 if they have the blocks of all layers",
        |stats| stats.num_window_blocks as f64,
    ),
    ("kv_blocks", "KV blocks in all", |stats| stats.num_blocks as f64),
    ("kv_use_ratio", "Share of KV blocks in use or reserved", kv_use),
    ("step_seconds_mean", "Mean time of a step", |stats| stats.step_time.as_secs_f64() / stats.steps.max(1) as f64),
];

const COUNTERS: [Statistic<u64>; 9] = [
    ("steps", "Steps of the engine", |stats| stats.steps),
    ("steps_ahead", "Steps launched before the preceding step had ended", |stats| stats.steps_ahead),
    ("discarded_tokens", "Tokens computed in steps launched ahead and then discarded", |stats| stats.tokens_discarded),
    ("computed_prompt_tokens", "Tokens computed in prefill, recomputation after preemption included", |stats| {
        stats.prefill_tokens
    }),
    ("computed_output_tokens", "Tokens computed in decode", |stats| stats.decode_tokens),
    ("preemptions", "Requests preempted and computed again", |stats| stats.preemptions),
    ("draft_errors", "Steps of the draft model that failed, which no reply notices", |stats| stats.draft_errors),
    ("engine_failures", "Requests that failed in the engine", |stats| stats.failed_requests),
    ("engine_cancels", "Requests cancelled by their reader", |stats| stats.cancelled_requests),
];

impl EngineCollector {
    /// Writes one metric of each engine.
    fn encode_one<M: EncodeMetric>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        of: impl Fn(&EngineStats) -> M,
    ) -> Result<(), std::fmt::Error> {
        let Some((_, first)) = self.engines.first() else { return Ok(()) };
        let name = format!("{}{name}", self.prefix);
        let mut family = encoder.encode_descriptor(&name, help, None, of(first).metric_type())?;
        for (model, stats) in &self.engines {
            match model {
                Some(model) => of(stats).encode(family.encode_family(&ModelLabel { model: model.clone() })?)?,
                None => return of(stats).encode(family),
            }
        }
        Ok(())
    }
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in GAUGES {
            self.encode_one(&mut encoder, (name, help), |stats| ConstGauge::new(value(stats)))?;
        }
        for (name, help, value) in COUNTERS {
            self.encode_one(&mut encoder, (name, help), |stats| ConstCounter::new(value(stats)))?;
        }
        if self.engines.is_empty() {
            return Ok(());
        }
        self.encode_one(&mut encoder, ("inter_token_seconds", "Gaps between the tokens of replies"), |stats| {
            GapMetric(stats.gaps)
        })?;
        let kind = ConstCounter::new(0u64).metric_type();
        let name = format!("{}prefix_hit_tokens", self.prefix);
        let help = "Prompt tokens found in the prefix cache: the tenant's own, or of shared prefixes";
        let mut family = encoder.encode_descriptor(&name, help, None, kind)?;
        for (model, stats) in &self.engines {
            let own = stats.cached_tokens - stats.shared_cached_tokens;
            for (scope, count) in [("own", own), ("shared", stats.shared_cached_tokens)] {
                let labels = WithModel { labels: ScopeLabels { scope }, model: model.clone() };
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Tokens that a drafter proposed and the model checked, by drafter and result";
        let name = format!("{}draft_tokens", self.prefix);
        let mut family = encoder.encode_descriptor(&name, help, None, kind)?;
        for (model, stats) in &self.engines {
            for drafter in DrafterKind::ALL {
                let counts = stats.speculation.of(drafter);
                for (result, count) in [("accepted", counts.accepted), ("rejected", counts.rejected())] {
                    let labels = DraftLabels { drafter: drafter.name(), result };
                    let labels = WithModel { labels, model: model.clone() };
                    ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }
}
