//! Counters, gauges and histograms, in the OpenMetrics format and in the text format of Prometheus. `docs/metrics.md`
//! lists every name.

mod engine;
pub(crate) mod models;
mod tenants;
mod text_format;
mod vllm;

use std::sync::Arc;
use std::time::Duration;

use pellucid_engine::EngineStats;
use pellucid_generate::{GuardCount, Summary};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use self::engine::EngineCollector;
use self::models::{ModelMetrics, PerModel, WithModel};
use self::tenants::TenantCollector;
pub(crate) use self::tenants::TenantMemory;
use self::vllm::{VllmCollector, VllmLabels, VllmValues};
use crate::connection::connections::Refusal;
use crate::kv_events::{KvEventCollector, KvEventPublisher};
use crate::log_losses::{LogLossCollector, LogLosses};
use crate::spans::exporter::{SpanCollector, SpanExporter};

/// Histogram buckets in seconds, from one token of a small model to a long reply.
const TIMES: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// All metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    times: Times,
    prompt_tokens: PerModel<Counter>,
    generated_tokens: PerModel<Counter>,
    requests: Family<WithModel<OutcomeLabels>, Counter>,
    http: Family<HttpLabels, Counter>,
    pub(crate) connections: Gauge,
    refused_connections: Family<ReasonLabels, Counter>,
    failed_keys: Family<ReasonLabels, Counter>,
    pub(crate) websockets: Gauge,
    websockets_closed: Family<ReasonLabels, Counter>,
    pub(crate) client_memory: Gauge,
    pub(crate) stored_bytes: Gauge,
    pub(crate) models: ModelMetrics,
    registry: Registry,
    /// Whether series have the label `model`.
    has_several: bool,
    has_vllm: bool,
}

/// The latencies that serving systems are compared by.
#[derive(Debug, Clone)]
struct Times {
    queue: PerModel<Histogram>,
    prefill: PerModel<Histogram>,
    first_token: PerModel<Histogram>,
    output_token: PerModel<Histogram>,
    end_to_end: PerModel<Histogram>,
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
    /// An operator cancelled the request.
    CancelledByOperator,
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
            Outcome::CancelledByOperator => "cancelled_by_operator",
            Outcome::Failed => "failed",
            Outcome::Limited => "limited",
        }
    }
}

impl Times {
    fn new(has_several: bool) -> Times {
        let histogram = || PerModel::histogram(has_several, || Histogram::new(TIMES));
        Times {
            queue: histogram(),
            prefill: histogram(),
            first_token: histogram(),
            output_token: histogram(),
            end_to_end: histogram(),
        }
    }

    fn observe(&self, model: &str, summary: &Summary) {
        let observe = |histograms: &PerModel<Histogram>, time: Option<Duration>| {
            if let Some(time) = time {
                histograms.with(model, |histogram| histogram.observe(time.as_secs_f64()));
            }
        };
        observe(&self.queue, Some(summary.queue_time));
        observe(&self.prefill, summary.prefill_time);
        observe(&self.first_token, summary.time_to_first_token);
        observe(&self.output_token, summary.time_per_output_token);
        observe(&self.end_to_end, Some(summary.total_time));
    }
}

impl Times {
    /// Registers the histograms a second time, under vLLM's names. A server with several models has them under the
    /// label `model` there too: `model_name`, which gateways read, is that of the first.
    fn register_as_vllm(&self, names: &[String], registry: &mut Registry) {
        let name = names.first().cloned().unwrap_or_default();
        let theirs = registry.sub_registry_with_labels([("model_name".into(), name.into())].into_iter());
        let aliases = [
            ("vllm:request_queue_time_seconds", "As pellucid_request_queue_seconds", &self.queue),
            ("vllm:request_prefill_time_seconds", "As pellucid_prefill_seconds", &self.prefill),
            ("vllm:time_to_first_token_seconds", "As pellucid_time_to_first_token_seconds", &self.first_token),
            ("vllm:time_per_output_token_seconds", "As pellucid_time_per_output_token_seconds", &self.output_token),
            ("vllm:e2e_request_latency_seconds", "As pellucid_request_seconds", &self.end_to_end),
        ];
        for (name, help, histogram) in aliases {
            histogram.register(name, help, theirs);
        }
    }
}

