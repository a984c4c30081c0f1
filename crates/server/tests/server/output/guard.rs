//! Guards over HTTP: refusals of prompts, replies that end with `content_filter`, metrics.

use std::sync::Arc;
use std::time::Duration;

use crate::support::socket::Socket;
use crate::support::{Server, Setup, chat_body};
use pellucid_generate::{Guard, GuardError, Guards, OnGuardError, PatternGuard, PromptText, ReplyText, Verdict};
use serde_json::{Value, json};

fn guarded(patterns: &str) -> Server {
    let guard = PatternGuard::parse(patterns).unwrap();
    Server::with(Setup { guards: Guards::new(vec![Arc::new(guard)], OnGuardError::Closed), ..Setup::default() })
}

const LONG: &str = "\"max_tokens\":60,\"ignore_eos\":true,\"logprobs\":true,\"seed\":1";

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap()
}

/// Returns the contents and the last finish reason of a stream's chunks.
fn joined(chunks: &[Value]) -> (String, String) {
    let choices = || chunks.iter().flat_map(|chunk| chunk["choices"].as_array().into_iter().flatten());
    let text = choices().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    let finish = choices().filter_map(|choice| choice["finish_reason"].as_str()).next_back().unwrap();
    (text, finish.into())
}

#[test]
fn a_blocked_reply_ends_with_content_filter_everywhere() {
    let whole = Server::start().chat(LONG).ok();
    let text = content(&whole);
    let from = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let phrase: String = text[from..].chars().take(5).collect();
    let before = text.split_once(&phrase).unwrap().0;
    let expression: String = phrase.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    let server = guarded(&format!("(?-i){expression}"));
    let reply = server.chat(LONG).ok();
    assert!(before.starts_with(content(&reply)) && !content(&reply).is_empty());
    assert_eq!(reply["choices"][0]["finish_reason"], "content_filter");
    assert_eq!(reply["pellucid"]["endings"][0]["guard"], "patterns");
    let logprobs = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let all = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(logprobs[..], all[..logprobs.len()]);
    let last = logprobs.last().unwrap()["token"].as_str().unwrap();
    assert!(content(&reply).ends_with(last), "no log probability of a blocked token is sent");
    let chunks = server.stream("/v1/chat/completions", &chat_body(&format!("{LONG},\"stream\":true"))).chunks();
    assert_eq!(joined(&chunks), (content(&reply).to_owned(), "content_filter".into()));
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&chat_body(LONG));
    let mut chunks = Vec::new();
    while let Some(message) = socket.next().filter(|message| message != "[DONE]") {
        chunks.push(serde_json::from_str(&message).unwrap());
    }
    assert_eq!(joined(&chunks), (content(&reply).to_owned(), "content_filter".into()));
    let metrics = server.get("/metrics").text();
    let line = |subject: &str, verdict: &str| {
        format!("pellucid_guard_verdicts_total{{guard=\"patterns\",subject=\"{subject}\",verdict=\"{verdict}\"}} ")
    };
    for (subject, verdict, count) in [("prompt", "passed", 3), ("reply", "blocked", 3), ("reply", "passed", 0)] {
        assert!(metrics.contains(&format!("{}{count}\n", line(subject, verdict))), "{subject} {verdict}: {metrics}");
    }
}

#[test]
fn a_blocked_reply_has_its_own_reason_in_ollamas_api() {
    let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "hello" }], "stream": false,
                       "options": { "num_predict": 30, "seed": 1 } });
    let ask = |server: &Server| server.post("/api/chat", &body.to_string()).ok();
    let whole = ask(&Server::start());
    let text = whole["message"]["content"].as_str().unwrap();
    let last: String = text.chars().skip(text.chars().count() / 2).collect();
    assert!(!last.is_empty() && whole["done_reason"] != "content_filter", "the control: {whole}");
    let expression: String = last.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    let blocked = ask(&guarded(&format!("(?-i){expression}")));
    assert_eq!(blocked["done_reason"], "content_filter", "{blocked}");
}

#[test]
fn a_blocked_prompt_gets_400_and_never_reaches_the_engine() {
    let server = guarded("forbidden\\s{1,3}words?");
    for body in [
        "\"messages\":[{\"role\":\"user\",\"content\":\"Some FORBIDDEN  words\"}]",
        "\"messages\":[{\"role\":\"system\",\"content\":\"ｆorbid\u{200b}den word\"},{\"role\":\"user\",\"content\":\"hi\"}]",
    ] {
        let (param, code) = server.chat(body).refused(400);
        assert_eq!((param.as_deref(), code.as_deref()), (Some("messages"), Some("content_filter")));
    }
    let (param, code) = server.complete("\"prompt\":[\"fine\",\"a forbidden word\"]").refused(400);
    assert_eq!((param.as_deref(), code.as_deref()), (Some("prompt"), Some("content_filter")));
    assert_eq!(server.metric("pellucid_computed_prompt_tokens_total"), 0.0);
    server.chat("").ok();
}

