//! Models that a server gets while it runs: pulled ones, and new files of its folders.

use std::sync::Arc;
use std::time::Duration;

use super::registry::Models;
use super::status::bytes_text;
use super::{ModelSource, ServedModel};

/// Time between two looks for models that came without `/api/pull`.
const INTERVAL: Duration = Duration::from_secs(5);

impl Models {
    /// Serves the models that have come since the last call. Reads files: not for a thread that serves connections.
    pub(crate) fn look_for_models(&self) {
        let Some(finder) = &self.finder else { return };
        // One at a time, because two would find the same models.
        let _only = self.looking.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        finder.find_new().into_iter().for_each(|model| self.add(model));
    }

    /// Looks for models as long as the server runs, if it has a finder.
    pub(crate) async fn keep_looking(self: Arc<Models>) {
        while self.finder.is_some() {
            tokio::time::sleep(INTERVAL).await;
            let models = self.clone();
            // A look that panics must not end all later ones.
            let _ = tokio::task::spawn_blocking(move || models.look_for_models()).await;
        }
    }

    /// Adds a model that is loaded on demand.
    fn add(&self, model: ServedModel) {
        let is_taken = |name: &str| self.entries.iter().any(|entry| entry.names().any(|own| own == name));
        if let Some(name) = model.names().find(|name| is_taken(name)) {
            tracing::warn!(model = model.id, "not served: another model is called {name:?}");
            return;
        }
        if !self.entries.has_place() || !matches!(model.source, ModelSource::OnDemand(_)) {
            tracing::warn!(model = model.id, "not served: too many models were added; restart the server");
            return;
        }
        let (id, needed) = (model.id.clone(), bytes_text(model.memory_bytes));
        self.metrics.add(&id);
        let mut slots = self.lock();
        slots.push(self.slot(&model));
        self.entries.push(model);
        drop(slots);
        self.notify();
        tracing::info!(model = id, memory = needed, "added; this model is loaded on demand");
    }
}
