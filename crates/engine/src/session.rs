//! One sequence at a time: prompt in, tokens out, with the keys and values of the conversation kept between turns.

use std::ops::{ControlFlow, Range};
use std::time::Instant;

use pellucid_model::{BLOCK_LEN, Batch, Chunk, KvMemory, Logits, Model};
use pellucid_sampling::sample;
use pellucid_tensor::Backend;

use crate::{Error, FinishReason, Request, Stats};

/// Prompt tokens computed in one step: enough to use the arithmetic units well, few enough that stopping is prompt.
const CHUNK_LEN: usize = 256;

/// A model with the memory of one conversation.
#[allow(missing_debug_implementations)] // A model prints its weights.
pub struct Session {
    model: Box<dyn Model>,
    kv: KvMemory,
    /// The conversation's blocks: all there are, in order.
    blocks: Vec<u32>,
    /// Tokens whose keys and values are stored.
    stored: Vec<u32>,
    batch: Batch,
}

/// What happens while a reply is made. The caller answers each with go on or stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Prompt tokens computed so far, out of how many.
    Prefill {
        done: usize,
        total: usize,
    },
    Token(u32),
}

/// A finished reply.
#[derive(Debug, Clone)]
pub struct Reply {
    pub ids: Vec<u32>,
    pub finish: FinishReason,
    pub stats: Stats,
}

impl Session {
    /// Memory for one sequence of the model's whole context.
    pub fn new(model: Box<dyn Model>, backend: &dyn Backend) -> Result<Session, Error> {
        let num_blocks = model.config().context_len.div_ceil(BLOCK_LEN);
        let kv = KvMemory::new(model.config(), backend, num_blocks).map_err(pellucid_model::Error::from)?;
        let blocks = (0..num_blocks as u32).collect();
        Ok(Session { model, kv, blocks, stored: Vec::new(), batch: Batch::default() })
    }

    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Continues a prompt until it ends or `on_event` says stop.
    ///
    /// Whatever the prompt shares with what is stored is not computed again; by row independence the bits are the same.
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Reply, Error> {
        let start = Instant::now();
        let context = self.model.config().context_len;
        let prompt = &request.prompt;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if prompt.len() >= context {
            return Err(Error::PromptTooLong { prompt: prompt.len(), context });
        }
        request.sampling.check()?;
        let cached_tokens = self.keep_common_prefix(prompt);
        let mut stats = Stats { prompt_tokens: prompt.len(), cached_tokens, ..Stats::default() };
        let mut ids = Vec::new();
        let mut first_token_at = start;
        let finish = loop {
            if request.max_tokens == Some(ids.len()) {
                break FinishReason::MaxTokens;
            }
            if prompt.len() + ids.len() >= context {
                break FinishReason::Context;
            }
            let next: &[u32] = if ids.is_empty() { &prompt[self.stored.len()..] } else { &ids[ids.len() - 1..] };
            let Some(token) = self.next_token(next, request, &mut on_event)? else { break FinishReason::Cancelled };
            if ids.is_empty() {
                first_token_at = Instant::now();
                stats.time_to_first_token = first_token_at - start;
            }
            if request.end_ids.contains(&token) {
                break FinishReason::End;
            }
            ids.push(token);
            if on_event(Event::Token(token)).is_break() {
                break FinishReason::Cancelled;
            }
        };
        stats.output_tokens = ids.len();
        stats.decode_time = first_token_at.elapsed();
        Ok(Reply { ids, finish, stats })
    }

    /// Negative log-likelihood, in nats, of each of `ids` after the first, given those before it; `None` when the caller said stop.
    ///
    /// Forgets the conversation that was stored.
    pub fn score(
        &mut self,
        ids: &[u32],
        mut on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Option<Vec<f64>>, Error> {
        let context = self.model.config().context_len;
        if ids.len() > context {
            return Err(Error::PromptTooLong { prompt: ids.len(), context });
        }
        self.stored.clear();
        let mut losses = Vec::with_capacity(ids.len());
        for chunk in ids.chunks(CHUNK_LEN) {
            let start = self.stored.len();
            // The last token of all predicts nothing that is here.
            let num_wanted = chunk.len().min(ids.len() - 1 - start);
            let logits = self.forward(chunk, 0..num_wanted)?;
            let targets = &ids[start + 1..];
            losses.extend((0..num_wanted).map(|row| negative_log_likelihood(logits.row(row), targets[row])));
            if on_event(Event::Prefill { done: start + chunk.len(), total: ids.len() }).is_break() {
                return Ok(None);
            }
        }
        Ok(Some(losses))
    }

    /// Drops what is stored beyond the longest common prefix; at least the prompt's last token is left to compute.
    fn keep_common_prefix(&mut self, prompt: &[u32]) -> usize {
        let common = self.stored.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = common.min(prompt.len() - 1);
        self.stored.truncate(kept);
        kept
    }

    /// Computes `next` in chunks and draws the token that follows; `None` when the caller said stop.
    fn next_token(
        &mut self,
        next: &[u32],
        request: &Request,
        on_event: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Option<u32>, Error> {
        let total = self.stored.len() + next.len();
        let mut rest = next;
        while rest.len() > CHUNK_LEN {
            let (chunk, later) = rest.split_at(CHUNK_LEN);
            self.forward(chunk, 0..0)?;
            rest = later;
            if on_event(Event::Prefill { done: total - rest.len(), total }).is_break() {
                return Ok(None);
            }
        }
        let logits = self.forward(rest, rest.len() - 1..rest.len())?;
        Ok(Some(sample(logits.row(0), total as u32, &request.sampling)?))
    }

    /// Computes the next tokens of the sequence and stores their keys and values.
    fn forward(&mut self, ids: &[u32], wanted: Range<usize>) -> Result<&Logits, Error> {
        self.batch.clear();
        let chunk = Chunk { ids, first_position: self.stored.len(), blocks: &self.blocks, wanted };
        self.batch.push(chunk, BLOCK_LEN);
        self.stored.extend_from_slice(ids);
        Ok(self.model.forward(&self.batch, &mut self.kv)?)
    }
}

/// `-ln softmax(logits)[target]`, summed in f64.
fn negative_log_likelihood(logits: &[f32], target: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    sum.ln() + largest - f64::from(logits[target as usize])
}
