//! Computes vectors of texts on a thread of its own. [`EmbeddingHandle`] submits requests; the loop joins the texts of
//! all requests into batches and answers each request when all of its texts are computed.
//!
//! There are no steps and no cache: a batch is one call of [`Embedder::embed`]. Of the texts that wait, a batch takes
//! turns between tenants ([`selection`]), so that one tenant's thousand texts do not delay another's one.

mod selection;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pellucid_model::{Embedder, EmbedderInfo, EmbeddingText};

use crate::queue::{Place, Queue};
use crate::{Error, Liveness, TenantId};
use selection::{Waiting, select};

/// Tokens of a batch, unless one text has more. Enough to keep a CPU busy, few enough that a request which arrives
/// meanwhile waits only for tens of milliseconds with a small model.
const BATCH_TOKENS: usize = 1024;

/// The tokens of a text, with those that the model expects before and after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingInput {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Index at which the second text of a pair begins; the number of ids if there is none.
    pub second_at: usize,
}

impl EmbeddingInput {
    /// One text, not a pair.
    pub fn new(ids: Vec<u32>) -> EmbeddingInput {
        EmbeddingInput { second_at: ids.len(), ids }
    }

    fn text(&self) -> EmbeddingText<'_> {
        EmbeddingText { ids: &self.ids, second_at: self.second_at }
    }
}

/// The vectors of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Embeddings {
    /// The vectors of all texts, in their order, one after the other; not normalised.
    pub values: Vec<f32>,
    /// Number of values of a vector.
    pub num_dimensions: usize,
    /// Time from the submission until the first text was computed.
    pub queue_time: Duration,
    /// Time from the submission until all vectors were there.
    pub total_time: Duration,
}

impl Embeddings {
    /// Returns the vector of each text.
    pub fn vectors(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.num_dimensions)
    }
}

/// Counters of an embedding loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EmbeddingStats {
    /// Requests that wait for their first text.
    pub num_waiting: usize,
    /// Requests whose texts are being computed.
    pub num_running: usize,
    /// Texts computed since the start.
    pub num_texts: u64,
    /// Tokens computed since the start.
    pub num_tokens: u64,
    /// Batches computed since the start.
    pub num_batches: u64,
}

type OnDone = Box<dyn FnOnce(Result<Embeddings, Error>) + Send>;

struct Job {
    tenant: TenantId,
    texts: Vec<EmbeddingInput>,
    /// Number of texts that are computed or in the current batch.
    num_taken: usize,
    values: Vec<f32>,
    on_done: OnDone,
    is_open: Arc<AtomicBool>,
    arrived: Instant,
    started: Option<Instant>,
    /// Held until the first text is computed.
    place: Option<Place>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_closed: bool,
    /// When the loop began its current batch; `None` while it waits.
    busy_since: Option<Instant>,
    is_stopped: bool,
    stats: EmbeddingStats,
}

struct SharedJobs {
    jobs: Mutex<Jobs>,
    changed: Condvar,
}

impl SharedJobs {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        // The jobs are consistent between any two operations of the loop.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Submits texts to a model that runs on its own thread. The thread stops when the handle is dropped.
pub struct EmbeddingHandle {
    shared: Arc<SharedJobs>,
    queue: Arc<Queue>,
    info: EmbedderInfo,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for EmbeddingHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddingHandle").field("info", &self.info).finish_non_exhaustive()
    }
}

/// A request whose vectors are not there yet. Dropping it cancels the request.
#[derive(Debug)]
pub struct EmbeddingTicket {
    is_open: Arc<AtomicBool>,
}

impl Drop for EmbeddingTicket {
    fn drop(&mut self) {
        self.is_open.store(false, Ordering::Relaxed);
    }
}

impl EmbeddingHandle {
    /// Starts the loop on a new thread. At most `max_waiting` requests may wait.
    pub fn start(embedder: Box<dyn Embedder>, max_waiting: usize) -> EmbeddingHandle {
        let shared = Arc::new(SharedJobs { jobs: Mutex::default(), changed: Condvar::new() });
        let (info, seen) = (embedder.info().clone(), shared.clone());
        let thread = std::thread::Builder::new()
            .name("embeddings".into())
            .spawn(move || Loop { embedder, shared: seen }.run())
            .expect("the operating system gives a thread");
        EmbeddingHandle { shared, queue: Queue::new(max_waiting), info, thread: Some(thread) }
    }

