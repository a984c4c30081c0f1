//! The requests of the mixed load: a fixed set of valid requests, each with one correct reply, and invalid ones with
//! their status.

use serde_json::{Value, json};

use super::server::MODEL;

/// A small random number generator (xorshift) with a seed, so that every run sends the same requests.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound
    }
}

/// A valid request for a whole reply and for a stream. The reply depends neither on the form nor on the rest of the
/// batch.
#[derive(Debug)]
pub(crate) struct ValidRequest {
    pub(crate) path: &'static str,
    pub(crate) whole: Vec<u8>,
    pub(crate) streamed: Vec<u8>,
}

/// Returns the `i`th valid request: long or short, greedy or sampled, with or without stop strings, log probabilities
/// and several choices, with prefixes that some of them share.
pub(crate) fn valid(i: usize) -> ValidRequest {
    let mut random = Random::new(i as u64 + 1);
    let prefix = "a story shared by several requests, so that the prefix cache has hits. ".repeat(random.below(4));
    let own: String = (0..1 + random.below(120)).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
    let text = prefix + &own;
    let mut body = json!({ "model": MODEL, "max_tokens": 1 + random.below(24), "seed": random.below(1 << 20) });
    let is_chat = random.below(2) == 0;
    if is_chat {
        body["messages"] = json!([{ "role": "user", "content": text }]);
    } else {
        body["prompt"] = json!(text);
    }
    body["temperature"] = json!([0.0, 0.7, 1.3][random.below(3)]);
    match random.below(6) {
        0 => body["n"] = json!(2 + random.below(3)),
        1 => body["stop"] = json!(["e", "ing"]),
        2 if is_chat => (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(random.below(6))),
        2 => (body["logprobs"], body["echo"]) = (json!(random.below(6)), json!(random.below(2) == 0)),
        3 => (body["top_k"], body["min_p"]) = (json!(20), json!(0.02)),
        4 => (body["repetition_penalty"], body["frequency_penalty"]) = (json!(1.2), json!(0.5)),
        _ => {}
    }
    let whole = body.to_string().into_bytes();
    body["stream"] = json!(true);
    ValidRequest {
        path: if is_chat { "/v1/chat/completions" } else { "/v1/completions" },
        whole,
        streamed: body.to_string().into_bytes(),
    }
}

/// Returns the choices of a whole reply, which must be the same each time.
pub(crate) fn choices(reply: &str) -> Option<Value> {
    let mut choices = serde_json::from_str::<Value>(reply).ok()?["choices"].take();
    for choice in choices.as_array_mut()? {
        // Chat replies name the text differently; use the name of completions.
        let text = choice["message"]["content"].take();
        if !text.is_null() {
            choice["text"] = text;
        }
        choice.as_object_mut()?.remove("message");
    }
    Some(choices)
}

/// Returns the choices of a stream, assembled from its events; `None` if the stream is incomplete.
pub(crate) fn choices_of_stream(events: &[String]) -> Option<Value> {
    let (last, events) = events.split_last()?;
    let mut choices: Vec<Value> = Vec::new();
    for event in events {
        let mut chunk: Value = serde_json::from_str(event).ok()?;
        // The last chunk of a WebSocket has no choice, only numbers.
        let Some(mut piece) = chunk["choices"].get_mut(0).map(Value::take) else { continue };
        let index = piece["index"].as_u64()? as usize;
        while choices.len() <= index {
            choices.push(json!({ "index": choices.len(), "logprobs": null, "finish_reason": null, "text": "" }));
        }
        let whole = &mut choices[index];
        let text = piece["delta"]["content"].as_str().or(piece["text"].as_str()).unwrap_or_default();
        whole["text"] = json!(whole["text"].as_str()?.to_owned() + text);
        if !piece["finish_reason"].is_null() {
            whole["finish_reason"] = piece["finish_reason"].take();
        }
        append(&mut whole["logprobs"], piece["logprobs"].take());
    }
    (last == "[DONE]").then_some(Value::Array(choices))
}

/// Appends lists, field by field.
fn append(whole: &mut Value, more: Value) {
    match (whole, more) {
        (Value::Array(whole), Value::Array(more)) => whole.extend(more),
        (Value::Object(whole), Value::Object(more)) => {
            for (name, value) in more {
                append(whole.entry(name).or_insert(Value::Null), value);
            }
        }
        (whole @ Value::Null, more) => *whole = more,
        _ => {}
    }
}

/// Returns invalid requests: a path, a body, and the expected status.
pub(crate) fn invalid() -> Vec<(&'static str, Vec<u8>, u16)> {
    let chat = |fields: Value| {
        let mut body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 4 });
        for (name, value) in fields.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        ("/v1/chat/completions", body.to_string().into_bytes(), 400)
    };
    let other = ("/v1/chat/completions", json!({ "model": "other", "messages": [{ "role": "user", "content": "a" }] }));
    vec![
        chat(json!({ "temperature": -1 })),
        chat(json!({ "n": 1_000_000_000 })),
        chat(json!({ "messages": [] })),
        chat(json!({ "stream": true, "top_p": 2 })),
        chat(json!({ "unheard_of": 1 })),
        chat(json!({ "max_tokens": 1_000_000 })),
        chat(json!({ "messages": [{ "role": "user", "content": "long ".repeat(2000) }] })),
        ("/v1/completions", json!({ "model": MODEL, "prompt": [4_000_000_000_u32] }).to_string().into_bytes(), 400),
        ("/v1/completions", json!({ "model": MODEL, "prompt": "" }).to_string().into_bytes(), 400),
        ("/v1/completions", "[".repeat(10_000).into_bytes(), 400),
        ("/v1/completions", b"{\"prompt\": \"\xff\"}".to_vec(), 400),
        (other.0, other.1.to_string().into_bytes(), 404),
        ("/v1/nothing", b"{}".to_vec(), 404),
        ("/metrics", b"{}".to_vec(), 405),
    ]
}
