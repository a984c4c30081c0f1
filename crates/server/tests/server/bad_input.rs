//! Bad input: which requests are refused, with which status and field; streamed and whole.

use std::io::{BufReader, Write};

use crate::support::{CONTEXT, Response, Server, Setup, chat_body, completion_body};

/// Integer fields of a route, each with a valid value.
const CHAT_INTEGERS: [&str; 15] = [
    "n",
    "max_tokens",
    "max_completion_tokens",
    "top_logprobs",
    "seed",
    "top_k",
    "penalty_window",
    "dry_allowed_length",
    "dry_range",
    "min_tokens",
    "beam_width",
    "timeout_ms",
    "priority",
    "frequency_penalty",
    "presence_penalty",
];

const NUMBERS: [&str; 18] = [
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "dynamic_temperature_range",
    "dynamic_temperature_exponent",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
    "length_penalty",
    "logit_bias",
];

#[test]
fn bodies_that_are_not_requests() {
    let server = Server::start();
    let json: &[(&str, &str)] = &[("Content-Type", "application/json")];
    let deep = format!("{{\"messages\":{}", "[".repeat(100_000));
    let bodies: [&[u8]; 12] = [
        b"",
        b"not json",
        b"[]",
        b"\"text\"",
        b"null",
        b"{",
        b"{}{}",
        b"{\"model\":\"tiny\",\"model\":\"tiny\"}",
        b"{\"model\":\"\xff\xfe\"}",
        b"{\"model\":\"\\ud800\"}",
        b"{\"temperature\":1e400}",
        deep.as_bytes(),
    ];
    for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"] {
        for body in bodies {
            server.request("POST", path, json, body).refused(400);
        }
        for headers in
            [&[][..], &[("Content-Type", "text/plain")], &[("Content-Type", "application/x-www-form-urlencoded")]]
        {
            server.request("POST", path, headers, b"{}").refused(415);
        }
        let wrong = server.get(path);
        assert_eq!(wrong.header("allow"), Some("POST"));
        wrong.refused(405);
    }
    let charset = [("Content-Type", "application/json; charset=utf-8")];
    let fine = server.request("POST", "/tokenize", &charset, b"{\"prompt\":\"a\"}");
    assert_eq!(fine.status, 200, "{}", fine.text());
    server.get("/v1/nothing").refused(404);
    server.post("/", "{}").refused(405);
    let wrong = server.post("/health", "{}");
    assert_eq!(wrong.header("allow"), Some("GET,HEAD"));
    wrong.refused(405);
}

