//! Log probabilities and traces as JSON, for chat and for completions.

use std::sync::Arc;

use pellucid_generate::{Delta, PartKind, ReplyToken, ReplyTrace, TokenVerdict};
use pellucid_sampling::RunnerTrace;
use pellucid_tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::parts::JsonParts;

/// Stands for minus infinity, which JSON cannot express; OpenAI uses the same value.
const MIN_LOGPROB: f32 = -9999.0;

/// The log probabilities of a chat reply.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatToken>,
    /// Always null: models served here have no separate refusals.
    #[schema(required)]
    refusal: Option<Vec<ChatToken>>,
}

/// A token and the most probable tokens at its position.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToken {
    /// The token's id, which OpenAI's object does not have.
    id: u32,
    token: String,
    /// Log probability by the model alone, before bias, penalties and temperature.
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopToken>,
}

/// One of the most probable tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopToken {
    /// The token's id, which OpenAI's object does not have.
    id: u32,
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// The log probabilities of a completion, as lists of equal length.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens at each position, and the token itself if it is not among them. Null if `logprobs` is
    /// 0.
    #[schema(value_type = Option<Vec<Option<Object>>>, required)]
    top_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    /// Characters of the text before each token.
    text_offset: Vec<usize>,
    /// Each token's bytes.
    bytes: Vec<Vec<u8>>,
}

fn finite(logprob: f32) -> f32 {
    logprob.max(MIN_LOGPROB)
}

