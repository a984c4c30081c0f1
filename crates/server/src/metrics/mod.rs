//! Counters, gauges and histograms, in the OpenMetrics format and in the text format of Prometheus. `docs/metrics.md`
//! lists every name.

mod text_format;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pellucid_engine::{DrafterKind, EngineStats};
use pellucid_generate::{GuardCount, Summary};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::connection::connections::Refusal;
use crate::log_losses::{LogLossCollector, LogLosses};

/// Histogram buckets in seconds, from one token of a small model to a long reply.
const TIMES: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// All metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    times: Times,
    prompt_tokens: Counter,
    generated_tokens: Counter,
    requests: Family<OutcomeLabels, Counter>,
    http: Family<HttpLabels, Counter>,
    pub(crate) connections: Gauge,
    refused_connections: Family<ReasonLabels, Counter>,
    failed_keys: Family<ReasonLabels, Counter>,
    pub(crate) websockets: Gauge,
    websockets_closed: Family<ReasonLabels, Counter>,
    pub(crate) client_memory: Gauge,
    pub(crate) stored_bytes: Gauge,
    registry: Registry,
    model: String,
    has_vllm: bool,
}

/// The latencies that serving systems are compared by.
#[derive(Debug, Clone)]
struct Times {
    queue: Histogram,
    first_token: Histogram,
    output_token: Histogram,
    end_to_end: Histogram,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    tenant: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HttpLabels {
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// How a request to the model ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Completed,
    /// The request's time limit ended it.
    TimedOut,
    /// The client disconnected or cancelled.
    Cancelled,
    Failed,
    /// Refused by a limit of its tenant or by a full queue.
    Limited,
}

impl Outcome {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Outcome::Completed => "completed",
            Outcome::TimedOut => "timed_out",
            Outcome::Cancelled => "cancelled",
            Outcome::Failed => "failed",
            Outcome::Limited => "limited",
        }
    }
}

impl Times {
    fn new() -> Times {
        let histogram = || Histogram::new(TIMES);
        Times { queue: histogram(), first_token: histogram(), output_token: histogram(), end_to_end: histogram() }
    }

    fn observe(&self, summary: &Summary) {
        self.queue.observe(summary.queue_time.as_secs_f64());
        if let Some(time) = summary.time_to_first_token {
            self.first_token.observe(time.as_secs_f64());
        }
        if let Some(time) = summary.time_per_output_token {
            self.output_token.observe(time.as_secs_f64());
        }
        self.end_to_end.observe(summary.total_time.as_secs_f64());
    }
}

impl Metrics {
    pub(crate) fn new(model: &str, has_vllm: bool, log_losses: Arc<LogLosses>) -> Metrics {
        let times = Times::new();
        let (prompt_tokens, generated_tokens) = (Counter::<u64, AtomicU64>::default(), Counter::default());
        let (requests, http) = (Family::default(), Family::default());
        let (connections, client_memory, stored_bytes) = (Gauge::default(), Gauge::default(), Gauge::default());
        let mut registry = Registry::default();
        registry.register_collector(Box::new(LogLossCollector(log_losses)));
        let own = registry.sub_registry_with_prefix("pellucid");
        own.register(
            "request_queue_seconds",
            "From submission to the first step that computes for the request",
            times.queue.clone(),
        );
        own.register("time_to_first_token_seconds", "From submission to the first token", times.first_token.clone());
        own.register(
            "time_per_output_token_seconds",
            "Mean time between the tokens of a reply",
            times.output_token.clone(),
        );
        own.register("request_seconds", "From submission to the end of the reply", times.end_to_end.clone());
        own.register("prompt_tokens", "Tokens of prompts, cached ones included", prompt_tokens.clone());
        own.register("generated_tokens", "Tokens of replies", generated_tokens.clone());
        own.register("requests", "Requests to the model, by tenant and outcome", requests.clone());
        own.register("http_requests", "Replies over HTTP, by route and status", http.clone());
        own.register("connections", "Open connections", connections.clone());
        let (refused_connections, failed_keys) = (Family::default(), Family::default());
        own.register(
            "connections_refused",
            "Connections that were only answered with a refusal",
            refused_connections.clone(),
        );
        own.register("failed_authentications", "Requests without a valid key", failed_keys.clone());
        let (websockets, websockets_closed) = (Gauge::default(), Family::default());
        own.register("websockets", "Open WebSockets", websockets.clone());
        own.register("websockets_closed", "WebSockets that were closed, by reason", websockets_closed.clone());
        let help = "Bytes held for clients: bodies, messages, and replies that are not read yet";
        own.register("client_memory_bytes", help, client_memory.clone());
        own.register("stored_response_bytes", "Bytes of stored responses", stored_bytes.clone());
        // The histograms are registered a second time, under vLLM's names.
        if has_vllm {
            let labels = [("model_name".into(), model.to_owned().into())].into_iter();
            let theirs = registry.sub_registry_with_labels(labels);
            let aliases = [
                ("vllm:request_queue_time_seconds", "As pellucid_request_queue_seconds", &times.queue),
                ("vllm:time_to_first_token_seconds", "As pellucid_time_to_first_token_seconds", &times.first_token),
                (
                    "vllm:time_per_output_token_seconds",
                    "As pellucid_time_per_output_token_seconds",
                    &times.output_token,
                ),
                ("vllm:e2e_request_latency_seconds", "As pellucid_request_seconds", &times.end_to_end),
            ];
            for (name, help, histogram) in aliases {
                theirs.register(name, help, histogram.clone());
            }
        }
        Metrics {
            times,
            prompt_tokens,
            generated_tokens,
            requests,
            http,
            connections,
            refused_connections,
            failed_keys,
            websockets,
            websockets_closed,
            client_memory,
            stored_bytes,
            registry,
            model: model.to_owned(),
            has_vllm,
        }
    }