    /// Returns facts about the model.
    pub fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    /// Checks and queues a request; `on_done` gets its vectors, on the loop's thread, and must return soon. Never
    /// waits.
    pub fn submit(
        &self,
        tenant: TenantId,
        texts: Vec<EmbeddingInput>,
        on_done: impl FnOnce(Result<Embeddings, Error>) + Send + 'static,
    ) -> Result<EmbeddingTicket, Error> {
        for text in &texts {
            self.check(text)?;
        }
        let is_open = Arc::new(AtomicBool::new(true));
        if texts.is_empty() {
            let num_dimensions = self.info.num_dimensions;
            let (queue_time, total_time) = (Duration::ZERO, Duration::ZERO);
            on_done(Ok(Embeddings { values: Vec::new(), num_dimensions, queue_time, total_time }));
            return Ok(EmbeddingTicket { is_open });
        }
        let place = self.queue.take(&[tenant])?.pop();
        let job = Job {
            tenant,
            values: Vec::with_capacity(texts.len() * self.info.num_dimensions),
            texts,
            num_taken: 0,
            on_done: Box::new(on_done),
            is_open: is_open.clone(),
            arrived: Instant::now(),
            started: None,
            place,
        };
        let mut jobs = self.shared.lock();
        if jobs.is_stopped {
            return Err(Error::Stopped);
        }
        jobs.waiting.push_back(job);
        drop(jobs);
        self.shared.changed.notify_one();
        Ok(EmbeddingTicket { is_open })
    }

    /// Computes the vectors of texts and waits for them.
    pub fn embed(&self, tenant: TenantId, texts: Vec<EmbeddingInput>) -> Result<Embeddings, Error> {
        let (sender, vectors) = sync_channel(1);
        let ticket = self.submit(tenant, texts, move |result| _ = sender.send(result))?;
        let result = vectors.recv().map_err(|_| Error::Stopped)?;
        drop(ticket);
        result
    }

    fn check(&self, text: &EmbeddingInput) -> Result<(), Error> {
        use pellucid_model::Error as Model;
        self.info.check(&text.text()).map_err(|error| match error {
            Model::EmptyText => Error::EmptyPrompt,
            Model::PositionOutsideContext { context_len, .. } => {
                Error::TextTooLong { text: text.ids.len(), context: context_len }
            }
            Model::IdOutsideVocabulary { id, vocab_size, .. } => Error::IdOutsideVocabulary { id, vocab_size },
            other => other.into(),
        })
    }

    /// Returns a function that sets the number of tenants that may submit requests, as
    /// [`EngineHandle::num_tenants_setter`](crate::EngineHandle::num_tenants_setter) does.
    pub fn num_tenants_setter(&self) -> impl Fn(usize) + Send + Sync + 'static {
        let queue = self.queue.clone();
        move |num_tenants| queue.set_num_tenants(num_tenants)
    }

    /// Returns the counters. Never waits for a batch.
    pub fn stats(&self) -> EmbeddingStats {
        let jobs = self.shared.lock();
        let num_running = jobs.waiting.iter().filter(|job| job.started.is_some()).count();
        EmbeddingStats { num_waiting: self.queue.num_taken(), num_running, ..jobs.stats }
    }

    /// Returns what the loop is doing. Never waits.
    pub fn liveness(&self) -> Liveness {
        let jobs = self.shared.lock();
        match jobs.busy_since {
            _ if jobs.is_stopped => Liveness::Stopped,
            Some(since) => Liveness::Stepping(since.elapsed()),
            None => Liveness::Idle,
        }
    }
}

impl Drop for EmbeddingHandle {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the loop has been printed already.
            let _ = thread.join();
        }
    }
}

struct Loop {
    embedder: Box<dyn Embedder>,
    shared: Arc<SharedJobs>,
}

