//! Requests through the engine as many users would send them: with a fixed concurrency, or arriving at random times.

use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Result;
use pellucid_engine::{Engine, EngineHandle, EngineOptions, EngineStats, Event, Overcommit, Request, RequestStats};
use pellucid_model::{BLOCK_LEN, DecoderConfig, Model};
use pellucid_sampling::SamplingParams;
use serde::Serialize;

use super::model::{Drafters, Ready};
use super::percentiles::Percentiles;
use super::{Length, ServingArgs};
use crate::flags::usage_error::bail_usage;

/// Arrival pattern of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Arrival {
    /// This number of requests is running at any time: when one ends, the next starts.
    Concurrency(u32),
    /// Requests arrive at random times, with this mean rate per second, whether or not the engine keeps up.
    Rate(f64),
}

/// Results for one concurrency or rate.
#[derive(Debug, Serialize)]
pub(super) struct Level {
    pub(super) arrival: Arrival,
    pub(super) requests: usize,
    pub(super) seconds: f64,
    pub(super) requests_per_second: f64,
    pub(super) output_tokens_per_second: f64,
    pub(super) prompt_tokens_per_second: f64,
    pub(super) queue_time: Option<Percentiles>,
    pub(super) time_to_first_token: Option<Percentiles>,
    pub(super) time_per_output_token: Option<Percentiles>,
    pub(super) end_to_end: Option<Percentiles>,
    /// Fraction of the step time that was spent outside the model.
    pub(super) engine_share: f64,
    /// Fraction of the steps that were launched before the step before them had ended.
    pub(super) ahead_share: f64,
    /// Tokens of look-ahead steps that were discarded.
    pub(super) discarded_tokens: u64,
    pub(super) prefill_tokens: u64,
    pub(super) decode_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) preemptions: u64,
    /// Tokens that drafters proposed, and those of them that the model chose.
    pub(super) drafted_tokens: u64,
    pub(super) accepted_tokens: u64,
    /// Maximum observed fraction of KV blocks in use.
    pub(super) kv_peak: f64,
}

pub(super) fn run(args: &ServingArgs, ready: Ready, drafters: Drafters) -> Result<Vec<Level>> {
    let arrivals: Vec<Arrival> = (args.concurrency.iter().map(|&n| Arrival::Concurrency(n)))
        .chain(args.rate.iter().map(|&rate| Arrival::Rate(rate)))
        .collect();
    let config = ready.model.config().clone();
    let engine = start(ready, drafters, args, &arrivals)?;
    arrivals.into_iter().map(|arrival| level(args, arrival, &engine, &config)).collect()
}

/// Rejects requests that would not fit into the context.
pub(super) fn check(args: &ServingArgs, context: usize) -> Result<()> {
    let longest = longest(args);
    if longest > context {
        let flags = "--shared-prefix, --input and --output";
        bail_usage!("{flags}: a request may have {longest} tokens, but the model's context holds {context}");
    }
    if let Some(rate) = args.rate.iter().find(|rate| !(1e-3..=1e6).contains(*rate)) {
        bail_usage!("--rate {rate}: expected 0.001 to 1,000,000");
    }
    Ok(())
}

/// Returns the maximum tokens of a request.
fn longest(args: &ServingArgs) -> usize {
    [args.shared_prefix, *args.input.0.end(), *args.output.0.end()].iter().map(|&tokens| tokens as usize).sum()
}

/// Starts an engine with memory for every request that may run at once.
fn start(ready: Ready, drafters: Drafters, args: &ServingArgs, arrivals: &[Arrival]) -> Result<EngineHandle> {
    let widest = arrivals.iter().map(|arrival| match arrival {
        Arrival::Concurrency(n) => *n as usize,
        Arrival::Rate(_) => OPEN_LOOP_SEQUENCES,
    });
    let max_sequences = widest.max().unwrap_or(1);
    let step_tokens = (args.step_tokens as usize).max(max_sequences);
    let options = EngineOptions {
        num_blocks: max_sequences * (longest(args).div_ceil(BLOCK_LEN) + 1),
        block_len: BLOCK_LEN,
        kv_dtype: ready.kv_dtype,
        max_sequences,
        step_tokens,
        chunk_len: step_tokens,
        max_waiting: 100_000,
        overcommit: Overcommit::Never,
        // There is one user, so the prefix cache needs no secret.
        secret: [0; 32],
        snapshot_distance: None,
    };
    let Ready { model, backend, .. } = ready;
    let mut engine = Engine::new(Box::new(model), backend, options)?;
    engine.set_speculation(drafters.options);
    if let Some(draft) = drafters.model {
        engine.set_draft_model(Box::new(draft), options.num_blocks)?;
    }
    Ok(EngineHandle::start(engine))
}

/// Sequences that run at once when requests arrive at random times; further ones wait.
const OPEN_LOOP_SEQUENCES: usize = 32;
/// Interval between two samples of memory use.
const MEMORY_SAMPLE_INTERVAL: Duration = Duration::from_millis(50);

type Outcome = Result<RequestStats, pellucid_engine::Error>;

