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

const COUNTERS: [Exported<u64>; 8] = [
    ("vllm:prompt_tokens", "As pellucid_prompt_tokens", |one| one.prompt),
    ("vllm:generation_tokens", "As pellucid_generated_tokens", |one| one.generated),
    ("vllm:num_preemptions", "As pellucid_preemptions", |one| one.stats.preemptions),
    ("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache", |one| {
        one.stats.looked_up_tokens
    }),
    ("vllm:prefix_cache_hits", "As pellucid_prefix_hit_tokens, all scopes", |one| one.stats.cached_tokens),
    ("vllm:spec_decode_num_drafts", "Drafts that the model checked", |one| one.stats.num_drafts),
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

/// Labels of the metric that tells the sizes of the KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabels {
    model_name: String,
    block_size: usize,
    num_gpu_blocks: usize,
}

/// Labels of the metric that tells adapters (LoRA), of which there are none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AdapterLabels {
    model_name: String,
    max_lora: usize,
    running_lora_adapters: &'static str,
    waiting_lora_adapters: &'static str,
}

impl VllmCollector {
    /// Writes the metrics whose values are in their labels.
    fn encode_facts(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let one = ConstGauge::new(1i64);
        let help = "Positions of a block of KV memory, and number of blocks on the device";
        let mut family = encoder.encode_descriptor("vllm:cache_config_info", help, None, one.metric_type())?;
        for VllmValues { labels, stats, .. } in &self.0 {
            let (model_name, block_size) = (labels.model_name.clone(), stats.block_len);
            let labels = CacheLabels { model_name, block_size, num_gpu_blocks: stats.num_blocks };
            one.encode(family.encode_family(&labels)?)?;
        }
        let none = ConstGauge::new(0i64);
        let help = "Adapters of running and waiting requests; this server has none";
        let mut family = encoder.encode_descriptor("vllm:lora_requests_info", help, None, none.metric_type())?;
        for VllmValues { labels, .. } in &self.0 {
            let model_name = labels.model_name.clone();
            let labels =
                AdapterLabels { model_name, max_lora: 0, running_lora_adapters: "", waiting_lora_adapters: "" };
            none.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
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
        self.encode_facts(&mut encoder)
    }
}
