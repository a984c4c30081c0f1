//! Speculation through the engine with a draft model whose tokens are accepted at a given rate, compared with plain
//! decoding in the same run and with the ideal that the times of the steps give.

mod forced_draft;
mod step_times;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::Result;
use pellucid_engine::{
    Engine, EngineOptions, Event, EventSink, MAX_DRAFT_LEN, Overcommit, Request, SpeculationOptions,
};
use pellucid_model::{BLOCK_LEN, Model};
use pellucid_sampling::SamplingParams;
use serde::Serialize;

use super::SpeedArgs;
use super::model::Ready;
use super::percentiles::median;
use crate::flags::usage_error::bail_usage;
use crate::terminal::format::grouped;
use forced_draft::{ForcedDraft, SharedReplies};
use step_times::StepTimes;

/// Results for one number of sequences and one rate of acceptance.
#[derive(Debug, Serialize)]
pub(super) struct AcceptanceResult {
    sequences: usize,
    depth: usize,
    draft_tokens: usize,
    acceptance: f64,
    /// Tokens of a sequence for each step of the engine. The draws of a run differ from `acceptance` by chance.
    tokens_per_step: f64,
    draft_step_ms: f64,
    verify_step_ms: f64,
    plain_tokens_per_second: f64,
    tokens_per_second: f64,
    ratio: f64,
    /// Tokens per second if nothing but draft and verify steps took time, with the same tokens for each step.
    ideal_tokens_per_second: f64,
    fraction_of_ideal: f64,
}

/// Drafts whose acceptance the benchmark decides.
#[derive(Debug)]
pub(super) struct Forced {
    /// Rates to measure.
    pub(super) acceptance: Vec<f64>,
    /// Tokens to draft in every step.
    pub(super) draft_tokens: usize,
}

/// The sequences and lengths of a run.
#[derive(Debug, Clone, Copy)]
struct Size {
    sequences: usize,
    depth: usize,
    generate: usize,
    draft_tokens: usize,
}

impl Size {
    fn positions(self) -> usize {
        self.depth + self.generate + MAX_DRAFT_LEN + 1
    }

    /// Position in the middle of the replies.
    fn middle(self) -> usize {
        self.depth + self.generate / 2
    }
}

/// Rejects flags that cannot be measured.
pub(super) fn check(forced: &Forced, speed: &SpeedArgs, target: &Ready, draft: &Ready) -> Result<()> {
    if let Some(rate) = forced.acceptance.iter().find(|rate| !(0.0..=1.0).contains(*rate)) {
        bail_usage!("--acceptance {rate}: expected 0 to 1");
    }
    let (vocab_size, other) = (target.model.config().vocab_size, draft.model.config().vocab_size);
    if vocab_size != other {
        bail_usage!("--draft-shape: the draft model has {other} tokens, but the model has {vocab_size}");
    }
    if target.model.token_slots().num_slots < forced.draft_tokens {
        bail_usage!("--acceptance needs a device that chains draft steps, such as an NVIDIA GPU");
    }
    let context = target.model.config().context_len.min(draft.model.config().context_len);
    for size in sizes(forced, speed) {
        if size.positions() > context {
            bail_usage!("--depth and --generate: {} positions, but the context holds {context}", size.positions());
        }
        if size.sequences > target.model.token_slots().num_rows {
            bail_usage!("--batch {}: drafts are chained for fewer sequences", size.sequences);
        }
    }
    Ok(())
}

fn sizes(forced: &Forced, speed: &SpeedArgs) -> Vec<Size> {
    let generate = speed.generate as usize;
    let draft_tokens = forced.draft_tokens;
    let numbers = |given: &Option<Vec<u32>>, default: u32| given.clone().unwrap_or_else(|| vec![default]);
    let mut sizes = Vec::new();
    for depth in numbers(&speed.depth, 128) {
        let size = |sequences| Size { sequences, depth: depth.max(1) as usize, generate, draft_tokens };
        sizes.extend(numbers(&speed.batch, 1).into_iter().map(|sequences| size(sequences as usize)));
    }
    sizes
}

