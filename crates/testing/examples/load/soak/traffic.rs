//! The requests of the soak test: each kind of traffic, with the reply that the same request gets when it is alone.

use serde_json::{Value, json};

use super::connection::{Connection, Reply, request};
use crate::requests::{self, Random};
use crate::server::{MODEL, Outcome};

/// Keys of the tenants; the first may read metrics.
pub(super) const KEYS: [&str; 3] = ["soak-tenant-one", "soak-tenant-two", "soak-tenant-three"];

/// The kinds of traffic, with the number of each in 100 requests.
pub(super) const KINDS: [(Kind, usize); 11] = [
    (Kind::Chat, 15),
    (Kind::Completion, 15),
    (Kind::Stream, 18),
    (Kind::WebSocket, 6),
    (Kind::Tokenize, 10),
    (Kind::Detokenize, 4),
    (Kind::Logprobs, 8),
    (Kind::Several, 7),
    (Kind::Beams, 5),
    (Kind::Cancelled, 5),
    (Kind::Invalid, 7),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
    /// A chat or a completion as server-sent events.
    Stream,
    WebSocket,
    Tokenize,
    Detokenize,
    /// With log probabilities, some with those of the prompt.
    Logprobs,
    /// `n` replies.
    Several,
    Beams,
    /// A stream whose client leaves.
    Cancelled,
    Invalid,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Chat => "chat",
            Kind::Completion => "completion",
            Kind::Stream => "stream",
            Kind::WebSocket => "WebSocket",
            Kind::Tokenize => "tokenize",
            Kind::Detokenize => "detokenize",
            Kind::Logprobs => "log probabilities",
            Kind::Several => "several replies",
            Kind::Beams => "beam search",
            Kind::Cancelled => "cancelled stream",
            Kind::Invalid => "invalid request",
        }
    }
}

/// A request with its expected reply.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) kind: Kind,
    /// The request with the key of each tenant.
    requests: Vec<Vec<u8>>,
    body: String,
    expected: Expected,
}

/// A reply as far as it is the same each time: without ids, times and numbers of cached tokens.
#[derive(Debug)]
enum Expected {
    /// Not known yet.
    Nothing,
    /// The bytes of `choices` of a whole reply, or all bytes.
    Bytes(String),
    /// The choices that events add up to. Their pieces depend on how quickly the client reads.
    Choices(Value),
    /// A status with an error.
    Refused(u16),
}

/// Result of one request.
#[derive(Debug)]
pub(super) enum Checked {
    Equal,
    /// Refused for now: 429 or 503.
    Busy,
    Wrong(String),
}

/// Returns the requests of each kind, in the order of [`KINDS`], without their replies.
pub(super) fn exchanges(variants: usize) -> Vec<Vec<Exchange>> {
    let of_kind = |kind: Kind| match kind {
        Kind::Invalid => requests::invalid()
            .into_iter()
            .map(|(path, body, status)| Exchange::new(kind, path, &body, Expected::Refused(status)))
            .collect(),
        _ => (0..variants).map(|index| valid(kind, index)).collect(),
    };
    KINDS.iter().map(|&(kind, _)| of_kind(kind)).collect()
}

fn valid(kind: Kind, index: usize) -> Exchange {
    let mut random = Random::new((kind as u64) << 32 | (index as u64 + 1));
    let prefix = "a beginning that several requests share, so that the prefix cache has hits. ".repeat(random.below(2));
    let own: String = (0..1 + random.below(40)).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
    let text = prefix + &own;
    let is_chat = match kind {
        Kind::Chat | Kind::WebSocket => true,
        Kind::Completion | Kind::Beams => false,
        _ => index.is_multiple_of(2),
    };
    if kind == Kind::Tokenize {
        return Exchange::new(
            kind,
            "/tokenize",
            json!({ "model": MODEL, "prompt": text }).to_string().as_bytes(),
            Expected::Nothing,
        );
    }
    if kind == Kind::Detokenize {
        let tokens: Vec<usize> = (0..1 + random.below(40)).map(|_| 5 + random.below(80)).collect();
        let body = json!({ "model": MODEL, "tokens": tokens });
        return Exchange::new(kind, "/detokenize", body.to_string().as_bytes(), Expected::Nothing);
    }
    let mut body = json!({ "model": MODEL, "max_tokens": 1 + random.below(5) });
    match is_chat {
        true => body["messages"] = json!([{ "role": "user", "content": text }]),
        false => body["prompt"] = json!(text),
    }
    if kind != Kind::Beams {
        body["seed"] = json!(random.below(1 << 20));
        body["temperature"] = json!([0.0, 0.8, 1.3][random.below(3)]);
    }
    match kind {
        Kind::Logprobs if is_chat => (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(random.below(4))),
        Kind::Logprobs => (body["logprobs"], body["echo"]) = (json!(random.below(4)), json!(random.below(2) == 0)),
        Kind::Several => body["n"] = json!(2 + random.below(2)),
        Kind::Beams => (body["beam_width"], body["n"]) = (json!(2 + random.below(2)), json!(1 + random.below(2))),
        Kind::Stream | Kind::Cancelled => body["stream"] = json!(true),
        _ => {}
    }
    match random.below(5) {
        0 if kind != Kind::Beams => body["stop"] = json!(["e", "ing"]),
        1 if kind != Kind::Beams => (body["top_k"], body["repetition_penalty"]) = (json!(20), json!(1.2)),
        _ => {}
    }
    // A client that leaves must leave a request that still runs.
    if kind == Kind::Cancelled {
        body["max_tokens"] = json!(100);
    }
    let path = if is_chat { "/v1/chat/completions" } else { "/v1/completions" };
    Exchange::new(kind, path, body.to_string().as_bytes(), Expected::Nothing)
}

