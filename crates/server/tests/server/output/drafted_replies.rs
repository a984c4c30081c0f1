//! Speculation through the API: replies are the same with drafters, and say what was drafted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::support::{Server, Setup, chat_body, completion_body};
use pellucid_engine::{DraftContext, Drafter};
use pellucid_generate::{
    Guard, GuardError, Guards, OnGuardError, Passage, PromptText, ReplyScanner, ReplyText, Scan, Verdict,
};
use serde_json::{Value, json};

/// Remembers the outputs of earlier requests and proposes them again. Every `spoiled_every`th token is a wrong one.
struct Echo {
    outputs: HashMap<Vec<u32>, Vec<Vec<u32>>>,
    spoiled_every: usize,
    num_proposed: usize,
}

impl Echo {
    fn boxed(spoiled_every: usize) -> Option<Box<dyn Drafter>> {
        Some(Box::new(Echo { outputs: HashMap::new(), spoiled_every, num_proposed: 0 }))
    }
}

impl Drafter for Echo {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let (prompt, output) = context.tokens.split_at(context.prompt_len);
        let outputs = self.outputs.entry(prompt.to_vec()).or_default();
        let longer = outputs.iter().filter(|known| known.starts_with(output) && known.len() > output.len()).max();
        for &token in longer.into_iter().flat_map(|known| &known[output.len()..]).take(max_len) {
            self.num_proposed += 1;
            draft.push(if self.num_proposed.is_multiple_of(self.spoiled_every) { token ^ 1 } else { token });
        }
        if longer.is_none() {
            outputs.push(output.to_vec());
        }
    }
}

fn with_drafter(spoiled_every: usize) -> Server {
    Server::with(Setup { drafter: Echo::boxed(spoiled_every), ..Setup::default() })
}

/// Returns a reply or chunk without what may differ: ids, times, padding, a random seed, what was drafted, and with
/// which other sequences a token was computed.
fn without_drafts(mut reply: Value) -> Value {
    for name in ["id", "created", "obfuscation"] {
        reply.as_object_mut().unwrap().remove(name);
    }
    for choice in reply["choices"].as_array_mut().unwrap() {
        for token in choice.get_mut("trace").and_then(Value::as_array_mut).into_iter().flatten() {
            token.as_object_mut().unwrap().remove("proposal").expect("null if nothing was proposed");
            token.as_object_mut().unwrap().remove("batch_size").expect("the number of sequences in the step");
        }
    }
    if let Some(pellucid) = reply.get_mut("pellucid").and_then(Value::as_object_mut) {
        pellucid.retain(|name, _| !["timings", "speculation", "cached_tokens", "seed"].contains(&name.as_str()));
    }
    if let Some(Value::Object(usage)) = reply.get_mut("usage") {
        usage.remove("prompt_tokens_details");
    }
    reply
}

const SETTINGS: [&str; 14] = [
    "\"temperature\":0,\"max_tokens\":40",
    "\"seed\":7,\"max_tokens\":60",
    "\"seed\":7,\"n\":3,\"max_tokens\":40",
    "\"seed\":9,\"max_tokens\":60,\"stop\":[\"a\",\"Qx\",\"7\"]",
    "\"seed\":9,\"n\":4,\"max_tokens\":60,\"stop\":\"e\"",
    "\"seed\":5,\"logprobs\":LOGPROBS,\"max_tokens\":40,\"stop\":[\"b\"]",
    "\"seed\":5,\"logprobs\":LOGPROBS,\"max_tokens\":40,\"trace\":true,\"n\":2,\"stop\":[\"c\",\"d\"]",
    "\"beam_width\":3,\"n\":2,\"max_tokens\":6",
    "\"seed\":3,\"top_k\":5,\"min_p\":0.01,\"repetition_penalty\":1.1,\"dry_multiplier\":0.8,\"max_tokens\":40",
    "\"seed\":3,\"mirostat_tau\":3,\"max_tokens\":40",
    "\"seed\":4,\"min_tokens\":20,\"stop\":[\"a\",\"e\",\"i\"],\"max_tokens\":50",
    "\"temperature\":0,\"loop_guard\":true,\"max_tokens\":150",
    "\"seed\":6,\"logit_bias\":{\"60\":4},\"ignore_eos\":true,\"max_tokens\":50",
    "\"seed\":8,\"temperature\":1.5,\"frequency_penalty\":0.5,\"max_tokens\":50",
];

