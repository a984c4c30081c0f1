//! `return_token_ids`: the ids of prompts and replies, under the names and in the places of vLLM.

use std::sync::Arc;

use crate::support::socket::Socket;
use crate::support::{Server, Setup, chat_body, completion_body};
use pellucid_generate::{Guards, OnGuardError, PatternGuard};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const VOCAB_SIZE: u64 = 95;
const IDS: &str = "\"return_token_ids\":true,\"seed\":7";

fn choices(reply: &Value) -> &Vec<Value> {
    reply["choices"].as_array().unwrap()
}

fn text(choice: &Value) -> &str {
    choice["message"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap()
}

/// Returns the ids of a choice, joined from the chunks of a stream.
fn joined(chunks: &[Value], index: usize) -> Vec<Value> {
    let pieces = chunks.iter().flat_map(choices).filter(|choice| choice["index"] == index);
    pieces.flat_map(|piece| piece["token_ids"].as_array().into_iter().flatten()).cloned().collect()
}

/// Returns the lists of a prompt's ids that the chunks of a stream hold, each with the index of its choice.
fn prompts(chunks: &[Value]) -> Vec<(u64, Value)> {
    let mut found = Vec::new();
    for chunk in chunks {
        let of_choice = choices(chunk).iter().find(|choice| !choice["prompt_token_ids"].is_null());
        let index = choices(chunk).first().map_or(0, |choice| choice["index"].as_u64().unwrap());
        let ids = of_choice.map_or(&chunk["prompt_token_ids"], |choice| &choice["prompt_token_ids"]);
        found.extend((!ids.is_null()).then(|| (index, ids.clone())));
    }
    found
}

/// Returns the text of ids. The tiny model also generates ids without a token, which have no text.
fn detokenize(server: &Server, ids: &Value) -> String {
    let known: Vec<&Value> = ids.as_array().unwrap().iter().filter(|id| id.as_u64().unwrap() < VOCAB_SIZE).collect();
    let reply = server.post("/detokenize", &json!({ "tokens": known }).to_string()).ok();
    reply["prompt"].as_str().unwrap().to_owned()
}

#[test]
fn whole_and_streamed_replies_have_the_same_ids() {
    let server = Server::start();
    let settings = ["", ",\"n\":3", ",\"n\":2,\"best_of\":4", ",\"n\":2,\"beam_width\":3", ",\"logprobs\":LOGPROBS"];
    for (path, body, logprobs) in [(CHAT, chat_body as fn(&str) -> String, "true"), (COMPLETIONS, completion_body, "2")]
    {
        for setting in settings.map(|setting| setting.replace("LOGPROBS", logprobs)) {
            if setting.contains("best_of") && path == CHAT {
                continue;
            }
            let fields = format!("{IDS},\"max_tokens\":12{setting}");
            let fields = if setting.contains("beam") { fields.replace(",\"seed\":7", "") } else { fields };
            let whole = server.post(path, &body(&fields)).ok();
            let chunks = server.stream(path, &body(&format!("{fields},\"stream\":true"))).chunks();
            for (index, choice) in choices(&whole).iter().enumerate() {
                let ids = choice["token_ids"].as_array().unwrap();
                assert_eq!(&joined(&chunks, index), ids, "{path} {fields}");
                // Log probabilities name the tokens of a chat, without the one that ended it.
                if let Some(tokens) = choice["logprobs"]["content"].as_array() {
                    assert!(tokens.len() > 5 && tokens.iter().zip(ids).all(|(token, id)| token["id"] == *id));
                }
            }
            let prompt = |choice: &Value| if path == CHAT { &whole } else { choice }["prompt_token_ids"].clone();
            // A chat has one prompt, so its ids are in the first chunk alone.
            let num_lists = if path == CHAT { 1 } else { choices(&whole).len() };
            let expected: Vec<(u64, Value)> = choices(&whole)
                .iter()
                .take(num_lists)
                .map(|choice| (choice["index"].as_u64().unwrap(), prompt(choice)))
                .collect();
            let mut found = prompts(&chunks);
            found.sort_by_key(|(index, _)| *index);
            assert_eq!(found, expected, "{path} {fields}");
            if path == CHAT {
                assert_eq!(prompts(&chunks[..1]), expected);
            }
        }
    }
}

#[test]
fn the_ids_of_a_prompt_are_those_that_the_model_gets() {
    let server = Server::start();
    let messages = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "hello" }] });
    let expected = server.post("/tokenize", &messages.to_string()).ok()["tokens"].clone();
    assert_eq!(server.chat(&format!("{IDS},\"messages\":{}", messages["messages"])).ok()["prompt_token_ids"], expected);
    let texts = server.complete(&format!("{IDS},\"prompt\":[\"abc\",\"hello\"],\"n\":2,\"echo\":true")).ok();
    let ids = |text: &str| server.post("/tokenize", &json!({ "prompt": text }).to_string()).ok()["tokens"].clone();
    let found: Vec<&Value> = choices(&texts).iter().map(|choice| &choice["prompt_token_ids"]).collect();
    assert_eq!(found, [&ids("abc"), &ids("abc"), &ids("hello"), &ids("hello")]);
    // The ids of a reply do not repeat those of an echoed prompt.
    assert_eq!(choices(&texts)[0]["token_ids"].as_array().unwrap().len(), 8);
    // A prompt given as ids comes back, and with the ids of the reply it continues the reply.
    let whole = server.complete(&format!("{IDS},\"temperature\":0,\"prompt\":[9,8,7],\"max_tokens\":10")).ok();
    assert_eq!(choices(&whole)[0]["prompt_token_ids"], json!([9, 8, 7]));
    let all = choices(&whole)[0]["token_ids"].as_array().unwrap();
    let longer: Vec<Value> = [json!(9), json!(8), json!(7)].into_iter().chain(all[..4].iter().cloned()).collect();
    let rest = format!("{IDS},\"temperature\":0,\"max_tokens\":6,\"prompt\":{}", Value::from(longer));
    assert_eq!(choices(&server.complete(&rest).ok())[0]["token_ids"].as_array().unwrap()[..], all[4..]);
}