impl Drop for Loop {
    /// Marks the loop as stopped, also after a panic, and fails the requests that wait.
    fn drop(&mut self) {
        let mut jobs = self.shared.lock();
        jobs.is_stopped = true;
        let waiting = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        waiting.into_iter().for_each(|job| (job.on_done)(Err(Error::Stopped)));
    }
}

impl Loop {
    fn run(mut self) {
        while let Some(batch) = self.next_batch() {
            let mut values = Vec::new();
            let texts: Vec<EmbeddingText<'_>> = batch.iter().map(|(_, text)| text.text()).collect();
            let embedder = &mut self.embedder;
            let result = catch_unwind(AssertUnwindSafe(|| embedder.embed(&texts, &mut values)));
            let result = match result {
                Ok(result) => result.map_err(Error::from),
                Err(payload) => Err(Error::Internal(panic_text(&*payload))),
            };
            let is_lost = matches!(result, Err(Error::DeviceLost(_)));
            self.finish_batch(&batch, result.map(|()| values));
            if is_lost {
                return;
            }
        }
    }

    /// Waits for texts, and takes those of the next batch, each with the index of its job. `None` if the handle is
    /// dropped.
    fn next_batch(&self) -> Option<Vec<(usize, EmbeddingInput)>> {
        let mut jobs = self.shared.lock();
        loop {
            if jobs.is_closed {
                return None;
            }
            jobs.waiting.retain(|job| job.is_open.load(Ordering::Relaxed));
            let waiting: Vec<Waiting<'_>> = jobs.waiting.iter().map(Job::waiting).collect();
            let chosen = select(&waiting, BATCH_TOKENS);
            if chosen.is_empty() {
                jobs.busy_since = None;
                jobs = self.shared.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let now = Instant::now();
            jobs.busy_since = Some(now);
            let take = |index: usize| {
                let job = &mut jobs.waiting[index];
                job.started.get_or_insert(now);
                job.place = None;
                let text = std::mem::replace(&mut job.texts[job.num_taken], EmbeddingInput::new(Vec::new()));
                job.num_taken += 1;
                (index, text)
            };
            return Some(chosen.into_iter().map(take).collect());
        }
    }

    /// Gives the vectors of a batch to its jobs, and answers those that are complete. Only this thread removes jobs, so
    /// the indices are still those of [`Loop::next_batch`].
    fn finish_batch(&self, batch: &[(usize, EmbeddingInput)], result: Result<Vec<f32>, Error>) {
        let num_dimensions = self.embedder.info().num_dimensions;
        let mut jobs = self.shared.lock();
        let mut failed = None;
        match result {
            Ok(values) => {
                for ((index, _), vector) in batch.iter().zip(values.chunks_exact(num_dimensions)) {
                    jobs.waiting[*index].values.extend_from_slice(vector);
                }
                jobs.stats.num_batches += 1;
                jobs.stats.num_texts += batch.len() as u64;
                jobs.stats.num_tokens += batch.iter().map(|(_, text)| text.ids.len() as u64).sum::<u64>();
            }
            Err(error) => failed = Some(error),
        }
        let mut ended = Vec::new();
        for index in (0..jobs.waiting.len()).rev() {
            let is_in_batch = batch.iter().any(|(job, _)| *job == index);
            let job = &jobs.waiting[index];
            let is_complete = job.values.len() == job.texts.len() * num_dimensions;
            if is_in_batch && (failed.is_some() || is_complete) {
                ended.extend(jobs.waiting.remove(index));
            }
        }
        drop(jobs);
        for job in ended.into_iter().rev() {
            let Job { values, arrived, started, on_done, .. } = job;
            let result = match &failed {
                Some(error) => Err(error.clone()),
                None => Ok(Embeddings {
                    values,
                    num_dimensions,
                    queue_time: started.map_or(Duration::ZERO, |started| started.duration_since(arrived)),
                    total_time: arrived.elapsed(),
                }),
            };
            on_done(result);
        }
    }
}

impl Job {
    fn waiting(&self) -> Waiting<'_> {
        Waiting { tenant: self.tenant, texts: &self.texts[self.num_taken..] }
    }
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests;
