//! A lease: the right to use a loaded model. As long as one exists, the model is not unloaded.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use pellucid_generate::{LoadedEmbedder, LoadedModel};

use super::registry::Models;
use super::{KeepAlive, OpenModel, Purpose};

/// A kind of model that routes use.
pub(crate) trait Served: Sized + Send + Sync + 'static {
    const PURPOSE: Purpose;

    /// Returns the model if it is of this kind.
    fn of(model: &OpenModel) -> Option<&Arc<Self>>;
}

impl Served for LoadedModel {
    const PURPOSE: Purpose = Purpose::Text;

    fn of(model: &OpenModel) -> Option<&Arc<LoadedModel>> {
        match model {
            OpenModel::Text(model) => Some(model),
            OpenModel::Vectors(_) => None,
        }
    }
}

impl Served for LoadedEmbedder {
    const PURPOSE: Purpose = Purpose::Vectors;

    fn of(model: &OpenModel) -> Option<&Arc<LoadedEmbedder>> {
        match model {
            OpenModel::Vectors(model) => Some(model),
            OpenModel::Text(_) => None,
        }
    }
}

/// The right to use a loaded model, which a request holds until its reply is complete.
pub(crate) struct Lease<M: Served> {
    /// `None` only while the lease is dropped.
    model: Option<Arc<M>>,
    index: usize,
    models: Arc<Models>,
}

/// A lease of a model that generates text.
pub(crate) type TextLease = Lease<LoadedModel>;
/// A lease of a model that computes vectors.
pub(crate) type VectorLease = Lease<LoadedEmbedder>;

impl<M: Served> Lease<M> {
    /// Wraps a model for which the registry has counted a lease.
    pub(super) fn counted(model: Arc<M>, index: usize, models: &Arc<Models>) -> Lease<M> {
        Lease { model: Some(model), index, models: models.clone() }
    }

    /// Index of the model among those of the server.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Whether the model is loaded as long as the server runs.
    pub(crate) fn is_fixed(&self) -> bool {
        self.models.entries()[self.index].is_fixed()
    }

    /// Sets how long the model stays loaded after this request.
    pub(crate) fn set_keep_alive(&self, keep_alive: KeepAlive) {
        self.models.set_keep_alive(self.index, keep_alive);
    }
}

impl<M: Served> Deref for Lease<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.model.as_ref().expect("only `drop` takes the model")
    }
}

impl<M: Served> Clone for Lease<M> {
    fn clone(&self) -> Lease<M> {
        self.models.lease_again(self.index);
        Lease { model: self.model.clone(), index: self.index, models: self.models.clone() }
    }
}

impl<M: Served> Drop for Lease<M> {
    fn drop(&mut self) {
        // Before the lease is counted as returned: the registry then has the only reference to the model.
        self.model = None;
        self.models.give_back(self.index);
    }
}

impl<M: Served> fmt::Debug for Lease<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("index", &self.index).finish_non_exhaustive()
    }
}
