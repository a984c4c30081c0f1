//! Log probabilities and traces as JSON, for chat and for completions.

use pellucid_generate::ReplyToken;
use pellucid_sampling::{RunnerTrace, TokenTrace};
use pellucid_tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

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
    token: String,
    /// Log probability by the model alone, before bias, penalties and temperature.
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopToken>,
}

/// One of the most probable tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopToken {
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

fn bytes_of(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    tokenizer.token(id).map_or_else(Vec::new, |token| token.bytes.into_owned())
}

/// Returns a token's text. Bytes that are not valid UTF-8 are spelled out, so that different tokens have different
/// texts.
fn text_of(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

impl ChatLogprobs {
    pub(crate) fn extend(&mut self, tokens: &[ReplyToken], tokenizer: &Tokenizer) {
        for token in tokens {
            let Some(logprobs) = &token.logprobs else { continue };
            let bytes = bytes_of(tokenizer, token.id);
            let top = |&(id, logprob): &(u32, f32)| {
                let bytes = bytes_of(tokenizer, id);
                TopToken { token: text_of(&bytes), logprob: finite(logprob), bytes }
            };
            self.content.push(ChatToken {
                token: text_of(&bytes),
                logprob: finite(logprobs.chosen),
                bytes,
                top_logprobs: logprobs.top.iter().map(top).collect(),
            });
        }
    }
}

impl CompletionLogprobs {
    pub(crate) fn extend(&mut self, tokens: &[ReplyToken], num_top: u32, tokenizer: &Tokenizer) {
        for token in tokens {
            let bytes = bytes_of(tokenizer, token.id);
            self.tokens.push(text_of(&bytes));
            self.token_logprobs.push(token.logprobs.as_ref().map(|logprobs| finite(logprobs.chosen)));
            self.text_offset.push(token.offset);
            if num_top > 0 {
                let top = token.logprobs.as_ref().map(|logprobs| {
                    let entry = |&(id, logprob): &(u32, f32)| (text_of(&bytes_of(tokenizer, id)), number(logprob));
                    let mut top: Map<String, Value> = logprobs.top.iter().map(entry).collect();
                    // As in OpenAI's API, the chosen token is always included, in addition to the most probable ones.
                    top.entry(text_of(&bytes)).or_insert_with(|| number(logprobs.chosen));
                    top
                });
                self.top_logprobs.get_or_insert_default().push(top);
            }
            self.bytes.push(bytes);
        }
    }
}

/// Returns how a token was chosen, in the format of `pellucid explain --json`.
pub(crate) fn trace(trace: &TokenTrace, tokenizer: &Tokenizer) -> Value {
    let text = |id: u32| text_of(&bytes_of(tokenizer, id));
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
    json!({
        "position": trace.position,
        "id": trace.draw.winner.id,
        "text": text(trace.draw.winner.id),
        "logprob": number(trace.logprob),
        "steps": trace.steps.iter().map(step).collect::<Vec<_>>(),
        "draw": {
            "entrants": trace.draw.entrants,
            "winner": runner(trace.draw.winner),
            "runner_up": trace.draw.runner_up.map(runner),
        },
    })
}