pub(super) fn run(
    forced: &Forced,
    speed: &SpeedArgs,
    mut target: Ready,
    mut draft: Ready,
) -> Result<Vec<AcceptanceResult>> {
    let sizes = sizes(forced, speed);
    let mut step_seconds = Vec::new();
    for &size in &sizes {
        let seconds = |ready: &mut Ready, verifies: bool| -> Result<f64> {
            let mut times = StepTimes::new(&mut ready.model, ready.kv_dtype, size.sequences, size.positions())?;
            if verifies { times.verify(size.middle(), size.draft_tokens + 1) } else { times.draft(size.middle()) }
        };
        step_seconds.push((seconds(&mut draft, false)?, seconds(&mut target, true)?));
    }
    let replies = SharedReplies::default();
    let mut bench = EngineBench::new(&sizes, target, draft, replies)?;
    let mut results = Vec::new();
    for (&size, (draft_seconds, verify_seconds)) in sizes.iter().zip(step_seconds) {
        // Fills the caches of both models, and records steps and replies.
        bench.replies.set_acceptance(0.8);
        bench.decode(size, false)?;
        bench.decode(size, true)?;
        for &acceptance in &forced.acceptance {
            bench.replies.set_acceptance(acceptance);
            let (mut plain, mut with_drafts, mut accepted) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..speed.repeat {
                plain.push(bench.decode(size, false)?.tokens_per_second);
                let measured = bench.decode(size, true)?;
                with_drafts.push(measured.tokens_per_second);
                accepted.push(measured.tokens_per_step);
            }
            let (plain, with_drafts) = (median(&mut plain), median(&mut with_drafts));
            let tokens_per_step = median(&mut accepted);
            let seconds = size.draft_tokens as f64 * draft_seconds + verify_seconds;
            let ideal = size.sequences as f64 * tokens_per_step / seconds;
            results.push(AcceptanceResult {
                sequences: size.sequences,
                depth: size.depth,
                draft_tokens: size.draft_tokens,
                acceptance,
                tokens_per_step,
                draft_step_ms: draft_seconds * 1e3,
                verify_step_ms: verify_seconds * 1e3,
                plain_tokens_per_second: plain,
                tokens_per_second: with_drafts,
                ratio: with_drafts / plain,
                ideal_tokens_per_second: ideal,
                fraction_of_ideal: with_drafts / ideal,
            });
        }
    }
    Ok(results)
}

/// One run of the sequences of a size.
struct Decoded {
    tokens_per_second: f64,
    /// Tokens of a sequence for each step.
    tokens_per_step: f64,
}

struct EngineBench {
    engine: Engine,
    replies: SharedReplies,
}

impl EngineBench {
    fn new(sizes: &[Size], target: Ready, draft: Ready, replies: SharedReplies) -> Result<EngineBench> {
        let max_sequences = sizes.iter().map(|size| size.sequences).max().unwrap_or(1);
        let blocks = |size: &Size| size.sequences * (size.positions().div_ceil(BLOCK_LEN) + 1);
        // Twice the blocks, so that no cached prefix is evicted.
        let num_blocks = 2 * sizes.iter().map(blocks).max().unwrap_or(1);
        let step_tokens = 512.max(max_sequences * (MAX_DRAFT_LEN + 1));
        let options = EngineOptions {
            num_blocks,
            block_len: BLOCK_LEN,
            kv_dtype: target.kv_dtype,
            max_sequences,
            step_tokens,
            chunk_len: step_tokens,
            max_waiting: 10_000,
            overcommit: Overcommit::Never,
            // There is one user, so the prefix cache needs no secret.
            secret: [0; 32],
            snapshot_distance: None,
        };
        let draft_tokens = sizes.iter().map(|size| size.draft_tokens).max();
        let mut engine = Engine::new(Box::new(target.model), target.backend, options)?;
        engine.set_speculation(SpeculationOptions { fixed_draft_len: draft_tokens, ..SpeculationOptions::OFF });
        engine.set_draft_model(Box::new(ForcedDraft { model: draft.model, replies: replies.clone() }), num_blocks)?;
        Ok(EngineBench { engine, replies })
    }