#[test]
fn sizes_are_bounded() {
    let limits = pellucid_server::Limits { max_body_bytes: 10_000, ..Default::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let long = format!("{{\"prompt\":\"{}\"}}", "a".repeat(20_000));
    assert_eq!(server.post("/tokenize", &long).refused(413).1.as_deref(), Some("request_too_large"));
    // Too large by `Content-Length` without being sent, and sent in chunks without a `Content-Length`.
    let mut silent = server.connect();
    write!(silent, "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n").unwrap();
    silent.shutdown(std::net::Shutdown::Write).unwrap();
    Response::read(&mut BufReader::new(silent)).refused(413);
    let mut chunked = server.connect();
    write!(chunked, "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
    for _ in 0..20 {
        write!(chunked, "3e8\r\n{}\r\n", "a".repeat(1000)).unwrap();
    }
    write!(chunked, "0\r\n\r\n").unwrap();
    Response::read(&mut BufReader::new(chunked)).refused(413);
    // Headers beyond hyper's own limit: it answers with a status and no body.
    let mut giant = server.connect();
    let _ = write!(giant, "GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: {}\r\n\r\n", "a".repeat(70_000));
    assert_eq!(Response::read(&mut BufReader::new(giant)).status, 431);
    let many: String = (0..200).map(|i| format!("X-{i}: 1\r\n")).collect();
    let mut crowd = server.connect();
    let _ = write!(crowd, "GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n");
    assert_eq!(Response::read(&mut BufReader::new(crowd)).status, 431);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn slow_clients_are_disconnected_and_others_served() {
    let short = std::time::Duration::from_millis(300);
    let limits = pellucid_server::Limits { body_timeout: short, header_timeout: short, ..Default::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let mut body = server.connect();
    write!(body, "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{\"pro").unwrap();
    let mut header = server.connect();
    write!(header, "GET /health HTTP/1.1\r\nHost: local").unwrap();
    assert_eq!(server.get("/health").status, 200);
    Response::read(&mut BufReader::new(body)).refused(408);
    let mut rest = Vec::new();
    // Without complete headers there is no request to answer: the connection is closed.
    std::io::Read::read_to_end(&mut header, &mut rest).unwrap();
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{:?}", String::from_utf8_lossy(&rest));
}

#[test]
fn every_integer_field_keeps_to_its_range() {
    let server = Server::start();
    let refused = [
        "-9223372036854775808",
        "9223372036854775808",
        "18446744073709551616",
        "1e30",
        "1.5",
        "\"1\"",
        "true",
        "[1]",
        "{}",
    ];
    for name in CHAT_INTEGERS {
        // Fields that are not integers accept 1.5.
        let is_number = NUMBERS.contains(&name);
        for value in refused.iter().filter(|value| !(is_number && **value == "1.5")) {
            for stream in ["", ",\"stream\":true"] {
                let (param, _) = server.chat(&format!("\"{name}\":{value}{stream}")).refused(400);
                assert_eq!(param.as_deref(), Some(name), "{value}");
            }
        }
        if !["seed", "min_tokens", "priority"].contains(&name) && !is_number {
            assert_eq!(server.chat(&format!("\"{name}\":-1")).refused(400).0.as_deref(), Some(name));
        }
        let taken = server.chat(&format!("\"{name}\":null"));
        assert_eq!(taken.status, 200, "null means absent: {}", taken.text());
    }
    for value in ["-1", "1e9", "1000000000", "129", "2147483648"] {
        assert_eq!(server.chat(&format!("\"n\":{value}")).refused(400).0.as_deref(), Some("n"));
        assert_eq!(server.complete(&format!("\"best_of\":{value}")).refused(400).0.as_deref(), Some("best_of"));
    }
    for name in ["max_tokens", "logprobs", "best_of", "n"] {
        for value in refused {
            assert_eq!(
                server.complete(&format!("\"{name}\":{value}")).refused(400).0.as_deref(),
                Some(name),
                "{value}"
            );
        }
    }
    assert_eq!(server.chat("\"seed\":-2").refused(400).0.as_deref(), Some("seed"));
    assert_eq!(server.chat("\"top_logprobs\":21,\"logprobs\":true").refused(400).0.as_deref(), Some("top_logprobs"));
    assert_eq!(server.complete("\"logprobs\":21").refused(400).0.as_deref(), Some("logprobs"));
}

#[test]
fn every_number_keeps_to_its_range() {
    let server = Server::start();
    for name in NUMBERS {
        for value in ["1e300", "-1e300", "\"0.5\"", "true", "[]"] {
            let (param, _) = server.chat(&format!("\"{name}\":{value}")).refused(400);
            assert_eq!(param.as_deref(), Some(name), "{value}");
        }
        for value in ["NaN", "Infinity", "-Infinity", "1e400"] {
            server.chat(&format!("\"{name}\":{value}")).refused(400);
        }
        // Subnormal numbers are refused; the smallest normal one is accepted or outside the field's range.
        for value in ["1e-45", "1e-38"] {
            let value = if name == "logit_bias" { format!("{{\"5\":{value}}}") } else { value.into() };
            assert_eq!(server.chat(&format!("\"{name}\":{value}")).refused(400).0.as_deref(), Some(name), "{value}");
        }
        let reply = server.chat(&format!("\"{name}\":1.2e-38"));
        assert!([200, 400].contains(&reply.status), "{name}: {}", reply.text());
    }
    for value in ["-0.1", "2.1", "100"] {
        assert_eq!(server.chat(&format!("\"temperature\":{value}")).refused(400).0.as_deref(), Some("temperature"));
    }
}

#[test]
fn fields_are_honoured_or_refused_by_name() {
    let server = Server::start();
    let refused = [
        ("functions", "[{\"name\":\"f\"}]"),
        ("function_call", "{\"name\":\"f\"}"),
        ("guided_json", "{\"type\":\"object\"}"),
        ("guided_choice", "[\"a\"]"),
        ("grammar", "\"root ::= [a]\""),
        ("audio", "{\"voice\":\"a\"}"),
        ("modalities", "[\"text\",\"audio\"]"),
        ("store", "true"),
        ("service_tier", "\"flex\""),
        ("web_search_options", "{}"),
        ("reasoning_effort", "\"low\""),
        ("verbosity", "\"low\""),
        ("prompt_cache_retention", "\"24h\""),
        ("prompt_cache_options", "{}"),
        ("best_of", "2"),
        ("suffix", "\"a\""),
        ("chat_template", "\"{{ 1 }}\""),
        ("temprature", "1"),
        ("stop_sequences", "[\"a\"]"),
    ];
    for (name, value) in refused {
        for stream in ["", ",\"stream\":true"] {
            let (param, code) = server.chat(&format!("\"{name}\":{value}{stream}")).refused(400);
            assert_eq!(param.as_deref(), Some(name));
            assert!(code.is_some_and(|code| ["unsupported_parameter", "unknown_parameter"].contains(&code.as_str())));
        }
    }
    let harmless = [
        "\"tools\":[]",
        "\"tool_choice\":\"none\"",
        "\"response_format\":{\"type\":\"text\"}",
        "\"store\":false",
        "\"modalities\":[\"text\"]",
        "\"service_tier\":\"auto\"",
        "\"user\":\"somebody\"",
        "\"tools\":null",
        "\"stop\":null",
        "\"temprature\":null",
    ];
    for field in harmless {
        server.chat(field).ok();
    }
    assert_eq!(server.complete("\"suffix\":\"end\"").refused(400).0.as_deref(), Some("suffix"));
    assert_eq!(server.complete("\"messages\":[]").refused(400).0.as_deref(), Some("messages"));
    assert_eq!(
        server.chat("\"stream_options\":{\"include_usage\":true}").refused(400).0.as_deref(),
        Some("stream_options")
    );
    let unknown = server.chat("\"stream\":true,\"stream_options\":{\"usage\":true}").refused(400);
    assert_eq!(unknown.0.as_deref(), Some("stream_options.usage"));
}

#[test]
fn invalid_messages() {
    let server = Server::start();
    let bad = [
        ("null", "messages"),
        ("[]", "messages"),
        ("{}", "messages"),
        ("\"hi\"", "messages"),
        ("[1]", "messages[0]"),
        ("[{}]", "messages[0].role"),
        ("[{\"role\":\"user\"}]", "messages[0].content"),
        ("[{\"content\":\"hi\"}]", "messages[0].role"),
        ("[{\"role\":\"wizard\",\"content\":\"hi\"}]", "messages[0].role"),
        ("[{\"role\":1,\"content\":\"hi\"}]", "messages[0].role"),
        ("[{\"role\":\"function\",\"content\":\"hi\",\"name\":\"f\"}]", "messages[0].role"),
        ("[{\"role\":\"user\",\"content\":null}]", "messages[0].content"),
        ("[{\"role\":\"user\",\"content\":5}]", "messages[0].content"),
        ("[{\"role\":\"user\",\"content\":[]}]", "messages[0].content"),
        ("[{\"role\":\"user\",\"content\":[1]}]", "messages[0].content[0]"),
        ("[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages[0].content[0].text"),
        ("[{\"role\":\"user\",\"content\":\"hi\",\"name\":\"me\"}]", "messages[0].name"),
        ("[{\"role\":\"user\",\"content\":\"hi\",\"mood\":\"good\"}]", "messages[0].mood"),
        ("[{\"role\":\"assistant\",\"content\":\"hi\",\"annotations\":[{}]}]", "messages[0].annotations"),
        (
            "[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"http://127.0.0.1:9/x.png\"}}]}]",
            "messages[1].content[0].type",
        ),
    ];
    for (messages, param) in bad {
        for stream in ["", ",\"stream\":true"] {
            let (found, _) = server.chat(&format!("\"messages\":{messages}{stream}")).refused(400);
            assert_eq!(found.as_deref(), Some(param), "{messages}");
        }
    }
    server.post("/v1/chat/completions", "{\"model\":\"tiny\"}").refused(400);
    assert_eq!(server.post("/v1/chat/completions", "{\"messages\":[]}").refused(400).0.as_deref(), Some("model"));
    let parts = "\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"hel\"},{\"type\":\"text\",\"text\":\"lo\"}]}]";
    server.chat(parts).ok();
    // A reply as OpenAI's client represents it and sends it back.
    let reply = "{\"role\":\"assistant\",\"content\":\"hi\",\"refusal\":null,\"annotations\":[],\"audio\":null,\"function_call\":null,\"tool_calls\":null,\"parsed\":null}";
    server.chat(&format!("\"messages\":[{reply},{}]", reply.replace("[]", "null"))).ok();
}

#[test]
fn invalid_prompts() {
    let server = Server::start();
    for prompt in [
        "\"\"",
        "[]",
        "[[]]",
        "[\"\"]",
        "[1,\"a\"]",
        "[\"a\",[1]]",
        "[[1],\"a\"]",
        "[-1]",
        "[1.5]",
        "[96]",
        "[4294967295]",
        "[[1,96]]",
        "{}",
        "5",
        "null",
        "[null]",
        "[true]",
    ] {
        for stream in ["", ",\"stream\":true"] {
            let (param, _) = server.complete(&format!("\"prompt\":{prompt}{stream}")).refused(400);
            assert_eq!(param.as_deref(), Some("prompt"), "{prompt}");
        }
    }
    for prompt in ["\" \"", "[5,6]", "[\"a\",\"b\"]", "[[5],[6,7]]", "[0]"] {
        server.complete(&format!("\"prompt\":{prompt}")).ok();
    }
}

#[test]
fn requests_that_do_not_fit_are_refused_with_both_numbers() {
    let server = Server::start();
    let long = "a".repeat(300);
    for stream in ["", ",\"stream\":true"] {
        let reply = server.complete(&format!("\"prompt\":\"{long}\"{stream}"));
        assert_eq!(reply.refused(400).1.as_deref(), Some("context_length_exceeded"));
        assert!(reply.text().contains(&CONTEXT.to_string()) && reply.text().contains("30"), "{}", reply.text());
        let reply = server.complete(&format!("\"max_tokens\":300{stream}"));
        assert_eq!(reply.refused(400).1.as_deref(), Some("context_length_exceeded"));
        let reply = server.chat(&format!("\"messages\":[{{\"role\":\"user\",\"content\":\"{long}\"}}]{stream}"));
        assert_eq!(reply.refused(400), (Some("messages".into()), Some("context_length_exceeded".into())));
        let reply = server.chat(&format!("\"model\":\"gpt-4\"{stream}"));
        assert_eq!(reply.refused(404), (Some("model".into()), Some("model_not_found".into())));
    }
    assert_eq!(server.chat("\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"i\",\"j\",\"k\",\"l\",\"m\",\"n\",\"o\",\"p\",\"q\"]").refused(400).0.as_deref(), Some("stop"));
    for stop in ["\"\"", "[\"\"]", "5", "[5]", "{}"] {
        assert_eq!(server.chat(&format!("\"stop\":{stop}")).refused(400).0.as_deref(), Some("stop"));
    }
    for bias in ["[]", "{\"a\":1}", "{\"-1\":1}", "{\"5\":101}", "{\"5\":\"1\"}", "{\"96\":1}", "{\"05\":1,\"5\":1}"] {
        assert_eq!(
            server.chat(&format!("\"logit_bias\":{bias}")).refused(400).0.as_deref(),
            Some("logit_bias"),
            "{bias}"
        );
    }
    let many: Vec<String> = (0..5000).map(|id| format!("\"{id}\":1")).collect();
    assert_eq!(
        server.chat(&format!("\"logit_bias\":{{{}}}", many.join(","))).refused(400).0.as_deref(),
        Some("logit_bias")
    );
    for samplers in ["[\"magic\"]", "[\"top_k\",\"top_k\"]", "[\"draw\"]", "\"top_k\""] {
        assert_eq!(server.chat(&format!("\"samplers\":{samplers}")).refused(400).0.as_deref(), Some("samplers"));
    }
    assert_eq!(server.chat("\"samplers\":[\"top_p\"],\"top_k\":5").refused(400).0.as_deref(), Some("samplers"));
    assert_eq!(server.chat("\"n\":20").refused(400).0.as_deref(), Some("n"), "more than `max_sequences`");
    server.get("/v1/models/gpt-4").refused(404);
    server.get("/v1/models/some/thing").refused(404);
    assert_eq!(server.get("/v1/models/tiny").ok()["id"], "tiny");
    // Token ids outside the vocabulary, on the routes for text.
    server.post("/detokenize", "{\"tokens\":[96]}").refused(400);
    server.post("/tokenize", "{\"prompt\":\"a\",\"messages\":[]}").refused(400);
    server.post("/tokenize", "{}").refused(400);
}

#[test]
fn a_model_without_a_template_says_so() {
    let server = Server::with(Setup { has_template: false, ..Setup::default() });
    assert_eq!(server.chat("").refused(400).1.as_deref(), Some("no_chat_template"));
    server.complete("").ok();
}

#[test]
fn helper_bodies_contain_the_given_fields() {
    // The tests above depend on this.
    assert_eq!(chat_body("\"n\":1").matches("\"n\":").count(), 1);
    assert!(!completion_body("\"prompt\":5").contains("hello"));
}

/// Settings that have no effect are refused by name, alone and together with the field they need.
#[test]
fn fields_without_effect_are_refused() {
    let server = Server::start();
    for (field, value) in [
        ("xtc_threshold", "0.2"),
        ("penalty_window", "8"),
        ("dynamic_temperature_exponent", "2"),
        ("dry_base", "2"),
        ("dry_range", "9"),
        ("dry_allowed_length", "5"),
        ("dry_sequence_breakers", "[\"x\"]"),
    ] {
        assert_eq!(server.chat(&format!("\"{field}\":{value}")).refused(400).0.as_deref(), Some(field));
    }
    let moved = server.chat("\"temperature\":0,\"dynamic_temperature_range\":1").refused(400);
    assert_eq!(moved.0.as_deref(), Some("dynamic_temperature_range"));
    // Fields that beam search does not support are refused under the client's name for them.
    for (field, value) in [
        ("min_tokens", "3"),
        ("banned_token_ids", "[5]"),
        ("allowed_token_ids", "[5]"),
        ("dry_multiplier", "0.5"),
        ("frequency_penalty", "0.5"),
        ("presence_penalty", "0.5"),
        ("xtc_probability", "0.5"),
        ("mirostat_tau", "5"),
        ("typical_p", "0.5"),
        ("dynamic_temperature_range", "0.5"),
        ("temperature", "0.5"),
        ("seed", "5"),
    ] {
        for ask in [Server::chat as fn(&Server, &str) -> Response, Server::complete] {
            let refused = ask(&server, &format!("\"beam_width\":2,\"{field}\":{value}")).refused(400);
            assert_eq!(refused.0.as_deref(), Some(field));
        }
    }
    // Names in the template that are not variables that callers may set.
    for name in ["a", "role", "turn", "messag", "for", "m"] {
        server.chat(&format!("\"chat_template_kwargs\":{{\"{name}\":1}}")).refused(400);
    }
    let messages = "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]";
    let refused = server.post("/tokenize", &format!("{{{messages},\"add_special_tokens\":false}}")).refused(400);
    assert_eq!(refused.0.as_deref(), Some("add_special_tokens"));
    let refused = server.post("/tokenize", "{\"prompt\":\"x\",\"add_generation_prompt\":false}").refused(400);
    assert_eq!(refused.0.as_deref(), Some("add_generation_prompt"));
}