#[test]
fn replies_are_the_same_with_a_drafter() {
    let (plain, drafted) = (Server::start(), with_drafter(5));
    let routes =
        [("/v1/chat/completions", chat_body as fn(&str) -> String, "true"), ("/v1/completions", completion_body, "2")];
    for setting in SETTINGS {
        for (path, body, logprobs) in routes {
            let setting = setting.replace("LOGPROBS", logprobs);
            let expected = without_drafts(plain.post(path, &body(&setting)).ok());
            for round in 0..3 {
                let reply = without_drafts(drafted.post(path, &body(&setting)).ok());
                assert_eq!(reply, expected, "{path} {setting}, round {round}");
            }
            let streamed = body(&format!("{setting},\"stream\":true,\"stream_options\":{{\"include_usage\":true}}"));
            let chunks = |server: &Server| server.stream(path, &streamed).chunks().into_iter().map(without_drafts);
            let by_choice = |chunks: &mut dyn Iterator<Item = Value>| {
                let mut by_choice: HashMap<String, Vec<Value>> = HashMap::new();
                chunks.for_each(|chunk| {
                    by_choice.entry(chunk["choices"][0]["index"].to_string()).or_default().push(chunk)
                });
                by_choice
            };
            let (one, other) = (by_choice(&mut chunks(&plain)), by_choice(&mut chunks(&drafted)));
            assert_eq!(one, other, "{path} {setting}");
        }
    }
    let counts = |result: &str| {
        let text = drafted.get("/metrics").text();
        let name = format!("pellucid_draft_tokens_total{{drafter=\"custom\",result=\"{result}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name).map(str::to_owned));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse::<u64>().unwrap()
    };
    assert!(counts("accepted") > 500 && counts("rejected") > 100, "{} {}", counts("accepted"), counts("rejected"));
    let theirs = drafted.metric("vllm:spec_decode_num_draft_tokens_total");
    assert_eq!(theirs as u64, counts("accepted") + counts("rejected"));
    let num_drafts = drafted.metric("vllm:spec_decode_num_drafts_total");
    assert!(num_drafts > 0.0 && num_drafts <= theirs, "{num_drafts} drafts of {theirs} tokens");
    assert_eq!(drafted.metric("vllm:spec_decode_num_accepted_tokens_total") as u64, counts("accepted"));
}

/// The texts that a [`Recorder`] is given, by the order of the replies.
type Seen = Arc<Mutex<Vec<String>>>;

/// A guard that passes everything, and records what it is given of each reply.
#[derive(Debug, Default)]
struct Recorder {
    seen: Seen,
}

impl Guard for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn judge_prompt(&self, _: &PromptText) -> Result<Verdict, GuardError> {
        Ok(Verdict::Pass)
    }

    fn judge_reply(&self, _: &PromptText, _: &ReplyText) -> Result<Verdict, GuardError> {
        Err(GuardError("the scanner judges replies".into()))
    }

    fn scanner(&self) -> Option<Box<dyn ReplyScanner>> {
        let mut seen = self.seen.lock().unwrap();
        seen.push(String::new());
        Some(Box::new(Recording { seen: self.seen.clone(), index: seen.len() - 1, num_pieces: 0 }))
    }
}

#[derive(Debug)]
struct Recording {
    seen: Seen,
    index: usize,
    num_pieces: usize,
}

impl ReplyScanner for Recording {
    fn push(&mut self, piece: usize, _: Passage, text: &str) -> Scan {
        self.seen.lock().unwrap()[self.index] += text;
        self.num_pieces = piece + 1;
        Scan::Passed(self.num_pieces)
    }

    fn finish(&mut self) -> Scan {
        Scan::Passed(self.num_pieces)
    }
}

#[test]
fn a_guard_sees_only_tokens_that_the_model_chose() {
    let recorder = Recorder::default();
    let seen = recorder.seen.clone();
    let guards = Guards::new(vec![Arc::new(recorder)], OnGuardError::Closed);
    let server = Server::with(Setup { drafter: Echo::boxed(3), guards, ..Setup::default() });
    let reply = repeated(&server, "\"seed\":7,\"max_tokens\":60,\"ignore_eos\":true");
    let counts = &reply["pellucid"]["speculation"];
    assert!(counts["accepted"].as_u64() > Some(10) && counts["rejected"].as_u64() > Some(10), "{counts}");
    let text = reply["choices"][0]["text"].as_str().unwrap();
    // A guard is also asked for a scanner to learn whether it has one.
    let seen: Vec<String> = seen.lock().unwrap().iter().filter(|text| !text.is_empty()).cloned().collect();
    assert_eq!(seen, [text; 3]);
}