/// Returns a number with the digits of an f32; as f64 it would show digits that have no meaning.
fn number(logprob: f32) -> Value {
    finite(logprob).to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Returns the bytes of the token `id` at the position of `token`, as the text of the reply has them.
fn bytes_at(tokenizer: &Tokenizer, token: &ReplyToken, id: u32) -> Vec<u8> {
    tokenizer.shown_bytes(id, token.at_start).into_owned()
}

/// Returns a token's text. Bytes that are not valid UTF-8 are spelled out, so that different tokens have different
/// texts.
pub(crate) fn text_of(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

impl ChatToken {
    /// Returns `None` for a token without log probabilities, and for one that is not part of the answer.
    pub(crate) fn new(token: &ReplyToken, tokenizer: &Tokenizer) -> Option<ChatToken> {
        let logprobs = token.logprobs.as_ref().filter(|_| token.part == PartKind::Answer)?;
        let bytes = bytes_at(tokenizer, token, token.id);
        let top = |&(id, logprob): &(u32, f32)| {
            let bytes = bytes_at(tokenizer, token, id);
            TopToken { id, token: text_of(&bytes), logprob: finite(logprob), bytes }
        };
        Some(ChatToken {
            id: token.id,
            token: text_of(&bytes),
            logprob: finite(logprobs.chosen),
            bytes,
            top_logprobs: logprobs.top.iter().map(top).collect(),
        })
    }
}

impl ChatLogprobs {
    pub(crate) fn extend(&mut self, tokens: &[ReplyToken], tokenizer: &Tokenizer) -> Result<(), OutOfMemory> {
        self.content.try_reserve(tokens.len())?;
        self.content.extend(tokens.iter().filter_map(|token| ChatToken::new(token, tokenizer)));
        Ok(())
    }

    /// Adds the JSON of [`ChatLogprobs`] for the tokens of `delta`.
    pub(crate) fn write(delta: &Arc<Delta>, tokenizer: &Arc<Tokenizer>, parts: &mut JsonParts) {
        parts.literal("{\"content\":[");
        let (delta, tokenizer) = (delta.clone(), tokenizer.clone());
        let mut token = 0;
        let next = move || loop {
            let shown = ChatToken::new(delta.tokens.get(token)?, &tokenizer);
            token += 1;
            if shown.is_some() {
                return shown;
            }
        };
        parts.list(std::iter::from_fn(next), |token, out| out.json(&token));
        parts.literal("],\"refusal\":null}");
    }
}

/// Returns the most probable tokens at the position of `token`; `None` for a token without log probabilities.
fn top_of(token: &ReplyToken, tokenizer: &Tokenizer) -> Option<Map<String, Value>> {
    let logprobs = token.logprobs.as_ref()?;
    let mut top = Map::new();
    // As in OpenAI's API, the chosen token is always included, in addition to the most probable ones.
    for (id, logprob) in logprobs.top.iter().copied().chain([(token.id, logprobs.chosen)]) {
        // At the start of a text, two tokens may differ only by a space that is dropped: the more probable one stays.
        top.entry(text_of(&bytes_at(tokenizer, token, id))).or_insert_with(|| number(logprob));
    }
    Some(top)
}

fn chosen(token: &ReplyToken) -> Option<f32> {
    token.logprobs.as_ref().map(|logprobs| finite(logprobs.chosen))
}

impl CompletionLogprobs {
    pub(crate) fn extend(
        &mut self,
        tokens: &[ReplyToken],
        num_top: u32,
        tokenizer: &Tokenizer,
    ) -> Result<(), OutOfMemory> {
        self.tokens.try_reserve(tokens.len())?;
        self.token_logprobs.try_reserve(tokens.len())?;
        self.text_offset.try_reserve(tokens.len())?;
        self.bytes.try_reserve(tokens.len())?;
        if num_top > 0 && !tokens.is_empty() {
            self.top_logprobs.get_or_insert_default().try_reserve(tokens.len())?;
        }
        for token in tokens {
            let bytes = bytes_at(tokenizer, token, token.id);
            self.tokens.push(text_of(&bytes));
            self.token_logprobs.push(chosen(token));
            self.text_offset.push(token.offset);
            if num_top > 0 {
                self.top_logprobs.get_or_insert_default().push(top_of(token, tokenizer));
            }
            self.bytes.push(bytes);
        }
        Ok(())
    }

    /// Adds the JSON of [`CompletionLogprobs`] for the tokens of `delta`.
    pub(crate) fn write(delta: &Arc<Delta>, num_top: u32, tokenizer: &Arc<Tokenizer>, parts: &mut JsonParts) {
        type Write = fn(&ReplyToken, &Tokenizer, &mut ReplyBuffer) -> Result<(), OutOfMemory>;
        let mut column = |name: &str, write: Write| {
            parts.literal(name);
            let (delta, tokenizer) = (delta.clone(), tokenizer.clone());
            let tokens = 0..delta.tokens.len();
            parts.list(tokens, move |token, out| write(&delta.tokens[token], &tokenizer, out));
        };
        column("{\"tokens\":[", |token, tokenizer, out| out.json(&text_of(&bytes_at(tokenizer, token, token.id))));
        column("],\"token_logprobs\":[", |token, _, out| out.json(&chosen(token)));
        if num_top > 0 && !delta.tokens.is_empty() {
            column("],\"top_logprobs\":[", |token, tokenizer, out| out.json(&top_of(token, tokenizer)));
            column("],\"text_offset\":[", |token, _, out| out.json(&token.offset));
        } else {
            column("],\"top_logprobs\":null,\"text_offset\":[", |token, _, out| out.json(&token.offset));
        }
        column("],\"bytes\":[", |token, tokenizer, out| out.json(&bytes_at(tokenizer, token, token.id)));
        parts.literal("]}");
    }
}

/// Returns how a token was chosen, in the format of `pellucid explain --json`.
pub(crate) fn trace(shown: &ReplyTrace, tokenizer: &Tokenizer) -> Value {
    let trace = &shown.token;
    let text = |id: u32| text_of(&tokenizer.shown_bytes(id, false));
    let runner = |runner: RunnerTrace| {
        json!({ "id": runner.id, "text": text(runner.id), "probability": runner.probability, "u": runner.u,
                "time": runner.time })
    };
    let step = |step: &pellucid_sampling::StepTrace| {
        let candidates: Vec<Value> = (step.candidates.iter())
            .map(|c| json!({ "id": c.id, "text": text(c.id), "before": c.before, "after": c.after, "cut": c.cut }))
            .collect();
        json!({ "name": step.name, "setting": step.setting, "entered": step.entered, "left": step.left,
                "candidates": candidates })
    };
    let mut shown_trace = json!({
        "position": trace.position,
        "id": trace.draw.winner.id,
        "text": text(trace.draw.winner.id),
        "logprob": number(trace.logprob),
        "batch_size": shown.batch_size,
        "steps": trace.steps.iter().map(step).collect::<Vec<_>>(),
        "draw": {
            "entrants": trace.draw.entrants,
            "winner": runner(trace.draw.winner),
            "runner_up": trace.draw.runner_up.map(runner),
        },
        "proposal": shown.proposal.map(|proposal| json!({
            "drafter": proposal.drafter.name(),
            "id": proposal.token,
            "text": text(proposal.token),
            "accepted": shown.is_accepted(),
        })),
    });
    if !shown.verdicts.is_empty() {
        let verdict = |verdict: &TokenVerdict| json!({ "guard": verdict.guard, "verdict": verdict.kind.verdict() });
        shown_trace["guards"] = shown.verdicts.iter().map(verdict).collect();
    }
    shown_trace
}
