//! The state of a model as `/v1/models` shows it.

use std::time::Instant;

use serde::Serialize;
use utoipa::ToSchema;

use super::registry::{Models, State};
use super::{KeepAlive, unix_time};

/// Whether a model is loaded, and what it takes.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ModelStatus {
    /// `unloaded`, `loading`, `ready` or `unloading`.
    pub(crate) state: &'static str,
    /// Loaded part of the weights, from 0 to 1, of a model that is being loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<f32>,
    /// Bytes that the model takes while it is loaded: weights, keys and values, and the memory of a step.
    memory_bytes: u64,
    /// Whether the model is loaded when a request needs it, and unloaded when others need its memory.
    on_demand: bool,
    /// Time at which the model is unloaded if no request uses it, in seconds since 1970; null if none is set.
    #[schema(required)]
    pub(crate) expires_at: Option<u64>,
    /// The device that computes. Only for keys with the right to metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// Requests that use the model now. Only for keys with the right to metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<usize>,
    /// Requests that wait until the model is loaded. Only for keys with the right to metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<usize>,
}

impl Models {
    /// Returns the state of a model. `sees_activity` tells whether the caller may see what other tenants do.
    pub(crate) fn status(&self, index: usize, sees_activity: bool) -> ModelStatus {
        let (entry, slots) = (&self.entries[index], self.lock());
        let slot = &slots[index];
        let (state, progress) = match slot.state {
            State::Unloaded => ("unloaded", None),
            State::Loading(part) => ("loading", Some(part)),
            State::Ready(_) => ("ready", None),
            State::Unloading => ("unloading", None),
        };
        let on_demand = !entry.is_fixed();
        let expires_at = match (slot.keep_alive, &slot.state) {
            (KeepAlive::For(time), State::Ready(_)) if on_demand => {
                let last_used = if slot.num_leases > 0 { Instant::now() } else { slot.last_used };
                Some(unix_time().saturating_add(time.saturating_sub(last_used.elapsed()).as_secs()))
            }
            _ => None,
        };
        ModelStatus {
            state,
            progress,
            memory_bytes: entry.memory_bytes,
            on_demand,
            expires_at,
            device: sees_activity.then(|| entry.device.clone()).filter(|device| !device.is_empty()),
            requests: sees_activity.then_some(slot.num_leases),
            waiting: sees_activity.then_some(slot.waiting.len()),
        }
    }
}

/// Formats a size in decimal units.
pub(crate) fn bytes_text(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e9 => format!("{:.2} GB", bytes / 1e9),
        bytes if bytes >= 1e6 => format!("{:.1} MB", bytes / 1e6),
        bytes => format!("{:.1} kB", bytes / 1e3),
    }
}
