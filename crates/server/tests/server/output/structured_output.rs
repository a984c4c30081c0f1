//! Structured output through the API: replies satisfy their grammar, alone and with others, whole and streamed, and bad
//! grammars are refused with their place.

use crate::support::{Response, Server, Setup, chat_body, tenant};
use pellucid_testing::TinyModel;
use serde_json::{Value, json};

/// A vocabulary that can spell JSON.
const BRACKETS: TinyModel<'static> =
    TinyModel { template: None, context_len: None, has_words: false, has_brackets: true, fills_gaps: false };

const SCHEMA: &str = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":6},
    "size":{"type":"integer","minimum":1,"maximum":99},"tags":{"type":"array","items":{"enum":["a","b"]},"maxItems":2}},
    "required":["name","size","tags"],"additionalProperties":false}"#;

fn format() -> String {
    format!(
        r#""response_format":{{"type":"json_schema","json_schema":{{"name":"thing","strict":true,"schema":{SCHEMA}}}}}"#
    )
}

fn long_context() -> Server {
    Server::with(Setup { context_len: 1024, tiny: BRACKETS, ..Setup::default() })
}

/// Checks a text against [`SCHEMA`].
fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let object = value.as_object().unwrap();
    assert_eq!(object.keys().collect::<Vec<_>>(), ["name", "size", "tags"]);
    assert!(value["name"].as_str().unwrap().chars().count() <= 6, "{value}");
    assert!((1..=99).contains(&value["size"].as_i64().unwrap()), "{value}");
    let tags = value["tags"].as_array().unwrap();
    assert!(tags.len() <= 2 && tags.iter().all(|tag| tag == "a" || tag == "b"), "{value}");
}

fn texts(reply: &Value) -> Vec<String> {
    let choices = reply["choices"].as_array().unwrap().iter();
    choices.map(|choice| choice["message"]["content"].as_str().unwrap().to_owned()).collect()
}

fn json(response: Response) -> Value {
    response.ok()
}

#[test]
fn replies_satisfy_their_schema_with_every_kind_of_sampling() {
    let server = long_context();
    for sampling in [
        "\"temperature\":0",
        "\"temperature\":1.5,\"seed\":1",
        "\"temperature\":2,\"seed\":2,\"n\":3",
        "\"seed\":3,\"top_k\":3,\"min_p\":0.05,\"repetition_penalty\":1.2,\"dry_multiplier\":0.8",
        "\"seed\":4,\"mirostat_tau\":3",
        "\"seed\":5,\"logprobs\":true,\"top_logprobs\":2,\"trace\":true",
        "\"seed\":6,\"min_tokens\":600",
        "\"seed\":7,\"logit_bias\":{\"60\":8},\"ignore_eos\":true",
        "\"seed\":8,\"loop_guard\":true",
    ] {
        let reply = json(server.chat(&format!("{},\"max_tokens\":900,{sampling}", format())));
        for (text, choice) in texts(&reply).iter().zip(reply["choices"].as_array().unwrap()) {
            check(text);
            assert_eq!(choice["finish_reason"], "stop", "{sampling}");
        }
        assert!(reply["pellucid"]["endings"][0].get("grammar").is_none(), "{}", reply["pellucid"]);
    }
}