#[test]
fn a_long_echo_in_a_stream_has_the_ids_of_its_prompt() {
    let server = Server::with(Setup { context_len: 1024, ..Setup::default() });
    let prompt = "x".repeat(600);
    let fields = format!("{IDS},\"prompt\":\"{prompt}\",\"echo\":true,\"logprobs\":0,\"max_tokens\":4");
    let whole = server.complete(&fields).ok();
    let chunks = server.stream(COMPLETIONS, &completion_body(&format!("{fields},\"stream\":true"))).chunks();
    let choice = &choices(&whole)[0];
    assert_eq!(prompts(&chunks), [(0, choice["prompt_token_ids"].clone())]);
    assert!(choice["prompt_token_ids"].as_array().unwrap().len() >= 600);
    assert_eq!(&joined(&chunks, 0), choice["token_ids"].as_array().unwrap());
}

#[test]
fn the_token_that_ends_a_reply_is_its_last_id() {
    let server = Server::start();
    let whole = server.complete(&format!("{IDS},\"max_tokens\":8")).ok();
    let ids = choices(&whole)[0]["token_ids"].clone();
    let (before, stop) = (ids[2].clone(), ids[3].clone());
    assert_ne!(before, stop);
    let ended = server.complete(&format!("{IDS},\"max_tokens\":8,\"stop_token_ids\":[{stop}]")).ok();
    let shown = choices(&ended)[0]["token_ids"].as_array().unwrap();
    assert_eq!(shown.last(), Some(&stop));
    assert_eq!(shown.len() as u64, ended["usage"]["completion_tokens"].as_u64().unwrap() + 1);
    // Without end token: the maximum ended the reply.
    assert_eq!(ids.as_array().unwrap().len(), 8);
}

#[test]
fn tokens_of_a_stop_string_are_not_reported() {
    let server = Server::start();
    let whole = server.complete(&format!("{IDS},\"max_tokens\":20")).ok();
    let text = text(&choices(&whole)[0]).to_owned();
    let stop: String = text.chars().skip(text.chars().count() / 2).take(2).collect();
    let fields = format!("{IDS},\"max_tokens\":20,\"stop\":{}", json!(stop));
    let ended = server.complete(&fields).ok();
    let choice = &choices(&ended)[0];
    assert_eq!(choice["finish_reason"], "stop");
    assert!(!choice["text"].as_str().unwrap().contains(&stop));
    let shown = choice["token_ids"].as_array().unwrap();
    let all = choices(&whole)[0]["token_ids"].as_array().unwrap();
    assert!(shown.len() < all.len() && shown[..] == all[..shown.len()]);
    assert!(choice["text"].as_str().unwrap().starts_with(&detokenize(&server, &choice["token_ids"])));
}