    /// Decodes the sequences of a size. Without drafts it records the replies; with drafts it compares them.
    fn decode(&mut self, size: Size, speculate: bool) -> Result<Decoded> {
        let vocab_size = self.engine.model().config().vocab_size as u64;
        let mut sinks = Vec::new();
        for sequence in 0..size.sequences as u64 {
            let seed = sequence + 1 + ((size.sequences as u64) << 16) + ((size.depth as u64) << 32);
            let prompt: Vec<u32> =
                (0..size.depth as u64).map(|at| ((at * 7919 + seed * 104_729) % vocab_size) as u32).collect();
            let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
            let request =
                Request { max_tokens: Some(size.generate), speculate, ..Request::new(prompt.clone(), sampling) };
            let sink = TimedTokens::default();
            self.engine.submit(request, Box::new(sink.clone()))?;
            sinks.push((seed, prompt, sink));
        }
        while self.engine.step() {}
        let mut times: Vec<Vec<Instant>> = Vec::new();
        for (seed, mut tokens, sink) in sinks {
            let TokenTimes { ids, arrived, error } = std::mem::take(&mut *sink.0.lock().expect("the engine is idle"));
            if let Some(error) = error {
                anyhow::bail!("the engine failed: {error}");
            }
            tokens.extend(ids);
            if speculate {
                self.replies.compare(seed, &tokens)?;
            } else {
                self.replies.record(seed, tokens);
            }
            times.push(arrived);
        }
        Ok(window(&times))
    }
}

/// Minimum seconds between the tokens of two steps. Those of one step are delivered together.
const STEP_GAP: f64 = 200e-6;

/// Returns the speed while all sequences decode: from when each has a quarter of its tokens until the first one ends.
fn window(times: &[Vec<Instant>]) -> Decoded {
    let start = times.iter().filter_map(|times| times.get(times.len() / 4)).max();
    let end = times.iter().filter_map(|times| times.last()).min();
    let (Some(&start), Some(&end)) = (start, end) else {
        return Decoded { tokens_per_second: 0.0, tokens_per_step: 0.0 };
    };
    let (mut num_tokens, mut num_steps) = (0, 0);
    for times in times {
        let inside: Vec<&Instant> = times.iter().filter(|&&time| time > start && time <= end).collect();
        num_tokens += inside.len();
        num_steps += usize::from(!inside.is_empty())
            + inside.windows(2).filter(|pair| (*pair[1] - *pair[0]).as_secs_f64() > STEP_GAP).count();
    }
    Decoded {
        tokens_per_second: num_tokens as f64 / (end - start).as_secs_f64(),
        tokens_per_step: num_tokens as f64 / num_steps.max(1) as f64,
    }
}

/// The tokens of a reply and when they were delivered.
#[derive(Debug, Default)]
struct TokenTimes {
    ids: Vec<u32>,
    arrived: Vec<Instant>,
    error: Option<String>,
}

#[derive(Debug, Clone, Default)]
struct TimedTokens(Arc<Mutex<TokenTimes>>);

impl EventSink for TimedTokens {
    fn send(&mut self, event: Event) {
        let mut times = self.0.lock().expect("nothing panics while it holds the times");
        match event {
            Event::Token(token) => {
                times.ids.push(token.id);
                times.arrived.push(Instant::now());
            }
            Event::Failed(error) => times.error = Some(error.to_string()),
            _ => {}
        }
    }

    fn is_open(&self) -> bool {
        true
    }
}

pub(super) fn print(out: &mut impl Write, results: &[AcceptanceResult]) -> std::io::Result<()> {
    let Some(first) = results.first() else { return Ok(()) };
    writeln!(out)?;
    writeln!(out, "{} drafted tokens, accepted at a forced rate; tokens/s", first.draft_tokens)?;
    writeln!(
        out,
        "{:<16}{:>5}{:>10}{:>11}{:>8}{:>8}{:>7}{:>8}{:>6}",
        "", "rate", "draft ms", "verify ms", "plain", "drafts", "ratio", "ideal", "of it"
    )?;
    for row in results {
        let name = format!("x {} at {}", row.sequences, row.depth);
        writeln!(
            out,
            "{name:<16}{:>5.2}{:>10.3}{:>11.3}{:>8}{:>8}{:>7.2}{:>8}{:>5.0}%",
            row.acceptance,
            row.draft_step_ms,
            row.verify_step_ms,
            grouped(row.plain_tokens_per_second as u64),
            grouped(row.tokens_per_second as u64),
            row.ratio,
            grouped(row.ideal_tokens_per_second as u64),
            row.fraction_of_ideal * 100.0,
        )?;
    }
    Ok(())
}
