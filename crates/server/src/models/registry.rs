//! The registry of models: their states, who waits for them, and when they are loaded and unloaded.
//!
//! One lock guards all states, and no work is done under it. `changed` wakes those who wait for a state. A model takes
//! memory from the moment at which loading it begins until the thread that unloads it has dropped it; `memory::Bounds`
//! is asked before each load, so that the models together never take more than the operator allows.
//! `waiting` says who waits for which model.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pellucid_engine::{EngineStats, Liveness, TenantId};
use pellucid_generate::{GuardCount, LoadedEmbedder, LoadedModel};
use pellucid_tokenizer::ChatTemplate;
use tokio::sync::watch;

use super::entries::Entries;
use super::lease::{Lease, Served};
use super::loading::{self, Unloaded};
use super::memory::{Bounds, Fit};
use super::status::bytes_text;
use super::waiting::NO_TICKET;
use super::{FindModels, KeepAlive, ModelSource, OpenModel, ServedModel, ServedModels};
use crate::http::error::{ApiError, RETRY_SOON_S};
use crate::metrics::TenantMemory;
use crate::metrics::models::ModelMetrics;

/// Reason in the log for unloading a model whose time without requests is over.
const KEPT: &str = "keep_alive";

/// The models of a server with their states.
#[derive(Debug)]
pub(crate) struct Models {
    pub(super) entries: Entries,
    pub(super) finder: Option<Arc<dyn FindModels>>,
    /// Locked while models are looked for.
    pub(super) looking: Mutex<()>,
    pub(super) bounds: Bounds,
    pub(super) max_waiting: usize,
    pub(super) next_ticket: AtomicU64,
    keep_alive: KeepAlive,
    slots: Mutex<Vec<Slot>>,
    /// Notified after every change of a state.
    pub(super) changed: watch::Sender<()>,
    pub(super) num_tenants: AtomicUsize,
    pub(super) metrics: ModelMetrics,
    /// Time at which the server started, in seconds since 1970.
    pub(super) started: u64,
}

/// State of one model.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) state: State,
    /// Leases that requests hold.
    pub(super) num_leases: usize,
    /// Requests that wait for the model, by their tickets, with their tenants.
    pub(super) waiting: BTreeMap<u64, TenantId>,
    /// Whether those requests wait because other models are in use.
    pub(super) is_blocked: bool,
    /// Requests with tickets below this one waited when the model was loaded, and get it.
    pub(super) admitted_before: u64,
    pub(super) last_used: Instant,
    pub(super) keep_alive: KeepAlive,
    /// Number of attempts to load the model that failed.
    pub(super) num_failures: u64,
}

#[derive(Debug)]
pub(super) enum State {
    Unloaded,
    /// Loaded part of the weights, from 0 to 1.
    Loading(f32),
    Ready(OpenModel),
    Unloading,
}

impl Slot {
    fn is_used(&self) -> bool {
        self.num_leases > 0 || !self.waiting.is_empty()
    }
}

impl Models {
    pub(crate) fn new(served: ServedModels, metrics: ModelMetrics) -> Models {
        let ServedModels { models, max_memory_bytes, max_loaded, max_waiting, keep_alive, finder } = served;
        for model in &models {
            metrics.set_loaded(&model.id, if model.is_fixed() { Some(model.memory_bytes) } else { None });
        }
        Models {
            slots: Mutex::new(models.iter().map(|model| slot(model, keep_alive)).collect()),
            entries: Entries::new(models, finder.is_some()),
            finder,
            looking: Mutex::default(),
            bounds: Bounds { max_bytes: max_memory_bytes, max_loaded },
            max_waiting,
            next_ticket: AtomicU64::new(0),
            keep_alive,
            changed: watch::Sender::new(()),
            num_tenants: AtomicUsize::new(1),
            metrics,
            started: super::unix_time(),
        }
    }

