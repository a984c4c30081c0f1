//! Runs every request alone and then under several engine settings, and compares the replies bit for bit.
//!
//! `mod.rs` prints the results; `requests.rs` makes the requests.

use std::sync::mpsc::Receiver;

use anyhow::{Result, bail};
use pellucid_engine::{Engine, EngineOptions, Event, Overcommit, Request, SpeculationOptions};
use pellucid_model::BLOCK_LEN;
use serde::Serialize;

use super::drafts::{FORCED, RecordedDrafter};
use super::{Plan, requests};
use crate::commands::event_queue::EventQueue;
use crate::commands::model_on_device::ModelOnDevice;

/// The replies under one setting, such as "chunks of 7", compared with the expected ones.
#[derive(Debug, Serialize)]
pub(super) struct SettingResult {
    pub(super) name: &'static str,
    pub(super) num_replies: usize,
    pub(super) num_tokens: usize,
    pub(super) cached_tokens: u64,
    pub(super) preemptions: u64,
    /// Drafted tokens, and those that the model chose as well.
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// Replies that differ from the reply of the same request when it runs alone.
    pub(super) num_different: usize,
}

/// The tokens of a reply, each with the bits of the log probabilities at its position.
type ReplyBits = Vec<(u32, Vec<(u32, u32)>)>;

struct Comparison<'a> {
    requests: &'a [Request],
    expected: Vec<ReplyBits>,
    results: Vec<SettingResult>,
    progress: &'a mut dyn FnMut(&str),
}

