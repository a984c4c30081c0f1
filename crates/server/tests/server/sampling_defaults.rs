//! Sampling options of requests that give none: the server's flags, else the model's recommendation, else OpenAI's
//! defaults; `/v1/models` says which.

use crate::support::{MODEL, Server, Setup};
use pellucid_sampling::{GivenOptions, OptionKind, SamplingDefaults, SamplingOption, Value as OptionValue};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn options(values: &[(&str, f32)]) -> GivenOptions {
    let mut given = GivenOptions::default();
    for &(param, value) in values {
        let option = SamplingOption::by_param(param).unwrap();
        let value = match option.kind() {
            OptionKind::Count { .. } => OptionValue::Count(value as u32),
            _ => OptionValue::Number(value),
        };
        given.insert(option, value);
    }
    given
}

fn server(model: &[(&str, f32)], flags: &[(&str, f32)]) -> Server {
    let sampling = SamplingDefaults { model: options(model), server: options(flags) };
    Server::with(Setup { sampling, ..Setup::default() })
}

/// Returns the parameters in effect for a chat with these fields.
fn parameters(server: &Server, fields: &Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post(CHAT, &body.to_string()).ok()["pellucid"]["parameters"].clone()
}

fn shown(server: &Server) -> Value {
    let list = server.get("/v1/models").ok();
    let card = server.get("/v1/models/tiny").ok();
    assert_eq!(list["data"][0]["sampling_defaults"], card["sampling_defaults"]);
    card["sampling_defaults"].clone()
}

#[test]
fn without_a_recommendation_the_defaults_are_openais() {
    let server = server(&[], &[]);
    let expected = json!({
        "temperature": {"value": 1.0, "source": "openai"}, "top_p": {"value": 1.0, "source": "openai"}
    });
    assert_eq!(shown(&server), expected);
    let found = parameters(&server, &json!({}));
    assert_eq!((&found["temperature"], &found["top_p"], &found["top_k"]), (&json!(1.0), &json!(1.0), &json!(0)));
}

#[test]
fn fields_cover_flags_and_flags_cover_the_recommendation() {
    let server = server(&[("temperature", 0.6), ("top_p", 0.95), ("top_k", 20.0)], &[("top_p", 0.5)]);
    let expected = json!({
        "temperature": {"value": 0.6, "source": "model"},
        "top_k": {"value": 20, "source": "model"},
        "top_p": {"value": 0.5, "source": "server"}
    });
    assert_eq!(shown(&server), expected);
    let values = |fields: Value| {
        let found = parameters(&server, &fields);
        [found["temperature"].clone(), found["top_k"].clone(), found["top_p"].clone()]
    };
    assert_eq!(values(json!({})), [json!(0.6), json!(20), json!(0.5)]);
    assert_eq!(values(json!({"temperature": 1.5, "top_p": 1})), [json!(1.5), json!(20), json!(1.0)]);
    // Null is absent.
    assert_eq!(values(json!({"temperature": null})), [json!(0.6), json!(20), json!(0.5)]);
    // Greedy decoding means the most probable token, and a preset is a whole set.
    assert_eq!(values(json!({"temperature": 0})), [json!(0.0), json!(0), json!(1.0)]);
    assert_eq!(values(json!({"preset": "code"})), [json!(0.2), json!(0), json!(0.95)]);
}

/// The parameters of a reply, sent back with its seed, give the same reply.
#[test]
fn a_reply_can_be_repeated_from_its_parameters() {
    let server = server(&[("temperature", 0.9), ("top_k", 20.0), ("dry_multiplier", 0.8)], &[]);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 12});
    let first = server.post(CHAT, &body.to_string()).ok();
    let mut again = body;
    again.as_object_mut().unwrap().extend(first["pellucid"]["parameters"].as_object().unwrap().clone());
    again["seed"] = first["pellucid"]["seed"].clone();
    let second = server.post(CHAT, &again.to_string()).ok();
    assert_eq!(first["choices"], second["choices"]);
}

/// Beam search does not sample: a recommended temperature must not make it fail.
#[test]
fn beam_search_takes_no_defaults() {
    let server = server(&[("temperature", 0.6), ("top_k", 20.0), ("repetition_penalty", 1.1)], &[("top_p", 0.5)]);
    assert_eq!(parameters(&server, &json!({"beam_width": 2}))["top_k"], 0);
    let body = json!({"model": MODEL, "prompt": "a", "max_tokens": 2, "beam_width": 2});
    server.post("/v1/completions", &body.to_string()).ok();
    let body = json!({"model": MODEL, "prompt": "a", "max_tokens": 2});
    assert_eq!(server.post("/v1/completions", &body.to_string()).ok()["pellucid"]["parameters"]["top_p"], 0.5);
}