impl Metrics {
    /// Returns the metrics of a server with these models, to which others are added if it `may_grow`.
    pub(crate) fn new(names: Vec<String>, may_grow: bool, has_vllm: bool, log_losses: Arc<LogLosses>) -> Metrics {
        let has_several = names.len() > 1 || may_grow;
        let times = Times::new(has_several);
        let (prompt_tokens, generated_tokens) = (PerModel::counter(has_several), PerModel::counter(has_several));
        let (requests, http) = (Family::default(), Family::default());
        let (connections, client_memory, stored_bytes) = (Gauge::default(), Gauge::default(), Gauge::default());
        let mut registry = Registry::default();
        registry.register_collector(Box::new(LogLossCollector(log_losses)));
        let own = registry.sub_registry_with_prefix("pellucid");
        let help = "From submission to the first step that computes for the request";
        times.queue.register("request_queue_seconds", help, own);
        let help = "From the first step that computed for the request to its first token";
        times.prefill.register("prefill_seconds", help, own);
        times.first_token.register("time_to_first_token_seconds", "From submission to the first token", own);
        times.output_token.register("time_per_output_token_seconds", "Mean time between the tokens of a reply", own);
        times.end_to_end.register("request_seconds", "From submission to the end of the reply", own);
        prompt_tokens.register("prompt_tokens", "Tokens of prompts, cached ones included", own);
        generated_tokens.register("generated_tokens", "Tokens of replies", own);
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
        let models = ModelMetrics::new(names.clone(), own);
        if has_vllm {
            times.register_as_vllm(&names, &mut registry);
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
            models,
            registry,
            has_several,
            has_vllm,
        }
    }

    /// Adds the counts of published KV events.
    pub(crate) fn add_kv_events(&mut self, publisher: Arc<KvEventPublisher>) {
        self.registry.register_collector(Box::new(KvEventCollector(publisher)));
    }

    /// Adds the counts of exported spans.
    pub(crate) fn add_spans(&mut self, exporter: Arc<SpanExporter>) {
        self.registry.register_collector(Box::new(SpanCollector(exporter)));
    }

    /// Records a request that reached the engine of a model and has ended.
    pub(crate) fn observe(&self, tenant: &str, model: usize, outcome: Outcome, summary: &Summary) {
        self.count(tenant, Some(model), outcome);
        let name = &self.models.name(model).unwrap_or_default();
        self.prompt_tokens.with(name, |counter| _ = counter.inc_by(summary.prompt_tokens as u64));
        self.generated_tokens.with(name, |counter| _ = counter.inc_by(summary.completion_tokens as u64));
        // Replies that were cut short would make the latencies look shorter.
        if outcome == Outcome::Completed {
            self.times.observe(name, summary);
        }
    }

    /// Counts a request. A request that is refused before it is read has no model yet.
    pub(crate) fn count(&self, tenant: &str, model: Option<usize>, outcome: Outcome) {
        let labels = OutcomeLabels { tenant: tenant.to_owned(), outcome: outcome.name() };
        let model = model.and_then(|model| self.label(model));
        self.requests.get_or_create(&WithModel { labels, model }).inc();
    }

    /// Returns the name of a model if series need it as a label.
    fn label(&self, model: usize) -> Option<String> {
        self.models.name(model).filter(|_| self.has_several)
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
    pub(crate) fn render(
        &self,
        engines: &[(usize, EngineStats)],
        guards: &[GuardCount],
        memory: &[(usize, TenantMemory)],
        format: Format,
    ) -> String {
        let mut text = String::with_capacity(16 << 10);
        let mut registry = Registry::default();
        // A server whose only model has no engine, or is not loaded, shows zeros.
        let nothing = [(0, EngineStats::default())];
        let engines = if engines.is_empty() && !self.has_several { &nothing } else { engines };
        let labelled = engines.iter().map(|(model, stats)| (self.label(*model), *stats)).collect();
        registry.register_collector(Box::new(EngineCollector { engines: labelled, prefix: "pellucid_" }));
        if !memory.is_empty() {
            let labelled = memory.iter().map(|(model, memory)| (self.label(*model), memory.clone())).collect();
            registry.register_collector(Box::new(TenantCollector(labelled)));
        }
        if !guards.is_empty() {
            registry.register_collector(Box::new(GuardCollector(guards.to_vec())));
        }
        if self.has_vllm {
            registry.register_collector(Box::new(self.vllm(engines)));
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
    fn vllm(&self, engines: &[(usize, EngineStats)]) -> VllmCollector {
        let one = |(model, stats): &(usize, EngineStats)| {
            let name = self.models.name(*model).unwrap_or_default();
            let (mut prompt, mut generated) = (0, 0);
            self.prompt_tokens.with(&name, |counter| prompt = counter.get());
            self.generated_tokens.with(&name, |counter| generated = counter.get());
            VllmValues { labels: VllmLabels { model_name: name }, stats: *stats, prompt, generated }
        };
        VllmCollector(engines.iter().map(one).collect())
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