/// Completes with a server until its drafter knows the reply, and returns the last reply.
fn repeated(server: &Server, fields: &str) -> Value {
    for _ in 0..2 {
        server.complete(fields).ok();
    }
    server.complete(fields).ok()
}

#[test]
fn a_reply_counts_what_was_drafted() {
    let server = with_drafter(4);
    let fields = "\"seed\":7,\"max_tokens\":60,\"ignore_eos\":true,\"trace\":true";
    let reply = repeated(&server, fields);
    let counts = &reply["pellucid"]["speculation"];
    let of = |name: &str| counts[name].as_u64().unwrap();
    assert!(of("accepted") > 20 && of("rejected") > 5, "{counts}");
    assert_eq!(of("drafted"), of("accepted") + of("rejected"));
    let by_drafter =
        json!({ "custom": { "drafted": of("drafted"), "accepted": of("accepted"), "rejected": of("rejected") } });
    assert_eq!(counts["drafters"], by_drafter);
    assert!(counts.get("note").is_none());
    let details = &reply["usage"]["completion_tokens_details"];
    assert_eq!(
        (&details["accepted_prediction_tokens"], &details["rejected_prediction_tokens"]),
        (&json!(0), &json!(0))
    );
    // The trace of each token says who proposed it.
    let trace = reply["choices"][0]["trace"].as_array().unwrap();
    assert_eq!(trace.len(), 60);
    let mut num_accepted = 0;
    for token in trace.iter().filter(|token| !token["proposal"].is_null()) {
        let proposal = &token["proposal"];
        assert_eq!(proposal["drafter"], "custom");
        assert_eq!(proposal["accepted"], proposal["id"] == token["id"], "{token}");
        assert_eq!(proposal["text"] == token["text"], proposal["id"] == token["id"]);
        num_accepted += u64::from(proposal["accepted"] == true);
    }
    assert_eq!(num_accepted, of("accepted"));
}