pub(super) fn run(
    plan: Plan,
    requests: &[Request],
    device: ModelOnDevice,
    draft: Option<&ModelOnDevice>,
    single_threaded: Option<impl FnOnce() -> Result<ModelOnDevice>>,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<SettingResult>> {
    let per_request = blocks_per_request(plan);
    let together = plan.together as usize;
    let options = options(plan, requests);
    let mut comparison = Comparison { requests, expected: Vec::new(), results: Vec::new(), progress };
    comparison.run_alone(&mut device.engine(options)?)?;

    let in_order: Vec<usize> = (0..requests.len()).collect();
    let reversed: Vec<usize> = in_order.iter().rev().copied().collect();
    let mut engine = device.engine(options)?;
    comparison.compare("together, cache cold", &mut engine, &in_order, 0)?;
    comparison.compare("together, cache warm", &mut engine, &in_order, 0)?;
    comparison.compare("other order, one each step", &mut device.engine(options)?, &reversed, 1)?;
    for (name, chunk_len) in [("chunks of 1", 1), ("chunks of 7", 7), ("chunks of 33", 33)] {
        let options = EngineOptions { chunk_len, step_tokens: together.max(2 * chunk_len), ..options };
        comparison.compare(name, &mut device.engine(options)?, &in_order, 0)?;
    }
    let mut engine = device.engine(options)?;
    comparison.cache_first_halves(&mut engine)?;
    comparison.compare("first halves cached", &mut engine, &in_order, 0)?;
    // Memory for about a third of the running requests, with overcommit, forces preemption.
    let tight = EngineOptions {
        num_blocks: per_request.max(per_request * together / 6),
        overcommit: Overcommit::Always,
        ..options
    };
    comparison.compare("preempted", &mut device.engine(tight)?, &in_order, 0)?;

    comparison.compare_drafts(&device, draft, options, &in_order)?;

    if let Some(single_threaded) = single_threaded {
        // A second copy of a large model may not fit into memory.
        drop(device);
        comparison.compare("one thread", &mut single_threaded()?.engine(options)?, &in_order, 0)?;
    }
    Ok(comparison.results)
}

/// Returns the number of blocks that the longest request can need.
fn blocks_per_request(plan: Plan) -> usize {
    (plan.longest as usize + plan.reply as usize).div_ceil(BLOCK_LEN) + 1
}

/// Returns the settings of an engine that serves the requests without preemption.
pub(super) fn options(plan: Plan, requests: &[Request]) -> EngineOptions {
    let together = plan.together as usize;
    let stored = |request: &Request| (request.prompt.len() + plan.reply as usize).div_ceil(BLOCK_LEN);
    EngineOptions {
        // Enough that the second round finds the whole first round in the prefix cache.
        num_blocks: blocks_per_request(plan) * together + requests.iter().map(stored).sum::<usize>(),
        block_len: BLOCK_LEN,
        kv_dtype: plan.kv_dtype,
        max_sequences: together,
        step_tokens: 256.max(together),
        chunk_len: 256,
        max_waiting: requests.len() + 1,
        overcommit: Overcommit::Never,
        secret: [0; 32],
        snapshot_distance: None,
    }
}

impl Comparison<'_> {
    /// Compares replies with drafts that are looked up, that are often wrong, and those of a draft model.
    fn compare_drafts(
        &mut self,
        device: &ModelOnDevice,
        draft: Option<&ModelOnDevice>,
        options: EngineOptions,
        order: &[usize],
    ) -> Result<()> {
        let mut engine = device.engine(options)?;
        engine.set_speculation(SpeculationOptions { ngram: true, suffix: true, ..FORCED });
        self.compare("drafts looked up", &mut engine, order, 0)?;
        let ids = |reply: &ReplyBits| reply.iter().map(|(id, _)| *id).collect();
        let replies = self.requests.iter().zip(&self.expected);
        let replies = replies.map(|(request, reply)| (request.prompt.clone(), ids(reply)));
        let recorded = RecordedDrafter::new(replies, device.vocab_size());
        let mut engine = device.engine(options)?;
        engine.set_speculation(FORCED);
        engine.add_drafter(Box::new(recorded));
        self.compare("drafts, every third wrong", &mut engine, order, 0)?;
        let Some(draft) = draft else { return Ok(()) };
        for (name, max_sequences) in [("draft model, together", options.max_sequences), ("draft model, alone", 1)] {
            let mut engine = device.engine(EngineOptions { max_sequences, ..options })?;
            engine.set_speculation(FORCED);
            engine.set_draft_model(draft.share(), options.num_blocks)?;
            self.compare(name, &mut engine, order, 0)?;
        }
        Ok(())
    }

    /// Runs the requests one at a time, none with a cached prefix, and keeps the replies as the expected ones.
    fn run_alone(&mut self, engine: &mut Engine) -> Result<()> {
        for (i, request) in self.requests.iter().enumerate() {
            (self.progress)(&format!("alone: {i} of {}", self.requests.len()));
            let (sink, replies) = EventQueue::new();
            engine.submit(requests::in_own_scope(request, i), Box::new(sink))?;
            while engine.step() {}
            self.expected.push(reply_of(replies)?);
        }
        Ok(())
    }

    /// Runs the requests in this order, one every `stagger` steps (0: all at once), and compares the replies with the
    /// expected ones.
    fn compare(&mut self, name: &'static str, engine: &mut Engine, order: &[usize], stagger: usize) -> Result<()> {
        let before = engine.stats();
        let mut replies: Vec<Option<Receiver<Event>>> = self.requests.iter().map(|_| None).collect();
        let mut queue = order.iter();
        let mut num_sent = 0;
        loop {
            let arriving = if stagger == 0 { usize::MAX } else { usize::from(num_sent % stagger == 0) };
            for &i in queue.by_ref().take(arriving) {
                let (sink, events) = EventQueue::new();
                engine.submit(self.requests[i].clone(), Box::new(sink))?;
                replies[i] = Some(events);
                num_sent += 1;
            }
            (self.progress)(&format!("{name}: {} of {} begun", num_sent - engine.num_waiting(), self.requests.len()));
            if !engine.step() && queue.len() == 0 {
                break;
            }
        }
        let after = engine.stats();
        let mut result = SettingResult {
            name,
            num_replies: self.requests.len(),
            num_tokens: 0,
            cached_tokens: after.cached_tokens - before.cached_tokens,
            preemptions: after.preemptions - before.preemptions,
            drafted: after.speculation.total().drafted - before.speculation.total().drafted,
            accepted: after.speculation.total().accepted - before.speculation.total().accepted,
            num_different: 0,
        };
        for (reply, expected) in replies.into_iter().flatten().zip(&self.expected) {
            let reply = reply_of(reply)?;
            result.num_tokens += reply.len();
            result.num_different += usize::from(reply != *expected);
        }
        self.results.push(result);
        Ok(())
    }

    /// Computes the first half of every prompt, so that the prefix cache holds it.
    fn cache_first_halves(&mut self, engine: &mut Engine) -> Result<()> {
        for request in self.requests {
            let half = request.prompt[..request.prompt.len().div_ceil(2)].to_vec();
            let (sink, _events) = EventQueue::new();
            engine.submit(Request { prompt: half, max_tokens: Some(1), ..request.clone() }, Box::new(sink))?;
        }
        while engine.step() {}
        Ok(())
    }
}

