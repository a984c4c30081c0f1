//! The record for machines: a header, an object for each token, an object for the end; one a line.

use pellucid_sampling::{Logprobs, RunnerTrace, SamplingParams, StepKind, TokenTrace};
use pellucid_tokenizer::Tokenizer;
use serde_json::{Value, json};

/// What all the tokens have in common.
pub(super) fn header(
    model: &str,
    prompt: &[u32],
    preset: Option<&str>,
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
        "seed": params.seed,
        "parameters": parameters(params),
        "chain": steps,
    })
}

/// Every parameter by the name under which it is refused when it is out of range.
fn parameters(p: &SamplingParams) -> Value {
    let bias: Vec<Value> = p.logit_bias.iter().map(|&(id, bias)| json!({ "id": id, "bias": number(bias) })).collect();
    json!({
        "temperature": number(p.temperature),
        "dynamic_temperature_range": number(p.dynamic_temperature_range),
        "dynamic_temperature_exponent": number(p.dynamic_temperature_exponent),
        "top_n_sigma": number(p.top_n_sigma),
        "top_k": p.top_k,
        "typical_p": number(p.typical_p),
        "top_p": number(p.top_p),
        "min_p": number(p.min_p),
        "xtc_probability": number(p.xtc_probability),
        "xtc_threshold": number(p.xtc_threshold),
        "repetition_penalty": number(p.repetition_penalty),
        "frequency_penalty": number(p.frequency_penalty),
        "presence_penalty": number(p.presence_penalty),
        "penalty_window": p.penalty_window,
        "dry_multiplier": number(p.dry.multiplier),
        "dry_base": number(p.dry.base),
        "dry_allowed_length": p.dry.allowed_length,
        "dry_range": p.dry.range,
        "dry_sequence_breakers": p.dry.breakers,
        "mirostat_tau": p.mirostat.map(|mirostat| number(mirostat.tau)),
        "mirostat_eta": p.mirostat.map(|mirostat| number(mirostat.eta)),
        "logit_bias": bias,
        "banned_tokens": p.banned_tokens,
        "allowed_tokens": p.allowed_tokens,
        "end_ids": p.end_ids,
        "stop_ids": p.stop_ids,
        "min_tokens": p.min_tokens,
        "samplers": p.samplers.as_ref().map(|kinds| kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>()),
    })
}

/// An f32 as it was typed: 0.7, not 0.699999988079071.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value))
}

/// One choice. `index` counts from 0.
pub(super) fn token(
    tokenizer: &Tokenizer,
    index: usize,
    trace: &TokenTrace,
    logprobs: &Logprobs,
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
    let top: Vec<Value> =
        (logprobs.top.iter()).map(|&(id, logprob)| json!({ "id": id, "text": text(id), "logprob": logprob })).collect();
    let id = trace.draw.winner.id;
    json!({
        "type": "token",
        "index": index,
        "position": trace.position,
        "id": id,
        "text": text(id),
        "bytes": tokenizer.token(id).map(|token| token.bytes.into_owned()),
        "logprob": trace.logprob,
        "top": top,
        "steps": steps,
        "draw": {
            "entrants": trace.draw.entrants,
            "winner": runner(trace.draw.winner),
            "runner_up": trace.draw.runner_up.map(runner),
        },
        "end": end,
    })
}

pub(super) fn end(reason: &str, text: &str, num_tokens: usize) -> Value {
    json!({ "type": "end", "reason": reason, "text": text, "num_tokens": num_tokens })
}

/// Bytes that are no text become U+FFFD here; `bytes` has them as they are.
fn text_of(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    tokenizer.token(id).map(|token| String::from_utf8_lossy(&token.bytes).into_owned())
}
