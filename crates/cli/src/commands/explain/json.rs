//! The trace for programs, as JSON lines: a header, an object for each token, an object for the end.

use pellucid_engine::TokenEvent;
use pellucid_generate::TokenVerdict;
use pellucid_sampling::{OPTIONS, OptionKind, RunnerTrace, SamplingParams, StepKind, TokenTrace, ValueRef};
use pellucid_tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Returns the header: the part that is common to all tokens.
pub(super) fn header(
    model: &str,
    prompt: &[u32],
    preset: Option<&str>,
    origin: &str,
    params: &SamplingParams,
    chain: &[(StepKind, String)],
) -> Value {
    let steps: Vec<Value> =
        chain.iter().map(|(kind, setting)| json!({ "name": kind.name(), "setting": setting })).collect();
    json!({
        "type": "header",
        "model": model,
        "prompt_ids": prompt,
        "preset": preset,
        "origin": origin,
        "seed": params.seed,
        "parameters": parameters(params),
        "chain": steps,
    })
}

/// Returns every parameter in effect but the seed, by the name that it has in errors.
pub(crate) fn parameters(params: &SamplingParams) -> Value {
    let mut all = Map::new();
    for option in OPTIONS.iter().filter(|option| option.kind() != OptionKind::Seed) {
        all.insert(option.param().to_owned(), option.effective(params).map_or(Value::Null, parameter));
    }
    all.insert("end_ids".to_owned(), json!(params.end_ids));
    Value::Object(all)
}

fn parameter(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Number(value) => number(value),
        ValueRef::Count(value) => json!(value),
        ValueRef::Seed(value) => json!(value),
        ValueRef::TokenBias(list) => list.iter().map(|&(id, bias)| json!({ "id": id, "bias": number(bias) })).collect(),
        ValueRef::Tokens(ids) => json!(ids),
        ValueRef::Sequences(sequences) => json!(sequences),
        ValueRef::Steps(kinds) => json!(kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>()),
    }
}

/// Converts an f32 so that it prints as it was typed: 0.7, not 0.699999988079071.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value))
}

/// Returns the object of one token. `index` counts from 0; `trace` is that of the event.
pub(super) fn token(
    tokenizer: &Tokenizer,
    index: usize,
    event: &TokenEvent,
    trace: &TokenTrace,
    end: Option<&str>,
) -> Value {
    let text = |id: u32| text_of(tokenizer, id);
    let steps: Vec<Value> = (trace.steps.iter())
        .map(|step| {
            let candidates: Vec<Value> = (step.candidates.iter())
                .map(|c| json!({ "id": c.id, "text": text(c.id), "before": c.before, "after": c.after, "cut": c.cut }))
                .collect();
            json!({ "name": step.name, "setting": step.setting, "entered": step.entered, "left": step.left,
                    "candidates": candidates })
        })
        .collect();
    let runner = |runner: RunnerTrace| {
        json!({ "id": runner.id, "text": text(runner.id), "probability": runner.probability, "u": runner.u,
                "time": runner.time })
    };
    let top: Vec<Value> = (event.logprobs.iter())
        .flat_map(|logprobs| &logprobs.top)
        .map(|&(id, logprob)| json!({ "id": id, "text": text(id), "logprob": logprob }))
        .collect();
    let id = trace.draw.winner.id;
    json!({
        "type": "token",
        "index": index,
        "position": trace.position,
        "id": id,
        "text": text(id),
        "bytes": tokenizer.token(id).map(|token| token.bytes.into_owned()),
        "logprob": trace.logprob,
        "batch_size": event.batch_size,
        "top": top,
        "steps": steps,
        "draw": {
            "entrants": trace.draw.entrants,
            "winner": runner(trace.draw.winner),
            "runner_up": trace.draw.runner_up.map(runner),
        },
        "proposal": event.proposal.map(|proposal| json!({
            "drafter": proposal.drafter.name(),
            "id": proposal.token,
            "text": text(proposal.token),
            "accepted": proposal.token == id,
        })),
        "end": end,
    })
}

/// Returns the verdicts of guards on one token.
pub(super) fn verdicts(verdicts: &[TokenVerdict]) -> Value {
    verdicts.iter().map(|verdict| json!({ "guard": verdict.guard, "verdict": verdict.kind.verdict() })).collect()
}

pub(super) fn end(reason: &str, text: &str, num_tokens: usize) -> Value {
    json!({ "type": "end", "reason": reason, "text": text, "num_tokens": num_tokens })
}

/// Returns the text of a token. Bytes that are not UTF-8 become U+FFFD; the field `bytes` has them unchanged.
pub(super) fn text_of(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    tokenizer.token(id).map(|token| String::from_utf8_lossy(&token.bytes).into_owned())
}
