//! Requests that wait for their model: in which order they get it, and when waiting is of no use.
//!
//! A request for a model that fits only when the requests of others have ended waits for them, at most its own time.
//! Every request that waits has a ticket. As long as such a request waits, the models in its way give no leases to
//! later requests, which wait too: otherwise a model that is always in use would never make way. A model that has been
//! loaded serves all requests that waited for it by then, so that models do not take turns with every request.
//!
//! The requests that wait for one model are bounded: all of them by `max_waiting`, those of one tenant by its share of
//! it, as in the queue of an engine. Their bodies are charged to the memory of clients, in which tenants have shares.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use pellucid_engine::scheduler::within_share;
use pellucid_engine::{Error as EngineError, TenantId};

use super::ServedModel;
use super::lease::{Lease, Served};
use super::memory::{Fit, Occupant, Use};
use super::registry::{Models, Slot, State};
use super::status::bytes_text;
use crate::http::error::{ApiError, RETRY_SOON_S};

/// Ticket of a request that finds its model loaded and did not wait: later than all that wait.
pub(super) const NO_TICKET: u64 = u64::MAX;

/// Counts a request as waiting for a model, until it is dropped.
struct Waiting<'a> {
    models: &'a Models,
    index: usize,
    ticket: u64,
    /// Failed attempts to load the model when the request came.
    num_failures: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut slots = self.models.lock();
        let slot = &mut slots[self.index];
        slot.waiting.remove(&self.ticket);
        slot.is_blocked &= !slot.waiting.is_empty();
        drop(slots);
        self.models.notify();
    }
}

impl Slot {
    /// Whether the request with this ticket waited when the model was loaded.
    fn admits(&self, ticket: u64) -> bool {
        ticket < self.admitted_before
    }

    /// Ticket of the request that has waited longest.
    fn first_ticket(&self) -> u64 {
        self.waiting.keys().next().copied().unwrap_or(NO_TICKET)
    }
}

impl Models {
    /// Waits until a model is loaded, which begins now if it has not, and returns a lease.
    pub(crate) async fn acquire<M: Served>(
        self: &Arc<Models>,
        index: usize,
        tenant: TenantId,
        timeout: Duration,
    ) -> Result<Lease<M>, ApiError> {
        let deadline = tokio::time::Instant::now() + timeout;
        let mut changed = self.changed.subscribe();
        let waiting = self.start_waiting(index, tenant)?;
        loop {
            changed.borrow_and_update();
            if let Some(lease) = self.attempt(&waiting)? {
                return Ok(lease);
            }
            if tokio::time::timeout_at(deadline, changed.changed()).await.is_err() {
                return Err(self.late(index, timeout));
            }
        }
    }