    /// Returns the state of a model that is added.
    pub(super) fn slot(&self, model: &ServedModel) -> Slot {
        slot(model, self.keep_alive)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the chat template of a loaded model has taken long to render a short conversation.
    pub(crate) fn have_costly_template(&self) -> bool {
        let is_costly = |slot: &Slot| match &slot.state {
            State::Ready(OpenModel::Text(model)) => model.template.as_ref().is_some_and(ChatTemplate::is_costly),
            _ => false,
        };
        self.lock().iter().any(is_costly)
    }

    pub(super) fn notify(&self) {
        self.changed.send_replace(());
    }

    /// Time at which the server started, in seconds since 1970.
    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// The models, in the order in which they were given.
    pub(crate) fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Returns the model that generates text, if there is only one and it is loaded as long as the server runs.
    pub(crate) fn fixed_text(&self) -> Option<&Arc<LoadedModel>> {
        self.fixed()
    }

    /// Returns the model that computes vectors, if there is only one and it is loaded as long as the server runs.
    pub(crate) fn fixed_embedder(&self) -> Option<&Arc<LoadedEmbedder>> {
        self.fixed()
    }

    fn fixed<M: Served>(&self) -> Option<&Arc<M>> {
        let mut of_purpose = self.entries.iter().filter(|entry| entry.purpose == M::PURPOSE);
        match (of_purpose.next().map(|entry| &entry.source), of_purpose.next()) {
            (Some(ModelSource::Fixed(open)), None) => M::of(open),
            _ => None,
        }
    }

    /// Calls `visit` with the index of every loaded model and the model. The lock is held meanwhile.
    pub(crate) fn for_each_ready(&self, mut visit: impl FnMut(usize, &OpenModel)) {
        for (index, slot) in self.lock().iter().enumerate() {
            if let State::Ready(open) = &slot.state {
                visit(index, open);
            }
        }
    }

    /// Sets the number of tenants that may submit requests, for loaded models and for those that will be.
    pub(crate) fn set_num_tenants(&self, num_tenants: usize) {
        self.num_tenants.store(num_tenants, Ordering::SeqCst);
        self.for_each_ready(|_, open| open.set_num_tenants(num_tenants));
    }

    /// Returns the state of the loops that compute: stopped if that of a fixed model is, else that of the longest step.
    /// A model that can be loaded again is, when a request needs it.
    pub(crate) fn liveness(&self) -> Liveness {
        let mut longest = None;
        let mut has_stopped = false;
        self.for_each_ready(|index, open| match open.liveness() {
            Liveness::Stopped => has_stopped |= self.entries[index].is_fixed(),
            Liveness::Stepping(time) => longest = longest.max(Some(time)),
            Liveness::Idle => {}
        });
        if has_stopped { Liveness::Stopped } else { longest.map_or(Liveness::Idle, Liveness::Stepping) }
    }

    /// Returns the statistics of every loaded engine with its model's index.
    pub(crate) fn engine_stats(&self) -> Vec<(usize, EngineStats)> {
        let mut stats = Vec::new();
        self.for_each_ready(|index, open| {
            if let OpenModel::Text(model) = open {
                stats.push((index, model.engine.last_stats()));
            }
        });
        stats
    }

    /// Returns the KV memory of tenants in every loaded engine, with its model's index. Tenants have the names that
    /// `name_of` gives them.
    pub(crate) fn tenant_memory(&self, name_of: impl Fn(TenantId) -> Option<String>) -> Vec<(usize, TenantMemory)> {
        let mut found = Vec::new();
        self.for_each_ready(|index, open| {
            if let OpenModel::Text(model) = open {
                let bytes = model.engine.bytes_per_block() as u64;
                let named =
                    model.engine.last_usages().into_iter().filter_map(|(id, usage)| Some((name_of(id)?, usage)));
                found.extend(named.map(|(tenant, usage)| {
                    let [in_use, idle, reserved] =
                        [usage.in_use, usage.idle, usage.reserved].map(|blocks| blocks as u64 * bytes);
                    (index, TenantMemory { tenant, in_use, idle, reserved })
                }));
            }
        });
        found
    }

    /// Returns the verdicts of the guards of the loaded models; all models of a server have the same guards.
    pub(crate) fn guard_counts(&self) -> Vec<GuardCount> {
        let mut counts = Vec::new();
        self.for_each_ready(|_, open| {
            if let OpenModel::Text(model) = open
                && counts.is_empty()
            {
                counts = model.guards.counts();
            }
        });
        counts
    }

    /// Returns a lease of a model that is loaded; `None` if it has to be loaded first.
    pub(crate) fn lease_ready<M: Served>(self: &Arc<Models>, index: usize) -> Option<Lease<M>> {
        self.lease_in(&mut self.lock(), index, NO_TICKET)
    }

    pub(super) fn lease_in<M: Served>(
        self: &Arc<Models>,
        slots: &mut [Slot],
        index: usize,
        ticket: u64,
    ) -> Option<Lease<M>> {
        if self.makes_way(slots, index, ticket) {
            return None;
        }
        let slot = &mut slots[index];
        let State::Ready(open) = &slot.state else { return None };
        if self.is_lost(index, slot, open) {
            return None;
        }
        let model = M::of(open)?.clone();
        slot.num_leases += 1;
        slot.last_used = Instant::now();
        slot.keep_alive = self.keep_alive;
        Some(Lease::counted(model, index, self))
    }

    /// Whether the engine of a model has stopped, and loading the model again would start another one.
    pub(super) fn is_lost(&self, index: usize, slot: &Slot, open: &OpenModel) -> bool {
        slot.num_leases == 0 && !self.entries[index].is_fixed() && open.liveness() == Liveness::Stopped
    }

    /// Sets how long a model stays loaded after its requests.
    pub(super) fn set_keep_alive(&self, index: usize, keep_alive: KeepAlive) {
        self.lock()[index].keep_alive = keep_alive;
    }

    /// Counts one more lease of a model that has one.
    pub(super) fn lease_again(&self, index: usize) {
        self.lock()[index].num_leases += 1;
    }

    /// Counts a lease as returned. Unloads the model if it should not stay loaded.
    pub(super) fn give_back(self: &Arc<Models>, index: usize) {
        let mut slots = self.lock();
        let slot = &mut slots[index];
        slot.num_leases -= 1;
        slot.last_used = Instant::now();
        if slot.num_leases == 0 {
            self.unload_if_expired(&mut slots, index, Instant::now(), KEPT);
            drop(slots);
            self.notify();
        }
    }

    /// Begins to load a model on a thread of its own, which unloads `others` first.
    pub(super) fn start_load(
        self: &Arc<Models>,
        slots: &mut [Slot],
        index: usize,
        others: &[usize],
    ) -> Result<(), ApiError> {
        let others: Vec<Unloaded> = others.iter().filter_map(|other| take(slots, *other, "memory")).collect();
        let indexes: Vec<usize> = others.iter().map(|other| other.index).chain([index]).collect();
        slots[index].state = State::Loading(0.0);
        let models = self.clone();
        let started = std::thread::Builder::new().name("load".into()).spawn(move || {
            others.into_iter().for_each(|other| loading::unload(&models, other));
            loading::load(&models, index);
        });
        started.map(drop).map_err(|error| {
            tracing::warn!(%error, "the system has no thread to load a model");
            indexes.into_iter().for_each(|index| slots[index].state = State::Unloaded);
            ApiError::unavailable("no_thread", "the server is short of threads; try again later", RETRY_SOON_S)
        })
    }

    /// Begins to unload a model on a thread of its own: freeing gigabytes takes time. Does nothing to one that is not
    /// loaded.
    pub(super) fn start_unload(self: &Arc<Models>, slots: &mut [Slot], index: usize, reason: &'static str) {
        let Some(unloaded) = take(slots, index, reason) else { return };
        let models = self.clone();
        let started = std::thread::Builder::new().name("unload".into()).spawn(move || {
            loading::unload(&models, unloaded);
        });
        if started.is_err() {
            // The model was dropped with the thread's work.
            slots[index].state = State::Unloaded;
        }
    }

    /// Loads the models that fit, in their order, one after the other on a thread. All others are loaded on demand.
    pub(crate) fn load_at_start(self: &Arc<Models>) {
        let mut chosen = Vec::new();
        let mut slots = self.lock();
        for (index, entry) in self.entries.iter().enumerate().filter(|(_, entry)| !entry.is_fixed()) {
            let needed = bytes_text(entry.memory_bytes);
            match self.fit(&slots, index) {
                // A model that is not to stay loaded would be unloaded at once.
                Fit::Unload(others) if others.is_empty() && self.keep_alive != KeepAlive::UNLOAD => {
                    tracing::info!(model = entry.id, memory = needed, "loading this model");
                    slots[index].state = State::Loading(0.0);
                    chosen.push(index);
                }
                _ if self.never_fits(index) => tracing::warn!("{}", self.never_fits_text(index)),
                _ => tracing::info!(model = entry.id, memory = needed, "this model is loaded on demand"),
            }
        }
        drop(slots);
        let (models, indexes) = (self.clone(), chosen.clone());
        let load_all = move || indexes.into_iter().for_each(|index| loading::load(&models, index));
        if !chosen.is_empty() && std::thread::Builder::new().name("load".into()).spawn(load_all).is_err() {
            chosen.into_iter().for_each(|index| self.lock()[index].state = State::Unloaded);
        }
    }

    /// Records that a model is loaded, or that loading it failed.
    pub(super) fn finish_load(self: &Arc<Models>, index: usize, loaded: Option<OpenModel>) {
        let mut slots = self.lock();
        let slot = &mut slots[index];
        slot.last_used = Instant::now();
        slot.keep_alive = self.keep_alive;
        match loaded {
            Some(open) => {
                open.set_num_tenants(self.num_tenants.load(Ordering::SeqCst));
                slot.admitted_before = self.next_ticket.load(Ordering::Relaxed);
                slot.state = State::Ready(open);
            }
            None => {
                slot.state = State::Unloaded;
                slot.num_failures += 1;
            }
        }
        drop(slots);
        self.notify();
    }

    /// Unloads a model if it is idle and its time is over. Returns the time at which that will be.
    fn unload_if_expired(
        self: &Arc<Models>,
        slots: &mut [Slot],
        index: usize,
        now: Instant,
        reason: &'static str,
    ) -> Option<Instant> {
        let slot = &slots[index];
        let is_idle = matches!(slot.state, State::Ready(_)) && !slot.is_used();
        let KeepAlive::For(time) = slot.keep_alive else { return None };
        if !is_idle || self.entries[index].is_fixed() {
            return None;
        }
        let expires = slot.last_used.checked_add(time)?;
        if expires > now {
            return Some(expires);
        }
        self.start_unload(slots, index, reason);
        None
    }

    /// Unloads models whose time is over, as long as the server runs.
    pub(crate) async fn unload_expired(self: Arc<Models>) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let next = {
                let (mut slots, now) = (self.lock(), Instant::now());
                (0..slots.len()).filter_map(|index| self.unload_if_expired(&mut slots, index, now, KEPT)).min()
            };
            match next {
                Some(next) => drop(tokio::time::timeout_at(next.into(), changed.changed()).await),
                None => drop(changed.changed().await),
            }
        }
    }

    /// Unloads a model: now if it is idle, else when its requests have ended. Waits at most `timeout` for it.
    pub(crate) async fn unload(self: &Arc<Models>, index: usize, timeout: Duration) {
        let deadline = tokio::time::Instant::now() + timeout;
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            {
                let mut slots = self.lock();
                slots[index].keep_alive = KeepAlive::UNLOAD;
                self.unload_if_expired(&mut slots, index, Instant::now(), "requested");
                if !matches!(slots[index].state, State::Unloading) {
                    return;
                }
            }
            if tokio::time::timeout_at(deadline, changed.changed()).await.is_err() {
                return;
            }
        }
    }
}

/// Returns the state of a model at first.
fn slot(model: &ServedModel, keep_alive: KeepAlive) -> Slot {
    Slot {
        state: match &model.source {
            ModelSource::Fixed(open) => State::Ready(open.clone()),
            ModelSource::OnDemand(_) => State::Unloaded,
        },
        num_leases: 0,
        waiting: BTreeMap::new(),
        is_blocked: false,
        admitted_before: 0,
        last_used: Instant::now(),
        keep_alive,
        num_failures: 0,
    }
}

/// Takes a loaded model out of its slot, to unload it.
fn take(slots: &mut [Slot], index: usize, reason: &'static str) -> Option<Unloaded> {
    match std::mem::replace(&mut slots[index].state, State::Unloading) {
        State::Ready(model) => Some(Unloaded { index, model, reason }),
        other => {
            slots[index].state = other;
            None
        }
    }
}