#[test]
fn no_id_of_a_blocked_token_is_sent() {
    let fields = format!("{IDS},\"max_tokens\":60,\"ignore_eos\":true");
    let whole = Server::start().chat(&fields).ok();
    let text = text(&choices(&whole)[0]).to_owned();
    let phrase: String = text.chars().skip(text.chars().count() / 2).take(5).collect();
    let expression: String = phrase.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    let guard = PatternGuard::parse(&format!("(?-i){expression}")).unwrap();
    let guards = Guards::new(vec![Arc::new(guard)], OnGuardError::Closed);
    let server = Server::with(Setup { guards, ..Setup::default() });
    let reply = server.chat(&fields).ok();
    assert_eq!(choices(&reply)[0]["finish_reason"], "content_filter");
    let shown = detokenize(&server, &choices(&reply)[0]["token_ids"]);
    assert!(!shown.is_empty() && shown == choices(&reply)[0]["message"]["content"]);
    let chunks = server.stream(CHAT, &chat_body(&format!("{fields},\"stream\":true"))).chunks();
    assert_eq!(&joined(&chunks, 0), choices(&reply)[0]["token_ids"].as_array().unwrap());
}

#[test]
fn ids_come_only_on_request() {
    let server = Server::start();
    for fields in ["\"seed\":1", "\"seed\":1,\"return_token_ids\":false", "\"seed\":1,\"return_token_ids\":null"] {
        for (path, body) in [(CHAT, chat_body(fields)), (COMPLETIONS, completion_body(fields))] {
            assert!(!server.post(path, &body).text().contains("\"token_ids\":["), "{path} {fields}");
            let streamed = body.replace("\"seed\":1", "\"seed\":1,\"stream\":true");
            let chunks = server.stream(path, &streamed).chunks();
            let mut pieces = chunks.iter().flat_map(choices);
            assert!(pieces.all(|piece| piece["token_ids"].is_null()) && prompts(&chunks).is_empty(), "{path} {fields}");
        }
    }
    let (param, _) = server.chat("\"return_token_ids\":1").refused(400);
    assert_eq!(param.as_deref(), Some("return_token_ids"));
    // Other APIs have no such field, so they refuse it by name.
    for (path, body) in [
        ("/v1/responses", json!({ "model": "tiny", "input": "hello", "return_token_ids": true })),
        (
            "/v1/messages",
            json!({ "model": "tiny", "max_tokens": 4, "messages": [{ "role": "user", "content": "hello" }],
                                 "return_token_ids": true }),
        ),
        (
            "/api/chat",
            json!({ "model": "tiny", "messages": [{ "role": "user", "content": "hello" }],
                              "return_token_ids": true }),
        ),
        ("/completion", json!({ "prompt": "hello", "return_token_ids": true })),
    ] {
        let headers = [("content-type", "application/json"), ("anthropic-version", "2023-06-01")];
        let reply = server.request("POST", path, &headers, body.to_string().as_bytes());
        assert!(reply.status == 400 && reply.text().contains("return_token_ids"), "{path}: {}", reply.text());
    }
}

#[test]
fn a_websocket_sends_ids_too() {
    let server = Server::start();
    let fields = format!("{IDS},\"max_tokens\":6");
    let whole = server.chat(&fields).ok();
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&chat_body(&fields));
    let mut chunks: Vec<Value> = Vec::new();
    while let Some(message) = socket.next().filter(|message| message != "[DONE]") {
        chunks.push(serde_json::from_str(&message).unwrap());
    }
    chunks.retain(|chunk| chunk["choices"].is_array());
    assert_eq!(&joined(&chunks, 0), choices(&whole)[0]["token_ids"].as_array().unwrap());
    assert_eq!(prompts(&chunks), [(0, whole["prompt_token_ids"].clone())]);
}
