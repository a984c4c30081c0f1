//! Drafts in `prove`: drafters for the comparison, and acceptance and speed of a draft model on the user's own pair.

use std::collections::HashMap;
use std::io::Write;
use std::time::Instant;

use anyhow::{Result, bail};
use pellucid_engine::{
    DraftContext, DraftCounts, Drafter, Engine, EngineOptions, Event, MAX_DRAFT_LEN, Request, SpeculationOptions,
};
use pellucid_sampling::SamplingParams;
use serde::Serialize;

use super::requests;
use crate::commands::event_queue::EventQueue;
use crate::commands::model_on_device::ModelOnDevice;
use crate::terminal::format::grouped;

/// Temperatures at which acceptance and speed are measured.
const TEMPERATURES: [f32; 3] = [0.0, 0.7, 1.5];

/// Drafts of four tokens in every step, whatever they cost, so that the proof does not depend on the machine's speed.
pub(super) const FORCED: SpeculationOptions =
    SpeculationOptions { fixed_draft_len: Some(4), ..SpeculationOptions::OFF };

/// Proposes replies that are known from requests alone; every third token is wrong.
pub(super) struct RecordedDrafter {
    replies: HashMap<Vec<u32>, Vec<Vec<u32>>>,
    vocab_size: usize,
    num_proposed: usize,
}

impl RecordedDrafter {
    pub(super) fn new(replies: impl Iterator<Item = (Vec<u32>, Vec<u32>)>, vocab_size: usize) -> RecordedDrafter {
        let mut by_prompt: HashMap<Vec<u32>, Vec<Vec<u32>>> = HashMap::new();
        replies.for_each(|(prompt, reply)| by_prompt.entry(prompt).or_default().push(reply));
        RecordedDrafter { replies: by_prompt, vocab_size, num_proposed: 0 }
    }
}

impl Drafter for RecordedDrafter {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let (prompt, output) = context.tokens.split_at(context.prompt_len);
        let replies = self.replies.get(prompt);
        let Some(reply) = replies.and_then(|all| all.iter().find(|reply| reply.starts_with(output))) else { return };
        for &token in reply[output.len()..].iter().take(max_len) {
            self.num_proposed += 1;
            let is_wrong = self.num_proposed.is_multiple_of(3);
            draft.push(if is_wrong { (token + 1) % self.vocab_size as u32 } else { token });
        }
    }
}

/// Acceptance and speed at one temperature.
#[derive(Debug, Serialize)]
pub(super) struct DraftSpeed {
    pub(super) temperature: f32,
    pub(super) num_replies: usize,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    pub(super) plain_tokens_per_second: f64,
    pub(super) tokens_per_second: f64,
    pub(super) num_different: usize,
}

/// A reply as bits: its tokens, each with the bits of its log probability.
type Reply = Vec<(u32, Option<u32>)>;

/// Answers every prompt without and with the draft model, in turn, and compares the replies. The engine chooses the
/// lengths of drafts, as in use.
pub(super) fn measure(
    device: &ModelOnDevice,
    draft: &ModelOnDevice,
    options: EngineOptions,
    prompts: &[Vec<u32>],
    max_tokens: usize,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<DraftSpeed>> {
    let mut engine = device.engine(options)?;
    engine.set_speculation(SpeculationOptions { max_draft_len: MAX_DRAFT_LEN, ..SpeculationOptions::OFF });
    engine.set_draft_model(draft.share(), options.num_blocks)?;
    let mut results = Vec::new();
    for temperature in TEMPERATURES {
        let mut result = DraftSpeed {
            temperature,
            num_replies: prompts.len(),
            drafted: 0,
            accepted: 0,
            plain_tokens_per_second: 0.0,
            tokens_per_second: 0.0,
            num_different: 0,
        };
        let (mut tokens, mut seconds) = (0, [0.0; 2]);
        for (i, prompt) in prompts.iter().enumerate() {
            progress(&format!("draft model at temperature {temperature}: {i} of {}", prompts.len()));
            let sampling =
                SamplingParams { temperature, seed: i as u64, logprobs: Some(0), ..SamplingParams::default() };
            let request = Request { max_tokens: Some(max_tokens), ..Request::new(prompt.clone(), sampling) };
            let plain = Request { speculate: false, ..request.clone() };
            // Fills the prefix caches of both models, so that neither run pays for the prompt.
            answer(&mut engine, &Request { max_tokens: Some(2), ..request.clone() })?;
            let before = engine.stats().speculation.total();
            let (expected, plain_seconds) = answer(&mut engine, &plain)?;
            let (found, drafted_seconds) = answer(&mut engine, &request)?;
            let after = engine.stats().speculation.total();
            let counts =
                DraftCounts { drafted: after.drafted - before.drafted, accepted: after.accepted - before.accepted };
            result.drafted += counts.drafted;
            result.accepted += counts.accepted;
            result.num_different += usize::from(found != expected);
            tokens += expected.len().saturating_sub(1);
            seconds = [seconds[0] + plain_seconds, seconds[1] + drafted_seconds];
        }
        [result.plain_tokens_per_second, result.tokens_per_second] = seconds.map(|seconds| tokens as f64 / seconds);
        results.push(result);
    }
    Ok(results)
}

/// Returns the reply to a request, and the seconds from its first token to its end.
fn answer(engine: &mut Engine, request: &Request) -> Result<(Reply, f64)> {
    let (sink, events) = EventQueue::new();
    engine.submit(requests::in_own_scope(request, 0), Box::new(sink))?;
    let (mut reply, mut first) = (Reply::new(), None);
    loop {
        let goes_on = engine.step();
        for event in events.try_iter() {
            match event {
                Event::Token(token) => {
                    reply.push((token.id, token.logprobs.map(|logprobs| logprobs.chosen.to_bits())));
                }
                Event::Failed(error) => bail!("a request failed: {error}"),
                _ => {}
            }
        }
        if first.is_none() && !reply.is_empty() {
            first = Some(Instant::now());
        }
        if !goes_on {
            return Ok((reply, first.map_or(0.0, |first| first.elapsed().as_secs_f64())));
        }
    }
}

pub(super) fn print(out: &mut impl Write, results: &[DraftSpeed]) -> std::io::Result<()> {
    writeln!(
        out,
        "\n{:<20}{:>9}{:>10}{:>11}{:>12}{:>9}{:>9}",
        "draft model", "drafted", "accepted", "plain t/s", "drafts t/s", "speed-up", "differ"
    )?;
    for result in results {
        let share = 100.0 * result.accepted as f64 / result.drafted.max(1) as f64;
        writeln!(
            out,
            "{:<20}{:>9}{:>10}{:>11.1}{:>12.1}{:>9}{:>9}",
            format!("temperature {}", result.temperature),
            grouped(result.drafted),
            format!("{share:.0} %"),
            result.plain_tokens_per_second,
            result.tokens_per_second,
            format!("{:.2} x", result.tokens_per_second / result.plain_tokens_per_second),
            result.num_different,
        )?;
    }
    Ok(())
}
