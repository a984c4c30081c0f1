//! Metrics by model: the label that tells models apart, and which models are loaded.

use std::sync::{Arc, PoisonError, RwLock};

use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Histogram buckets in seconds, from a small model in the page cache to a large one from a slow disk.
const LOAD_TIMES: [f64; 12] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0];

/// The label `model`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ModelLabel {
    pub(super) model: String,
}

/// Labels of a series that has the label `model` only on servers with several models.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct WithModel<L> {
    pub(super) labels: L,
    pub(super) model: Option<String>,
}

impl<L: EncodeLabelSet> EncodeLabelSet for WithModel<L> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.labels.encode(encoder)?;
        match &self.model {
            Some(model) => ModelLabel { model: model.clone() }.encode(encoder),
            None => Ok(()),
        }
    }
}

/// A metric without labels on servers with one model, and one for each model on others.
#[derive(Debug, Clone)]
pub(super) enum PerModel<M, C = fn() -> M> {
    One(M),
    Each(Family<ModelLabel, M, C>),
}

impl<M: Clone, C: MetricConstructor<M>> PerModel<M, C> {
    /// Calls `visit` with the metric of a model.
    pub(super) fn with(&self, model: &str, visit: impl FnOnce(&M)) {
        match self {
            PerModel::One(metric) => visit(metric),
            PerModel::Each(family) => visit(&family.get_or_create(&ModelLabel { model: model.to_owned() })),
        }
    }
}

impl PerModel<Counter> {
    pub(super) fn counter(has_several: bool) -> PerModel<Counter> {
        match has_several {
            true => PerModel::Each(Family::new_with_constructor(Counter::default)),
            false => PerModel::One(Counter::default()),
        }
    }

    pub(super) fn register(&self, name: &str, help: &str, registry: &mut Registry) {
        match self {
            PerModel::One(counter) => registry.register(name, help, counter.clone()),
            PerModel::Each(family) => registry.register(name, help, family.clone()),
        }
    }
}

impl PerModel<Histogram> {
    pub(super) fn histogram(has_several: bool, new: fn() -> Histogram) -> PerModel<Histogram> {
        match has_several {
            true => PerModel::Each(Family::new_with_constructor(new)),
            false => PerModel::One(new()),
        }
    }

    pub(super) fn register(&self, name: &str, help: &str, registry: &mut Registry) {
        match self {
            PerModel::One(histogram) => registry.register(name, help, histogram.clone()),
            PerModel::Each(family) => registry.register(name, help, family.clone()),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LoadLabels {
    model: String,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnloadLabels {
    model: String,
    reason: &'static str,
}

/// Which models are loaded, how often, and how long that took.
#[derive(Debug, Clone)]
pub(crate) struct ModelMetrics {
    /// Ids of the models.
    names: Arc<RwLock<Vec<String>>>,
    num_loaded: Gauge,
    memory: Family<ModelLabel, Gauge>,
    loads: Family<LoadLabels, Counter>,
    unloads: Family<UnloadLabels, Counter>,
    load_time: Histogram,
}

impl ModelMetrics {
    pub(super) fn new(names: Vec<String>, registry: &mut Registry) -> ModelMetrics {
        let metrics = ModelMetrics {
            names: Arc::new(RwLock::new(names)),
            num_loaded: Gauge::default(),
            memory: Family::default(),
            loads: Family::default(),
            unloads: Family::default(),
            load_time: Histogram::new(LOAD_TIMES),
        };
        registry.register("models_loaded", "Models that are loaded", metrics.num_loaded.clone());
        let help = "Planned bytes of each loaded model: weights, keys and values, and the memory of a step";
        registry.register("model_memory_bytes", help, metrics.memory.clone());
        registry.register("model_loads", "Models loaded on demand, by result", metrics.loads.clone());
        registry.register("model_unloads", "Models unloaded, by reason", metrics.unloads.clone());
        registry.register("model_load_seconds", "Time to load a model on demand", metrics.load_time.clone());
        metrics
    }

    fn memory_of(&self, model: &str) -> impl std::ops::Deref<Target = Gauge> {
        self.memory.get_or_create(&ModelLabel { model: model.to_owned() })
    }

    /// Adds a model that is not loaded.
    pub(crate) fn add(&self, model: &str) {
        self.names.write().unwrap_or_else(PoisonError::into_inner).push(model.to_owned());
        self.set_loaded(model, None);
    }

    /// Returns the id of a model.
    pub(crate) fn name(&self, index: usize) -> Option<String> {
        self.names.read().unwrap_or_else(PoisonError::into_inner).get(index).cloned()
    }

    /// Records a model at start: its bytes if it is loaded.
    pub(crate) fn set_loaded(&self, model: &str, bytes: Option<u64>) {
        self.memory_of(model).set(bytes.unwrap_or(0) as i64);
        if bytes.is_some() {
            self.num_loaded.inc();
        }
    }

    /// Counts a model that was loaded, in which time and with which bytes; `None` if that failed.
    pub(crate) fn count_load(&self, model: &str, loaded: Option<(f64, u64)>) {
        let result = if loaded.is_some() { "completed" } else { "failed" };
        self.loads.get_or_create(&LoadLabels { model: model.to_owned(), result }).inc();
        if let Some((seconds, bytes)) = loaded {
            self.load_time.observe(seconds);
            self.set_loaded(model, Some(bytes));
        }
    }

    /// Counts a model that was unloaded.
    pub(crate) fn count_unload(&self, model: &str, reason: &'static str) {
        self.unloads.get_or_create(&UnloadLabels { model: model.to_owned(), reason }).inc();
        self.memory_of(model).set(0);
        self.num_loaded.dec();
    }
}
