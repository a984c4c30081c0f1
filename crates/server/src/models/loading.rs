//! Loads and unloads models, on threads that do nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::registry::{Models, State};
use super::status::bytes_text;
use super::{ModelSource, OpenModel};

/// Part of the weights after which the log shows progress again.
const LOGGED_PART: f32 = 0.25;
/// Part of the weights after which `/v1/models` shows progress again.
const SHOWN_PART: f32 = 0.01;

/// A model that was taken out of its slot and still takes memory.
pub(super) struct Unloaded {
    pub(super) index: usize,
    pub(super) model: OpenModel,
    pub(super) reason: &'static str,
}

/// Drops a model and records that its memory is free.
pub(super) fn unload(models: &Models, unloaded: Unloaded) {
    let Unloaded { index, model, reason } = unloaded;
    // Waits for the engine's thread, which owns weights, keys and values.
    drop(model);
    models.lock()[index].state = State::Unloaded;
    let id = &models.entries[index].id;
    models.metrics.count_unload(id, reason);
    models.notify();
    tracing::info!(model = id, reason, "unloaded");
}

/// Loads a model whose state is `Loading`.
pub(super) fn load(models: &Arc<Models>, index: usize) {
    let entry = &models.entries[index];
    let ModelSource::OnDemand(source) = &entry.source else { return };
    let started = Instant::now();
    tracing::info!(model = entry.id, memory = bytes_text(entry.memory_bytes), "loading");
    let on_progress = progress(models.clone(), index);
    // A panic ends this load, and nothing else.
    let loaded = catch_unwind(AssertUnwindSafe(|| source.load(on_progress)));
    let loaded = loaded.unwrap_or_else(|_| Err("internal error: loading the model panicked".into()));
    let loaded = loaded.and_then(|open| match open.purpose() == entry.purpose {
        true => Ok(open),
        false => Err(format!("internal error: the model {}", open.purpose().does())),
    });
    let seconds = started.elapsed().as_secs_f64();
    match &loaded {
        Ok(_) => tracing::info!(model = entry.id, seconds = (seconds * 1e3).round() / 1e3, "ready"),
        Err(reason) => tracing::error!(model = entry.id, "the model cannot be loaded: {reason}"),
    }
    models.metrics.count_load(&entry.id, loaded.is_ok().then_some((seconds, entry.memory_bytes)));
    models.finish_load(index, loaded.ok());
}

/// Returns a function that records the loaded part of a model's weights, and writes it to the log now and then.
fn progress(models: Arc<Models>, index: usize) -> Box<dyn FnMut(f32) + Send> {
    let (mut shown, mut logged) = (0.0, 0.0);
    Box::new(move |part: f32| {
        if part >= shown + SHOWN_PART {
            shown = part;
            if let State::Loading(progress) = &mut models.lock()[index].state {
                *progress = part.clamp(0.0, 1.0);
            }
        }
        if part >= logged + LOGGED_PART && part < 1.0 {
            logged = part;
            tracing::info!(model = models.entries[index].id, "loading: {:.0} % of the weights", part * 100.0);
        }
    })
}