    /// Records a request that reached the engine and has ended.
    pub(crate) fn observe(&self, tenant: &str, outcome: Outcome, summary: &Summary) {
        self.count(tenant, outcome);
        self.prompt_tokens.inc_by(summary.prompt_tokens as u64);
        self.generated_tokens.inc_by(summary.completion_tokens as u64);
        // Replies that were cut short would make the latencies look shorter.
        if outcome == Outcome::Completed {
            self.times.observe(summary);
        }
    }

    pub(crate) fn count(&self, tenant: &str, outcome: Outcome) {
        let labels = OutcomeLabels { tenant: tenant.to_owned(), outcome: outcome.name() };
        self.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn count_websocket(&self, reason: &'static str) {
        self.websockets_closed.get_or_create(&ReasonLabels { reason }).inc();
    }

    pub(crate) fn count_refused_connection(&self, refusal: Refusal) {
        let reason = match refusal {
            Refusal::Full => "full",
            Refusal::Address => "address",
        };
        self.refused_connections.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Counts a request whose key is `missing`, `wrong`, or not compared because its address is `throttled`.
    pub(crate) fn count_failed_key(&self, reason: &'static str) {
        self.failed_keys.get_or_create(&ReasonLabels { reason }).inc();
    }

    pub(crate) fn count_http(&self, route: &str, status: u16) {
        self.http.get_or_create(&HttpLabels { route: route.to_owned(), status }).inc();
    }

    /// Returns all metrics as text, those of the engine and of the guards included.
    pub(crate) fn render(&self, engine: &EngineStats, guards: &[GuardCount], format: Format) -> String {
        let mut text = String::with_capacity(16 << 10);
        let mut registry = Registry::default();
        registry.register_collector(Box::new(EngineCollector { stats: *engine, prefix: "pellucid_" }));
        if !guards.is_empty() {
            registry.register_collector(Box::new(GuardCollector(guards.to_vec())));
        }
        if self.has_vllm {
            registry.register_collector(Box::new(self.vllm(engine)));
        }
        let encoded = text::encode_registry(&mut text, &self.registry)
            .and_then(|()| text::encode_registry(&mut text, &registry))
            .and_then(|()| text::encode_eof(&mut text));
        debug_assert!(encoded.is_ok(), "writing to a string cannot fail");
        match format {
            Format::OpenMetrics => text,
            Format::Text => text_format::from_open_metrics(&text),
        }
    }

    /// Returns gauges and counters under vLLM's names, which inference gateways read.
    fn vllm(&self, engine: &EngineStats) -> VllmCollector {
        let (cache_use, drafts) = (kv_use(engine), engine.speculation.total());
        VllmCollector {
            labels: ModelLabels { model_name: self.model.clone() },
            gauges: [
                ("vllm:num_requests_waiting", "As pellucid_requests_waiting", engine.num_waiting as f64),
                ("vllm:num_requests_running", "As pellucid_sequences_running", engine.num_running as f64),
                ("vllm:kv_cache_usage_perc", "As pellucid_kv_use_ratio: 1 is full", cache_use),
                ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc", cache_use),
            ],
            counters: [
                ("vllm:prompt_tokens", "As pellucid_prompt_tokens", self.prompt_tokens.get()),
                ("vllm:generation_tokens", "As pellucid_generated_tokens", self.generated_tokens.get()),
                ("vllm:num_preemptions", "As pellucid_preemptions", engine.preemptions),
                ("vllm:prefix_cache_hits", "As pellucid_prefix_hit_tokens, all scopes", engine.cached_tokens),
                ("vllm:spec_decode_num_draft_tokens", "As pellucid_draft_tokens, all of them", drafts.drafted),
                ("vllm:spec_decode_num_accepted_tokens", "As pellucid_draft_tokens, accepted ones", drafts.accepted),
            ],
        }
    }
}

/// Formats of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus' text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model_name: String,
}

/// Exports name, help and value of metrics under vLLM's names.
#[derive(Debug)]
struct VllmCollector {
    labels: ModelLabels,
    gauges: [(&'static str, &'static str, f64); 4],
    counters: [(&'static str, &'static str, u64); 6],
}

impl Collector for VllmCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in self.gauges {
            let gauge = ConstGauge::new(value);
            let mut family = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(family.encode_family(&self.labels)?)?;
        }
        for (name, help, value) in self.counters {
            let counter = ConstCounter::new(value);
            let mut family = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(family.encode_family(&self.labels)?)?;
        }
        Ok(())
    }
}

