//! Gauges and counters under vLLM's names, which inference gateways read.

use pellucid_engine::EngineStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::engine::kv_use;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct VllmLabels {
    pub(super) model_name: String,
}

/// Values of one model.
#[derive(Debug)]
pub(super) struct VllmValues {
    pub(super) labels: VllmLabels,
    pub(super) stats: EngineStats,
    pub(super) prompt: u64,
    pub(super) generated: u64,
}

/// Exports the values of the loaded models.
#[derive(Debug)]
pub(super) struct VllmCollector(pub(super) Vec<VllmValues>);

/// Name, help and value of a metric.
type Exported<V> = (&'static str, &'static str, fn(&VllmValues) -> V);

const GAUGES: [Exported<f64>; 4] = [
    ("vllm:num_requests_waiting", "As pellucid_requests_waiting", |one| one.stats.num_waiting as f64),
    ("vllm:num_requests_running", "As pellucid_sequences_running", |one| one.stats.num_running as f64),
    ("vllm:kv_cache_usage_perc", "As pellucid_kv_use_ratio: 1 is full", |one| kv_use(&one.stats)),
    ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc", |one| kv_use(&one.stats)),
];

const COUNTERS: [Exported<u64>; 6] = [
    ("vllm:prompt_tokens", "As pellucid_prompt_tokens", |one| one.prompt),
    ("vllm:generation_tokens", "As pellucid_generated_tokens", |one| one.generated),
    ("vllm:num_preemptions", "As pellucid_preemptions", |one| one.stats.preemptions),
    ("vllm:prefix_cache_hits", "As pellucid_prefix_hit_tokens, all scopes", |one| one.stats.cached_tokens),
    ("vllm:spec_decode_num_draft_tokens", "As pellucid_draft_tokens, all of them", |one| {
        one.stats.speculation.total().drafted
    }),
    ("vllm:spec_decode_num_accepted_tokens", "As pellucid_draft_tokens, accepted ones", |one| {
        one.stats.speculation.total().accepted
    }),
];

impl VllmCollector {
    /// Writes one metric of each model.
    fn encode_one<M: EncodeMetric>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        of: impl Fn(&VllmValues) -> M,
    ) -> Result<(), std::fmt::Error> {
        let Some(first) = self.0.first() else { return Ok(()) };
        let mut family = encoder.encode_descriptor(name, help, None, of(first).metric_type())?;
        self.0.iter().try_for_each(|one| of(one).encode(family.encode_family(&one.labels)?))
    }
}

impl Collector for VllmCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in GAUGES {
            self.encode_one(&mut encoder, (name, help), |one| ConstGauge::new(value(one)))?;
        }
        for (name, help, value) in COUNTERS {
            self.encode_one(&mut encoder, (name, help), |one| ConstCounter::new(value(one)))?;
        }
        Ok(())
    }
}