/// A guard that passes prompts and never comes to a verdict on a reply.
#[derive(Debug)]
struct Silent;

impl Guard for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    fn judge_prompt(&self, _: &PromptText) -> Result<Verdict, GuardError> {
        Ok(Verdict::Pass)
    }

    fn judge_reply(&self, _: &PromptText, _: &ReplyText) -> Result<Verdict, GuardError> {
        Err(GuardError("no answer".into()))
    }
}

#[test]
fn traces_show_the_verdicts_on_each_token() {
    const TRACED: &str = "\"max_tokens\":12,\"ignore_eos\":true,\"seed\":1,\"trace\":true";
    let verdicts = |server: &Server, fields: &str| -> Vec<Value> {
        let reply = server.chat(fields).ok();
        reply["choices"][0]["trace"].as_array().unwrap().iter().map(|trace| trace["guards"].clone()).collect()
    };
    let passed = json!({ "guard": "patterns", "verdict": "passed" });
    let patterns = || Arc::new(PatternGuard::parse("no such text").unwrap());
    let server = guarded("no such text");
    assert_eq!(verdicts(&server, TRACED), vec![json!([passed]); 12]);
    // Streams show the same verdicts.
    let body = chat_body(&format!("{TRACED},\"stream\":true"));
    let chunks = server.stream("/v1/chat/completions", &body).chunks();
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().into_iter().flatten());
    let traces = choices.flat_map(|choice| choice["trace"].as_array().into_iter().flatten());
    assert_eq!(traces.map(|trace| trace["guards"].clone()).collect::<Vec<_>>(), vec![json!([passed]); 12]);
    // A guard that fails and lets tokens pass says so, beside the verdict of the other.
    let guards = Guards::new(vec![patterns(), Arc::new(Silent)], OnGuardError::Open);
    let failed = json!({ "guard": "silent", "verdict": "failed" });
    let open = Server::with(Setup { guards, ..Setup::default() });
    assert_eq!(verdicts(&open, TRACED), vec![json!([passed, failed]); 12]);
    // Without a guard there is no verdict.
    assert_eq!(verdicts(&Server::start(), TRACED), vec![Value::Null; 12]);
}

/// A guard that never comes to a verdict on a prompt.
#[derive(Debug)]
struct Broken;

impl Guard for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn judge_prompt(&self, _: &PromptText) -> Result<Verdict, GuardError> {
        Err(GuardError("out of order".into()))
    }

    fn judge_reply(&self, _: &PromptText, _: &ReplyText) -> Result<Verdict, GuardError> {
        Ok(Verdict::Pass)
    }
}

#[test]
fn a_guard_that_fails_closes_unless_the_operator_says_otherwise() {
    let with =
        |on_error| Server::with(Setup { guards: Guards::new(vec![Arc::new(Broken)], on_error), ..Setup::default() });
    let (_, code) = with(OnGuardError::Closed).chat("").refused(503);
    assert_eq!(code.as_deref(), Some("content_filter_failed"));
    with(OnGuardError::Open).chat("").ok();
}

/// A guard that passes everything, slowly.
#[derive(Debug)]
struct Slow;

const VERDICT_TIME: Duration = Duration::from_millis(20);

impl Guard for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn judge_prompt(&self, _: &PromptText) -> Result<Verdict, GuardError> {
        std::thread::sleep(VERDICT_TIME);
        Ok(Verdict::Pass)
    }

    fn judge_reply(&self, _: &PromptText, _: &ReplyText) -> Result<Verdict, GuardError> {
        std::thread::sleep(VERDICT_TIME);
        Ok(Verdict::Pass)
    }
}

#[test]
fn replies_tell_the_time_that_guards_took() {
    let guard_ms = |guards: Vec<Arc<dyn Guard>>| {
        let server = Server::with(Setup { guards: Guards::new(guards, OnGuardError::Closed), ..Setup::default() });
        server.chat("\"max_tokens\":12,\"ignore_eos\":true").ok()["pellucid"]["timings"]["guard_ms"].as_f64()
    };
    let patterns = || Arc::new(PatternGuard::parse("no such text").unwrap());
    let both = 2.0 * VERDICT_TIME.as_secs_f64() * 1e3;
    assert!(guard_ms(vec![Arc::new(Slow)]).unwrap() >= both, "one verdict on the prompt and one on the reply");
    assert!(guard_ms(vec![patterns(), Arc::new(Slow)]).unwrap() >= both);
    assert!(guard_ms(vec![patterns()]).unwrap() > 0.0, "a scanner takes time as well");
}