/// Returns the reply of a request that has ended.
fn reply_of(events: Receiver<Event>) -> Result<ReplyBits> {
    let mut reply = ReplyBits::new();
    for event in events.try_iter() {
        match event {
            Event::Token(token) => {
                let logprobs = token.logprobs.map_or(Vec::new(), |logprobs| {
                    let top = logprobs.top.into_iter().map(|(id, logprob)| (id, logprob.to_bits()));
                    std::iter::once((token.id, logprobs.chosen.to_bits())).chain(top).collect()
                });
                reply.push((token.id, logprobs));
            }
            Event::Failed(error) => bail!("a request failed: {error}"),
            _ => {}
        }
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use pellucid_model::{Batch, DecoderConfig, Error, KvMemory, Logits, Model};
    use pellucid_tensor::DType;
    use pellucid_testing::FakeModel;

    use super::*;

    /// A model whose logits depend on the number of rows in the batch, which batch invariance forbids.
    struct Leaky(FakeModel);

    impl Model for Leaky {
        fn config(&self) -> &DecoderConfig {
            self.0.config()
        }

        fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
            self.0.forward(batch, kv, logits)?;
            let vocab_size = self.config().vocab_size;
            let noise = batch.num_rows() as f32 * 1e-6;
            logits.resize(batch.num_wanted(), vocab_size).iter_mut().for_each(|logit| *logit *= 1.0 + noise);
            Ok(())
        }
    }

    fn num_different(device: impl Fn() -> ModelOnDevice) -> usize {
        let plan = Plan { prompts: 40, longest: 100, reply: 40, together: 8, seed: 0, kv_dtype: DType::F16 };
        let requests = requests::random(plan, 24);
        let fake = FakeModel::new(24, 160);
        let backend = fake.backend();
        let draft = ModelOnDevice::new(fake, backend);
        let results = run(plan, &requests, device(), Some(&draft), Some(|| Ok(device())), &mut |_| ())
            .expect("every request is served");
        assert!(
            results.iter().any(|result| result.cached_tokens > 0)
                && results.iter().any(|result| result.preemptions > 0)
        );
        let drafting = results.iter().filter(|result| result.name.contains("draft m"));
        assert!(drafting.clone().count() == 2 && drafting.clone().all(|result| result.accepted > 1000), "{results:?}");
        results.iter().map(|result| result.num_different).sum()
    }

    #[test]
    fn a_model_without_batch_invariance_is_detected_and_another_is_not() {
        let fake = || FakeModel::new(24, 160);
        assert_eq!(num_different(|| ModelOnDevice::new(fake(), fake().backend())), 0);
        assert!(num_different(|| ModelOnDevice::new(Leaky(fake()), fake().backend())) > 0);
    }
}
