//! The models of a server: which there are, which are loaded, and who uses them.
//!
//! A request names its model; `choice` finds it, and `registry` returns a [`Lease`](lease::Lease), on which the request
//! computes. A model that is not loaded is loaded first: `memory` decides which others are unloaded for it, `loading`
//! does the work on a thread of its own. A model with a lease is never unloaded.
//!
//! `docs/models.md` describes the rules for operators.

mod additions;
pub(crate) mod choice;
mod entries;
mod keep_alive;
pub(crate) mod lease;
mod loading;
mod memory;
pub(crate) mod registry;
pub(crate) mod routes;
pub(crate) mod status;
mod waiting;

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pellucid_engine::Liveness;
use pellucid_generate::{LoadedEmbedder, LoadedModel, ModelDetails};

pub use keep_alive::KeepAlive;

/// Result that a model computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It generates text.
    Text,
    /// It computes vectors of texts.
    Vectors,
}

impl Purpose {
    /// Describes the purpose in errors.
    pub(crate) fn does(self) -> &'static str {
        match self {
            Purpose::Text => "generates text",
            Purpose::Vectors => "computes embeddings",
        }
    }
}

/// A model that is loaded.
#[derive(Debug, Clone)]
pub enum OpenModel {
    /// A model that generates text.
    Text(Arc<LoadedModel>),
    /// A model that computes vectors.
    Vectors(Arc<LoadedEmbedder>),
}

impl OpenModel {
    pub(crate) fn purpose(&self) -> Purpose {
        match self {
            OpenModel::Text(_) => Purpose::Text,
            OpenModel::Vectors(_) => Purpose::Vectors,
        }
    }

    pub(crate) fn liveness(&self) -> Liveness {
        match self {
            OpenModel::Text(model) => model.engine.liveness(),
            OpenModel::Vectors(model) => model.handle.liveness(),
        }
    }

    fn set_num_tenants(&self, num_tenants: usize) {
        match self {
            OpenModel::Text(model) => model.engine.num_tenants_setter()(num_tenants),
            OpenModel::Vectors(model) => model.handle.num_tenants_setter()(num_tenants),
        }
    }
}

/// Loads a model. The program implements it: this crate knows neither files nor devices.
pub trait LoadModel: fmt::Debug + Send + Sync {
    /// Loads the model, whose names must be those of its [`ServedModel`]. Calls `on_progress` with the loaded part of
    /// the weights, from 0 to 1. An error is written to the log, and clients are only told that there was one.
    fn load(&self, on_progress: Box<dyn FnMut(f32) + Send>) -> Result<OpenModel, String>;
}

/// Finds models that come while the server runs. The program implements it.
pub trait FindModels: fmt::Debug + Send + Sync {
    /// Returns the models that can be served and were not returned before. They must be loaded on demand.
    fn find_new(&self) -> Vec<ServedModel>;
}

/// Origin of a served model.
#[derive(Debug)]
pub enum ModelSource {
    /// It is loaded as long as the server runs.
    Fixed(OpenModel),
    /// It is loaded when it is needed and fits.
    OnDemand(Box<dyn LoadModel>),
}

/// A model of a server, and facts about it that are known before it is loaded.
#[derive(Debug)]
pub struct ServedModel {
    /// Name of the model, as replies use it.
    pub id: String,
    /// Further names by which requests may call it.
    pub aliases: Vec<String>,
    /// Result that it computes.
    pub purpose: Purpose,
    /// Bytes that it takes while it is loaded: weights, keys and values, and the memory of a step.
    pub memory_bytes: u64,
    /// The device that computes, in words.
    pub device: String,
    /// Facts about its files.
    pub details: ModelDetails,
    /// Maximum tokens of a prompt and its reply together, or of a text.
    pub context_len: usize,
    /// Whether it has a chat template.
    pub has_template: bool,
    /// Origin of the model.
    pub source: ModelSource,
}

impl ServedModel {
    /// Returns every name that requests may use, `id` first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id).chain(&self.aliases).map(String::as_str)
    }

    /// Whether it is loaded as long as the server runs.
    pub(crate) fn is_fixed(&self) -> bool {
        matches!(self.source, ModelSource::Fixed(_))
    }
}

impl From<LoadedModel> for ServedModel {
    fn from(model: LoadedModel) -> ServedModel {
        ServedModel {
            id: model.id.clone(),
            aliases: model.aliases.clone(),
            purpose: Purpose::Text,
            memory_bytes: model.details.num_bytes,
            device: String::new(),
            details: model.details.clone(),
            context_len: model.context_len,
            has_template: model.template.is_some(),
            source: ModelSource::Fixed(OpenModel::Text(Arc::new(model))),
        }
    }
}

impl From<LoadedEmbedder> for ServedModel {
    fn from(model: LoadedEmbedder) -> ServedModel {
        ServedModel {
            id: model.id.clone(),
            aliases: model.aliases.clone(),
            purpose: Purpose::Vectors,
            memory_bytes: 0,
            device: String::new(),
            details: ModelDetails::default(),
            context_len: model.info().context_len,
            has_template: false,
            source: ModelSource::Fixed(OpenModel::Vectors(Arc::new(model))),
        }
    }
}

/// The models of a server, and bounds on those that are loaded at the same time.
#[derive(Debug)]
pub struct ServedModels {
    /// The models. The first of a purpose answers requests that name none.
    pub models: Vec<ServedModel>,
    /// Maximum bytes of all loaded models together.
    pub max_memory_bytes: Option<u64>,
    /// Maximum number of loaded models.
    pub max_loaded: Option<usize>,
    /// Maximum requests that wait for a model to be loaded.
    pub max_waiting: usize,
    /// Time that an unused model stays loaded.
    pub keep_alive: KeepAlive,
    /// Finds models that come later; `None` if the models stay as they are.
    pub finder: Option<Arc<dyn FindModels>>,
}

impl ServedModels {
    /// Returns models without bounds.
    pub fn new(models: Vec<ServedModel>) -> ServedModels {
        let keep_alive = KeepAlive::Forever;
        ServedModels { models, max_memory_bytes: None, max_loaded: None, max_waiting: 256, keep_alive, finder: None }
    }
}

impl<M: Into<ServedModel>> From<M> for ServedModels {
    fn from(model: M) -> ServedModels {
        ServedModels::new(vec![model.into()])
    }
}

/// Returns the time in seconds since 1970.
fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