#[test]
fn a_stop_string_in_the_middle_of_a_draft_ends_the_counts() {
    let server = with_drafter(usize::MAX);
    let fields = "\"seed\":7,\"max_tokens\":60,\"ignore_eos\":true,\"logprobs\":0";
    let whole = repeated(&server, fields);
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(20).take(2).collect();
    let expected = &text[..text.find(&stop).unwrap()];
    let stopped = server.complete(&format!("{fields},\"stop\":{}", Value::from(stop.as_str()))).ok();
    assert_eq!(stopped["choices"][0]["text"], expected);
    assert_eq!(stopped["pellucid"]["endings"][0]["reason"], "stop_string");
    // Tokens are bytes here, and the tokens of the stop string were generated.
    let num_tokens = stopped["usage"]["completion_tokens"].as_u64().unwrap();
    let num_shown = stopped["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len() as u64;
    assert_eq!((num_shown, num_tokens), (expected.len() as u64, (expected.len() + stop.len()) as u64));
    let counts = &stopped["pellucid"]["speculation"];
    assert!(counts["accepted"].as_u64().unwrap() > 0 && counts["drafted"].as_u64().unwrap() <= num_tokens, "{counts}");
}

#[test]
fn a_request_may_switch_speculation_off() {
    let server = with_drafter(usize::MAX);
    let fields = "\"seed\":7,\"max_tokens\":30,\"ignore_eos\":true";
    let reply = repeated(&server, fields);
    assert!(reply["pellucid"]["speculation"]["accepted"].as_u64().unwrap() > 0);
    for off in ["chat", "completion"] {
        let fields = format!("{fields},\"speculate\":false");
        let reply = if off == "chat" { server.chat(&fields).ok() } else { server.complete(&fields).ok() };
        let counts = &reply["pellucid"]["speculation"];
        assert_eq!(*counts, json!({ "drafted": 0, "accepted": 0, "rejected": 0, "drafters": {} }), "{off}");
    }
    for wrong in ["\"yes\"", "0", "{}"] {
        let (param, _) = server.chat(&format!("\"speculate\":{wrong}")).refused(400);
        assert_eq!(param.as_deref(), Some("speculate"));
    }
}

#[test]
fn beam_search_runs_without_speculation_and_says_so() {
    let server = with_drafter(usize::MAX);
    for prediction in ["", ",\"prediction\":{\"type\":\"content\",\"content\":\"abc\"}"] {
        let reply = server.chat(&format!("\"beam_width\":3,\"max_tokens\":6{prediction}")).ok();
        let counts = &reply["pellucid"]["speculation"];
        assert_eq!((&counts["drafted"], &counts["note"]), (&json!(0), &json!("beam search runs without speculation")));
    }
}

#[test]
fn a_prediction_is_proposed_and_changes_no_reply() {
    // The server has no drafters of its own.
    let server = Server::start();
    for fields in ["\"temperature\":0,\"max_tokens\":60", "\"seed\":7,\"n\":2,\"logprobs\":true,\"max_tokens\":60"] {
        let fields = format!("{fields},\"ignore_eos\":true");
        let plain = server.chat(&fields).ok();
        let text = plain["choices"][0]["message"]["content"].as_str().unwrap();
        let reversed: String = text.chars().rev().collect();
        let predicted = |content: &Value| {
            server.chat(&format!("{fields},\"prediction\":{{\"type\":\"content\",\"content\":{content}}}")).ok()
        };
        let details = |reply: &Value| {
            let details = &reply["usage"]["completion_tokens_details"];
            let of = |name: &str| details[name].as_u64().unwrap();
            (of("accepted_prediction_tokens"), of("rejected_prediction_tokens"))
        };
        let right = predicted(&json!(text));
        assert_eq!(right["choices"], plain["choices"], "{fields}");
        assert_eq!(right["usage"]["completion_tokens"], plain["usage"]["completion_tokens"]);
        assert!(details(&right).0 > 30, "{:?}", details(&right));
        let counts = &right["pellucid"]["speculation"]["drafters"]["prediction"];
        assert_eq!((&counts["accepted"], &counts["rejected"]), (&json!(details(&right).0), &json!(details(&right).1)));
        let wrong = predicted(&json!(reversed));
        assert_eq!(wrong["choices"], plain["choices"], "{fields}");
        assert!(details(&wrong).0 < details(&right).0);
        let parts = json!([{ "type": "text", "text": text }, { "type": "text", "text": "x" }]);
        assert_eq!(predicted(&parts)["choices"], plain["choices"], "{fields}");
    }
}

#[test]
fn predictions_are_strict() {
    let server = Server::start();
    let text = "b".repeat(crate::support::CONTEXT + 1);
    let refused = [
        ("prediction", "\"abc\"".to_owned()),
        ("prediction", "[]".to_owned()),
        ("prediction.type", "{}".to_owned()),
        ("prediction.type", "{\"type\":5,\"content\":\"a\"}".to_owned()),
        ("prediction.type", "{\"type\":\"text\",\"content\":\"a\"}".to_owned()),
        ("prediction.content", "{\"type\":\"content\"}".to_owned()),
        ("prediction.content", "{\"type\":\"content\",\"content\":7}".to_owned()),
        ("prediction.content", "{\"type\":\"content\",\"content\":[]}".to_owned()),
        (
            "prediction.content[0].type",
            "{\"type\":\"content\",\"content\":[{\"type\":\"image_url\",\"image_url\":\"a\"}]}".to_owned(),
        ),
        ("prediction.more", "{\"type\":\"content\",\"content\":\"a\",\"more\":1}".to_owned()),
        ("prediction", format!("{{\"type\":\"content\",\"content\":\"{text}\"}}")),
    ];
    for (param, value) in refused {
        let (found, _) = server.chat(&format!("\"prediction\":{value}")).refused(400);
        assert_eq!(found.as_deref(), Some(param), "{value}");
    }
    let given = "\"prediction\":{\"type\":\"content\",\"content\":\"abc\"}";
    let contradiction = server.chat(&format!("{given},\"speculate\":false"));
    assert!(contradiction.text().contains("prediction contradicts speculate: false"), "{}", contradiction.text());
    assert_eq!(contradiction.refused(400).0.as_deref(), Some("prediction"));
    let elsewhere = server.complete(given);
    assert!(elsewhere.text().contains("only /v1/chat/completions has it"), "{}", elsewhere.text());
    let parts =
        "{\"type\":\"content\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}";
    for harmless in [
        "\"prediction\":null".to_owned(),
        given.to_owned(),
        format!("{given},\"speculate\":true"),
        format!("\"prediction\":{parts}"),
        "\"prediction\":{\"type\":\"content\",\"content\":\"\"}".to_owned(),
    ] {
        assert_eq!(server.chat(&harmless).status, 200, "{harmless}");
    }
}