impl Exchange {
    fn new(kind: Kind, path: &str, body: &[u8], expected: Expected) -> Exchange {
        let requests = KEYS.iter().map(|key| request("POST", path, key, body)).collect();
        Exchange { kind, requests, body: String::from_utf8_lossy(body).into_owned(), expected }
    }

    /// Sends the request alone and keeps its reply.
    pub(super) fn learn(&mut self, connection: &mut Connection) -> Outcome<()> {
        if self.kind == Kind::Cancelled || matches!(self.expected, Expected::Refused(_)) {
            return Ok(());
        }
        self.expected = self.ask(connection, 0)?.map_err(|reply| format!("alone, {}: {reply:?}", self.body))?;
        Ok(())
    }

    /// Sends the request as a tenant and compares its reply.
    pub(super) fn send(&self, connection: &mut Connection, tenant: usize, random: &mut Random) -> Outcome<Checked> {
        if self.kind == Kind::Cancelled {
            connection.abandon(&self.requests[tenant], random.below(6))?;
            return Ok(Checked::Equal);
        }
        let wrong =
            |found: String| Checked::Wrong(format!("{}\nexpected {:?}\nfound {found}", self.body, self.expected));
        Ok(match (&self.expected, self.ask(connection, tenant)?) {
            (Expected::Bytes(expected), Ok(Expected::Bytes(found))) if *expected == found => Checked::Equal,
            (Expected::Choices(expected), Ok(Expected::Choices(found))) if *expected == found => Checked::Equal,
            (Expected::Refused(status), Err(reply)) if reply.status == *status && reply.body.contains("\"error\"") => {
                Checked::Equal
            }
            (_, Err(Reply { status: 429 | 503, .. })) => Checked::Busy,
            (_, found) => wrong(format!("{found:?}")),
        })
    }

    /// Sends the request; returns the part of the reply that is compared, or a reply with another status than 200.
    fn ask(&self, connection: &mut Connection, tenant: usize) -> Outcome<Result<Expected, Reply>> {
        if self.kind == Kind::WebSocket {
            let messages = connection.dialogue(KEYS[tenant], &self.body)?;
            // A refusal is an error object in place of the chunks.
            return Ok(match requests::choices_of_stream(&messages) {
                Some(choices) => Ok(Expected::Choices(choices)),
                None => {
                    let types = ["rate_limit_error", "service_unavailable"];
                    let busy = messages.iter().any(|message| types.iter().any(|name| message.contains(name)));
                    Err(Reply { status: if busy { 503 } else { 400 }, body: messages.concat() })
                }
            });
        }
        let reply = connection.ask(&self.requests[tenant])?;
        if reply.status != 200 {
            return Ok(Err(reply));
        }
        let expected = match self.kind {
            Kind::Stream => {
                let events: Vec<String> = reply
                    .body
                    .split("\n\n")
                    .filter_map(|event| event.strip_prefix("data: "))
                    .map(str::to_owned)
                    .collect();
                requests::choices_of_stream(&events).map(Expected::Choices)
            }
            Kind::Tokenize | Kind::Detokenize => Some(Expected::Bytes(reply.body.clone())),
            _ => choices(&reply.body).map(|text| Expected::Bytes(text.to_owned())),
        };
        Ok(expected.ok_or(reply))
    }
}

/// Returns the bytes of `choices`.
fn choices(body: &str) -> Option<&str> {
    let start = body.find("\"choices\":")?;
    let end = body.rfind(",\"usage\":")?;
    body.get(start..end)
}