fn level(args: &ServingArgs, arrival: Arrival, engine: &EngineHandle, config: &DecoderConfig) -> Result<Level> {
    let default = match arrival {
        Arrival::Concurrency(n) => 4 * n,
        Arrival::Rate(_) => 64,
    };
    let requests: Vec<Request> =
        (0..args.requests.unwrap_or(default)).map(|i| request(args, i, config.vocab_size)).collect();
    let num_requests = requests.len();
    let before = engine.stats()?;
    let started = Instant::now();
    let (done, outcomes) = channel();
    let (finished, kv_peak) = std::thread::scope(|scope| {
        match arrival {
            Arrival::Concurrency(n) => {
                let queue = std::sync::Arc::new(Mutex::new(requests.into_iter()));
                for _ in 0..n {
                    let (queue, done) = (queue.clone(), done.clone());
                    scope.spawn(move || {
                        loop {
                            let next = queue.lock().expect("no thread panics while it holds the queue").next();
                            let Some(request) = next else { return };
                            serve(engine, request, &done);
                        }
                    });
                }
                drop(done);
            }
            Arrival::Rate(rate) => {
                scope.spawn(move || {
                    let mut at = Duration::ZERO;
                    for (i, request) in requests.into_iter().enumerate() {
                        at += Duration::from_secs_f64(-uniform(i as u32, GAPS).ln() / rate);
                        std::thread::sleep(at.saturating_sub(started.elapsed()));
                        let done = done.clone();
                        scope.spawn(move || serve(engine, request, &done));
                    }
                });
            }
        }
        collect(engine, outcomes, num_requests)
    });
    let finished = finished?;
    Ok(summary(arrival, &finished, started.elapsed().as_secs_f64(), before, engine.stats()?, kv_peak))
}

/// Sends one request and waits for its end.
fn serve(engine: &EngineHandle, request: Request, done: &Sender<Outcome>) {
    let outcome = engine.submit(request).and_then(|stream| {
        loop {
            match stream.next_event() {
                Some(Event::Done(stats)) => return Ok(*stats),
                Some(Event::Failed(error)) => return Err(error),
                Some(_) => {}
                None => return Err(pellucid_engine::Error::Stopped),
            }
        }
    });
    // The collector stops at the first failure and closes the channel.
    let _ = done.send(outcome);
}

/// Collects the results, and samples memory use meanwhile.
fn collect(
    engine: &EngineHandle,
    outcomes: std::sync::mpsc::Receiver<Outcome>,
    expected: usize,
) -> (Result<Vec<RequestStats>>, f64) {
    let (mut finished, mut peak) = (Vec::with_capacity(expected), 0.0f64);
    loop {
        match outcomes.recv_timeout(MEMORY_SAMPLE_INTERVAL) {
            Ok(Ok(stats)) => finished.push(stats),
            Ok(Err(error)) => return (Err(error.into()), peak),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return (Ok(finished), peak),
        }
        if let Ok(stats) = engine.stats() {
            peak = peak.max(stats.blocks_in_use as f64 / stats.num_blocks as f64);
        }
    }
}

fn summary(
    arrival: Arrival,
    finished: &[RequestStats],
    seconds: f64,
    before: EngineStats,
    after: EngineStats,
    kv_peak: f64,
) -> Level {
    let total = |count: fn(&RequestStats) -> usize| finished.iter().map(count).sum::<usize>() as f64;
    let spread = |time: fn(&RequestStats) -> Option<Duration>| Percentiles::of(finished.iter().filter_map(time));
    let step_time = (after.step_time - before.step_time).as_secs_f64();
    let drafts = |stats: &EngineStats| stats.speculation.total();
    let forward_time = (after.forward_time - before.forward_time).as_secs_f64();
    Level {
        arrival,
        requests: finished.len(),
        seconds,
        requests_per_second: finished.len() as f64 / seconds,
        output_tokens_per_second: total(|stats| stats.output_tokens) / seconds,
        prompt_tokens_per_second: total(|stats| stats.prompt_tokens) / seconds,
        queue_time: spread(|stats| Some(stats.queue_time)),
        time_to_first_token: spread(|stats| Some(stats.time_to_first_token)),
        time_per_output_token: spread(RequestStats::time_per_output_token),
        end_to_end: spread(|stats| Some(stats.total_time)),
        engine_share: 1.0 - forward_time / step_time,
        ahead_share: (after.steps_ahead - before.steps_ahead) as f64 / (after.steps - before.steps).max(1) as f64,
        discarded_tokens: after.tokens_discarded - before.tokens_discarded,
        prefill_tokens: after.prefill_tokens - before.prefill_tokens,
        decode_tokens: after.decode_tokens - before.decode_tokens,
        cached_tokens: after.cached_tokens - before.cached_tokens,
        preemptions: after.preemptions - before.preemptions,
        drafted_tokens: drafts(&after).drafted - drafts(&before).drafted,
        accepted_tokens: drafts(&after).accepted - drafts(&before).accepted,
        kv_peak,
    }
}

/// Purpose of a random number; no two requests or purposes share one.
const GAPS: u32 = 0;
const INPUT: u32 = 1;
const OUTPUT: u32 = 2;
const TOKENS: u32 = 3;

/// Returns a random number in (0, 1) for a request and a purpose. Two runs send the same requests at the same times.
fn uniform(request: u32, purpose: u32) -> f64 {
    pellucid_sampling::uniform(0, request, purpose)
}

/// Returns request `i`: random lengths and tokens, greedy, without an end token.
fn request(args: &ServingArgs, i: u32, vocab_size: usize) -> Request {
    let length = |range: &Length, purpose| {
        let (low, high) = (*range.0.start(), *range.0.end());
        (low + (uniform(i, purpose) * f64::from(high - low + 1)) as u32).min(high)
    };
    let token = |request: u32, at: u32| {
        let mixed = (u64::from(request) << 32 | u64::from(at)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((mixed >> 32) % vocab_size as u64) as u32
    };
    let shared = (0..args.shared_prefix).map(|at| token(u32::MAX, at));
    let own = (0..length(&args.input, INPUT)).map(|at| token(i.wrapping_add(TOKENS), at));
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let mut request = Request::new(shared.chain(own).collect(), greedy);
    request.max_tokens = Some(length(&args.output, OUTPUT) as usize);
    request
}