    /// Counts a request that waits, which protects the model from being unloaded for later requests.
    fn start_waiting(&self, index: usize, tenant: TenantId) -> Result<Waiting<'_>, ApiError> {
        let slot = &mut self.lock()[index];
        let own = slot.waiting.values().filter(|waiting| **waiting == tenant).count();
        let num_tenants = self.num_tenants.load(Ordering::SeqCst);
        if !within_share(own, slot.waiting.len(), self.max_waiting, 1, num_tenants) {
            return Err(EngineError::QueueFull.into());
        }
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        slot.waiting.insert(ticket, tenant);
        Ok(Waiting { models: self, index, ticket, num_failures: slot.num_failures })
    }

    /// Returns a lease if the model is loaded. Begins to load it if that is possible now, or says why it never will be.
    fn attempt<M: Served>(self: &Arc<Models>, waiting: &Waiting<'_>) -> Result<Option<Lease<M>>, ApiError> {
        let Waiting { index, ticket, num_failures, .. } = *waiting;
        let mut slots = self.lock();
        if let Some(lease) = self.lease_in(&mut slots, index, ticket) {
            return Ok(Some(lease));
        }
        let makes_way = self.makes_way(&slots, index, ticket);
        let slot = &slots[index];
        match &slot.state {
            State::Ready(open) if self.is_lost(index, slot, open) => self.start_unload(&mut slots, index, "stopped"),
            State::Ready(_) if makes_way => {}
            // A model of another purpose than its description says.
            State::Ready(_) => return Err(ApiError::internal()),
            State::Unloaded if slot.num_failures > num_failures => return Err(self.load_failed(index)),
            // An earlier request needs the memory.
            State::Unloaded if makes_way => {}
            State::Unloaded => match self.fit(&slots, index) {
                Fit::Unload(others) => {
                    self.start_load(&mut slots, index, &others)?;
                    slots[index].is_blocked = false;
                }
                Fit::Wait => {}
                Fit::No { bytes_in_use, num_in_use } if self.never_fits(index) => {
                    return Err(self.does_not_fit(index, bytes_in_use, num_in_use));
                }
                Fit::No { .. } => slots[index].is_blocked = true,
            },
            State::Loading(_) | State::Unloading => {}
        }
        Ok(None)
    }

    /// Returns what has to happen before a model can be loaded. Later requests for other models do not protect them.
    pub(super) fn fit(&self, slots: &[Slot], index: usize) -> Fit {
        let first = slots[index].first_ticket();
        self.bounds.fit(self.entries[index].memory_bytes, &self.occupants(slots, first))
    }

    /// Returns the models as a request with the given ticket sees them.
    fn occupants(&self, slots: &[Slot], ticket: u64) -> Vec<Occupant<Instant>> {
        let is_needed = |slot: &Slot| {
            let first = slot.first_ticket();
            slot.num_leases > 0 || first < ticket || slot.admits(first)
        };
        let occupant = |(entry, slot): (&ServedModel, &Slot)| Occupant {
            bytes: entry.memory_bytes,
            use_: match slot.state {
                State::Unloaded => Use::None,
                State::Unloading => Use::Leaving,
                State::Ready(_) if !entry.is_fixed() && !is_needed(slot) => Use::Idle(slot.last_used),
                State::Ready(_) | State::Loading(_) => Use::Busy,
            },
        };
        self.entries.iter().zip(slots).map(occupant).collect()
    }

    /// Returns the error of a request that waited too long.
    fn late(&self, index: usize, timeout: Duration) -> ApiError {
        let slots = self.lock();
        match self.fit(&slots, index) {
            Fit::No { bytes_in_use, num_in_use } if slots[index].is_blocked => {
                self.does_not_fit(index, bytes_in_use, num_in_use)
            }
            _ => {
                let name = &self.entries[index].id;
                let message = format!("the model {name:?} was not loaded within {} s", timeout.as_secs_f32());
                ApiError::unavailable("model_loading", message, RETRY_SOON_S)
            }
        }
    }

    fn load_failed(&self, index: usize) -> ApiError {
        let message =
            format!("the model {:?} cannot be loaded; the log of the server says why", self.entries[index].id);
        ApiError::unavailable("model_load_failed", message, 10).param("model")
    }

    /// Whether a model fits only if models were unloaded that never are.
    pub(super) fn never_fits(&self, index: usize) -> bool {
        !self.fits_beside(self.entries[index].memory_bytes, None)
    }

    /// Says of a model that never fits what it needs and what there is.
    pub(super) fn never_fits_text(&self, index: usize) -> String {
        let ServedModel { id, memory_bytes, .. } = &self.entries[index];
        let fixed = self.entries.iter().filter(|entry| entry.is_fixed());
        let (num_fixed, fixed_bytes) =
            fixed.fold((0, 0_u64), |(count, bytes), entry| (count + 1, bytes.saturating_add(entry.memory_bytes)));
        let needed = bytes_text(*memory_bytes);
        let limits = match (self.bounds.max_bytes, self.bounds.max_loaded) {
            (Some(max), _) if fixed_bytes.saturating_add(*memory_bytes) > max => {
                format!("--max-memory allows {} for all models", bytes_text(max))
            }
            (_, max) => format!("--max-models allows {} loaded models", max.unwrap_or(usize::MAX)),
        };
        let taken = match num_fixed {
            0 => String::new(),
            _ => format!(", of which models that stay loaded take {}", bytes_text(fixed_bytes)),
        };
        format!("the model {id:?} can never be loaded: it needs {needed} of memory, and {limits}{taken}")
    }

    fn does_not_fit(&self, index: usize, bytes_in_use: u64, num_in_use: usize) -> ApiError {
        let ServedModel { id, memory_bytes, .. } = &self.entries[index];
        if self.never_fits(index) {
            // Without `Retry-After`: it would not help.
            let message = self.never_fits_text(index);
            return ApiError::refused(StatusCode::SERVICE_UNAVAILABLE, "model_does_not_fit", message).param("model");
        }
        let message = match self.bounds.max_bytes {
            Some(max) if bytes_in_use.saturating_add(*memory_bytes) > max => format!(
                "the model {id:?} needs {} of memory, but of the {} for all models, {} are in use by models that \
                 cannot be unloaded now",
                bytes_text(*memory_bytes),
                bytes_text(max),
                bytes_text(bytes_in_use)
            ),
            _ => format!(
                "the model {id:?} cannot be loaded now: at most {} models may be loaded, and {num_in_use} are in use",
                self.bounds.max_loaded.unwrap_or(usize::MAX)
            ),
        };
        ApiError::unavailable("model_does_not_fit", message, RETRY_SOON_S).param("model")
    }

    /// Whether a model is not for the request with this ticket, because an earlier request waits for a model that fits
    /// only when this one is unloaded.
    pub(super) fn makes_way(&self, slots: &[Slot], index: usize, ticket: u64) -> bool {
        let is_earlier = |slot: &Slot| slot.is_blocked && slot.first_ticket() < ticket;
        let is_due = slots[index].admits(ticket) || self.entries[index].is_fixed();
        if is_due || !slots.iter().any(is_earlier) {
            return false;
        }
        let mut blocked = slots.iter().zip(self.entries.iter()).filter(|(slot, _)| is_earlier(slot));
        blocked.any(|(_, entry)| {
            let is_in_way = |index: usize| !self.fits_beside(entry.memory_bytes, Some(index));
            let in_use = |index: &usize| slots[*index].num_leases > 0 && !self.entries[*index].is_fixed();
            // If none of the models alone is in the way, all of them are.
            is_in_way(index) || !(0..slots.len()).filter(in_use).any(is_in_way)
        })
    }

    /// Whether a model of this size fits if only the fixed models, and the one with the index `other`, stay loaded.
    fn fits_beside(&self, bytes: u64, other: Option<usize>) -> bool {
        let stays = |(index, entry): &(usize, &ServedModel)| entry.is_fixed() || Some(*index) == other;
        let stay = self.entries.iter().enumerate().filter(stays).map(|(_, entry)| entry.memory_bytes);
        let (sum, count) = stay.fold((bytes, 1), |(sum, count), bytes| (sum.saturating_add(bytes), count + 1));
        self.bounds.allow(sum, count)
    }
}