#[test]
fn a_reply_is_the_same_alone_and_with_others_whole_and_streamed() {
    let server = long_context();
    let fields = |seed: u32| format!("{},\"max_tokens\":900,\"temperature\":1.5,\"seed\":{seed}", format());
    let alone: Vec<Vec<String>> = (0..6).map(|seed| texts(&json(server.chat(&fields(seed))))).collect();
    let together: Vec<Vec<String>> = std::thread::scope(|scope| {
        let replies: Vec<_> = (0..6)
            .map(|seed| {
                scope.spawn({
                    let server = &server;
                    move || texts(&json(server.chat(&fields(seed))))
                })
            })
            .collect();
        replies.into_iter().map(|reply| reply.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    let stream = server.stream("/v1/chat/completions", &chat_body(&format!("{},\"stream\":true", fields(3))));
    let content = |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().unwrap_or("").to_owned();
    let text: String = stream.chunks().iter().map(content).collect();
    assert_eq!(vec![text], alone[3]);
}

#[test]
fn every_kind_of_grammar_is_honoured() {
    let server = Server::with(Setup { tiny: BRACKETS, ..Setup::default() });
    let reply = |fields: &str| {
        let reply = json(server.chat(&format!("{fields},\"max_tokens\":120,\"seed\":1,\"temperature\":1.5")));
        (texts(&reply).remove(0), reply["choices"][0]["finish_reason"].as_str().unwrap().to_owned())
    };
    let (text, reason) = reply(r#""structured_outputs":{"choice":["red","green"]}"#);
    assert!(["red", "green"].contains(&text.as_str()) && reason == "stop", "{text}");
    let (text, _) = reply(r#""structured_outputs":{"regex":"[0-9]{3}-[a-f]{2}"}"#);
    assert!(text.len() == 6 && text.as_bytes()[3] == b'-', "{text}");
    let (text, _) = reply(r#""structured_outputs":{"grammar":"start: \"x\" /[yz]/ \"!\""}"#);
    assert!(["xy!", "xz!"].contains(&text.as_str()), "{text}");
    let (text, _) = reply(r#""structured_outputs":{"grammar":"root ::= \"x\" [yz] \"?\""}"#);
    assert!(["xy?", "xz?"].contains(&text.as_str()), "{text}");
    let (text, _) = reply(r#""structured_outputs":{"json":"{\"const\":[1,\"a\"]}"}"#);
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!([1, "a"]));
    let (text, reason) = reply(r#""response_format":{"type":"json_object"}"#);
    assert!(text.starts_with('{'));
    assert!(reason == "length" || serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    let complete = r#""structured_outputs":{"choice":[" yes"," no"]},"n":2,"best_of":4,"seed":1,"max_tokens":40"#;
    for choice in json(server.complete(complete))["choices"].as_array().unwrap() {
        assert!([json!(" yes"), json!(" no")].contains(&choice["text"]), "{choice}");
    }
}

#[test]
fn a_reply_that_is_cut_off_says_that_its_grammar_is_unfinished() {
    let server = Server::with(Setup { tiny: BRACKETS, ..Setup::default() });
    let reply = json(server.chat(&format!("{},\"max_tokens\":3", format())));
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["pellucid"]["endings"][0]["reason"], "max_tokens");
    assert_eq!(reply["pellucid"]["endings"][0]["grammar"], "unfinished");
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let server = Server::start();
    let fields = r#""structured_outputs":{"choice":["a"]},"temperature":0,"logprobs":true,"top_logprobs":3"#;
    let forced = json(server.chat(fields));
    let free = json(server.chat(r#""temperature":0,"logprobs":true,"top_logprobs":3,"max_tokens":1"#));
    let top = |reply: &Value| reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"].clone();
    assert_eq!(top(&forced), top(&free));
}

#[test]
fn the_trace_shows_what_the_grammar_cut_and_expected() {
    let server = Server::start();
    let reply = json(server.chat(r#""structured_outputs":{"choice":["red","green"]},"trace":true,"seed":1"#));
    let steps = reply["choices"][0]["trace"][0]["steps"].as_array().unwrap();
    let step = steps.iter().find(|step| step["name"] == "grammar").unwrap();
    assert!(step["entered"].as_u64().unwrap() > step["left"].as_u64().unwrap(), "{step}");
    assert_eq!(step["setting"], "expected 'g' or 'r'");
}

#[test]
fn bad_grammars_are_refused_with_their_place() {
    let server = Server::start();
    let schema = |schema: &str| {
        format!(r#""response_format":{{"type":"json_schema","json_schema":{{"name":"a","schema":{schema}}}}}"#)
    };
    let schema_param = "response_format.json_schema.schema";
    for (fields, param, text) in [
        (schema(r#"{"properties":{"a":{"uniqueItems":true}}}"#), schema_param, "#/properties/a/uniqueItems"),
        (schema(r#"{"type":"string","allOf":[{"type":"string","pattern":"("}]}"#), schema_param, "#/allOf/0: invalid"),
        (schema(r#"{"type":"text"}"#), schema_param, "#/type: expected one of"),
        (schema(r#"{"x-guidance":{}}"#), schema_param, "#/x-guidance"),
        // This model's vocabulary has no braces.
        (schema(r#"{"type":"object"}"#), schema_param, "vocabulary cannot spell the character '{'"),
        (schema("[]"), schema_param, "expected an object"),
        (r#""response_format":{"type":"json_schema"}"#.into(), "response_format.json_schema", "required"),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"name":"a b","schema":{}}}"#.into(),
            "response_format.json_schema.name",
            "letters",
        ),
        (r#""response_format":{"type":"xml"}"#.into(), "response_format.type", "json_schema"),
        (r#""response_format":{"type":"text","schema":{}}"#.into(), "response_format.schema", "unknown field"),
        (r#""response_format":"json_object""#.into(), "response_format", "expected an object"),
        (r#""structured_outputs":{}"#.into(), "structured_outputs", "found 0"),
        (r#""structured_outputs":{"regex":"a","choice":["b"]}"#.into(), "structured_outputs", "found 2"),
        (r#""structured_outputs":{"regex":"("}"#.into(), "structured_outputs.regex", "unclosed group"),
        (
            r#""structured_outputs":{"grammar":"root ::= x"}"#.into(),
            "structured_outputs.grammar",
            "no rule is called x",
        ),
        (r#""structured_outputs":{"grammar":"start: <[1]>"}"#.into(), "structured_outputs.grammar", "special tokens"),
        (r#""structured_outputs":{"choice":[]}"#.into(), "structured_outputs.choice", "found none"),
        (r#""structured_outputs":{"choice":[1]}"#.into(), "structured_outputs.choice", "expected a string"),
        (r#""structured_outputs":{"json":"{"}"#.into(), "structured_outputs.json", "not valid JSON"),
        (r#""structured_outputs":{"json":1}"#.into(), "structured_outputs.json", "expected a schema"),
        (r#""structured_outputs":{"backend":"x","regex":"a"}"#.into(), "structured_outputs.backend", "unknown field"),
        (r#""guided_json":{}"#.into(), "guided_json", "structured_outputs.json"),
        (r#""guided_regex":"a""#.into(), "guided_regex", "structured_outputs.regex"),
        (r#""structured_outputs":{"regex":"a"},"beam_width":2"#.into(), "structured_outputs.regex", "beam search"),
        (
            r#""structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"}"#.into(),
            "structured_outputs",
            "give one of them",
        ),
    ] {
        let reply = server.chat(&fields);
        let message = reply.text();
        assert_eq!(reply.refused(400).0.as_deref(), Some(param), "{fields}: {message}");
        assert!(message.contains(text), "{fields}: {message}");
    }
}

#[test]
fn rules_that_leave_no_token_end_the_request_with_an_error() {
    let server = Server::start();
    let reply = server.chat(r#""structured_outputs":{"choice":["a"]},"allowed_token_ids":[5]"#);
    assert_eq!(reply.status, 400, "{}", reply.text());
    server.chat("\"seed\":1").ok();
}

#[test]
fn tenants_compile_for_themselves() {
    let tenants = vec![tenant("one", "key-of-one"), tenant("two", "key-of-two")];
    let server = Server::with(Setup { tenants, ..Setup::default() });
    let body = chat_body(r#""structured_outputs":{"choice":["same"]},"max_tokens":20"#);
    for key in ["key-of-one", "key-of-two", "key-of-one"] {
        let reply = server.post_as(key, "/v1/chat/completions", &body).ok();
        assert_eq!(texts(&reply), ["same"]);
    }
}