/// Exports the verdicts of guards.
#[derive(Debug)]
struct GuardCollector(Vec<GuardCount>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GuardLabels {
    guard: &'static str,
    subject: &'static str,
    verdict: &'static str,
}

impl Collector for GuardCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Verdicts on prompts and replies, by guard; a guard that could not judge has failed";
        let kind = ConstCounter::new(0u64).metric_type();
        let mut family = encoder.encode_descriptor("pellucid_guard_verdicts", help, None, kind)?;
        for GuardCount { guard, kind, count } in &self.0 {
            let labels = GuardLabels { guard, subject: kind.subject(), verdict: kind.verdict() };
            ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Share of KV blocks that requests hold or have reserved. At 1, no request starts before another ends.
fn kv_use(stats: &EngineStats) -> f64 {
    (stats.blocks_in_use + stats.blocks_reserved) as f64 / stats.num_blocks.max(1) as f64
}

/// Exports the engine's statistics at the time of a scrape.
#[derive(Debug)]
struct EngineCollector {
    stats: EngineStats,
    prefix: &'static str,
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

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = &self.stats;
        let gauges: [(&str, &str, f64); 8] = [
            ("requests_waiting", "Requests in the queue", stats.num_waiting as f64),
            ("sequences_running", "Sequences in the batch", stats.num_running as f64),
            ("kv_blocks_in_use", "KV blocks that requests hold", stats.blocks_in_use as f64),
            ("kv_blocks_reserved", "KV blocks reserved for running requests", stats.blocks_reserved as f64),
            ("kv_blocks_idle", "KV blocks of the prefix cache that can be evicted", stats.blocks_idle as f64),
            ("kv_blocks", "KV blocks in all", stats.num_blocks as f64),
            ("kv_use_ratio", "Share of KV blocks in use or reserved", kv_use(stats)),
            ("step_seconds_mean", "Mean time of a step", stats.step_time.as_secs_f64() / stats.steps.max(1) as f64),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value);
            let name = format!("{}{name}", self.prefix);
            gauge.encode(encoder.encode_descriptor(&name, help, None, gauge.metric_type())?)?;
        }
        let counters: [(&str, &str, u64); 9] = [
            ("steps", "Steps of the engine", stats.steps),
            ("steps_ahead", "Steps launched before the preceding step had ended", stats.steps_ahead),
            ("discarded_tokens", "Tokens computed in steps launched ahead and then discarded", stats.tokens_discarded),
            (
                "computed_prompt_tokens",
                "Tokens computed in prefill, recomputation after preemption included",
                stats.prefill_tokens,
            ),
            ("computed_output_tokens", "Tokens computed in decode", stats.decode_tokens),
            ("preemptions", "Requests preempted and computed again", stats.preemptions),
            ("draft_errors", "Steps of the draft model that failed, which no reply notices", stats.draft_errors),
            ("engine_failures", "Requests that failed in the engine", stats.failed_requests),
            ("engine_cancels", "Requests cancelled by their reader", stats.cancelled_requests),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            let name = format!("{}{name}", self.prefix);
            counter.encode(encoder.encode_descriptor(&name, help, None, counter.metric_type())?)?;
        }
        let name = format!("{}prefix_hit_tokens", self.prefix);
        let own = ConstCounter::new(stats.cached_tokens - stats.shared_cached_tokens);
        let help = "Prompt tokens found in the prefix cache: the tenant's own, or of shared prefixes";
        let mut family = encoder.encode_descriptor(&name, help, None, own.metric_type())?;
        own.encode(family.encode_family(&ScopeLabels { scope: "own" })?)?;
        let shared = ConstCounter::new(stats.shared_cached_tokens);
        shared.encode(family.encode_family(&ScopeLabels { scope: "shared" })?)?;
        let help = "Tokens that a drafter proposed and the model checked, by drafter and result";
        let name = format!("{}draft_tokens", self.prefix);
        let mut family = encoder.encode_descriptor(&name, help, None, own.metric_type())?;
        for drafter in DrafterKind::ALL {
            let counts = stats.speculation.of(drafter);
            for (result, count) in [("accepted", counts.accepted), ("rejected", counts.rejected())] {
                let labels = DraftLabels { drafter: drafter.name(), result };
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
