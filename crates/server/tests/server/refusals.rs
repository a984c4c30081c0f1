//! Refused requests with their exact status and error object: whole, streamed, and over the WebSocket for chats. The
//! other test files try more values; this one pins what a client reads.

use std::io::{BufReader, Write};
use std::time::Duration;

use crate::support::socket::Socket;
use crate::support::{LOST_DEVICE, NO_MEMORY, Response, Server, Setup, chat_body, completion_body, tenant};
use pellucid_server::{Ended, Limits};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

/// Message, `param` and `code` of an error; `type` follows from the status.
type ExpectedError<'a> = (&'a str, Option<&'a str>, Option<&'a str>);

#[track_caller]
fn check(reply: &Response, status: u16, (message, param, code): ExpectedError<'_>) {
    let kind = match status {
        429 => "rate_limit_error",
        503 => "service_unavailable",
        _ => "invalid_request_error",
    };
    reply.refused(status);
    assert_eq!(reply.json(), json!({ "error": { "message": message, "type": kind, "param": param, "code": code } }));
}

/// Checks that a route refuses `fields`, whole and streamed; a chat also over the WebSocket.
#[track_caller]
fn refuses(server: &Server, path: &str, fields: &str, status: u16, error: ExpectedError<'_>) {
    let body = if path == CHAT { chat_body } else { completion_body };
    for stream in ["", ",\"stream\":true"] {
        check(&server.post(path, &body(&format!("{fields}{stream}"))), status, error);
    }
    if path == CHAT {
        let (_, mut socket) = Socket::open(server, "");
        socket.send(&body(fields));
        let reply = socket.json();
        assert_eq!(reply["error"]["message"], error.0, "the WebSocket returns the same error");
        assert_eq!((reply["error"]["param"].as_str(), reply["error"]["code"].as_str()), (error.1, error.2));
        assert_eq!(socket.next(), None);
    }
}

#[test]
fn bodies() {
    let server =
        Server::with(Setup { limits: Limits { max_body_bytes: 200_000, ..Limits::default() }, ..Setup::default() });
    let deep = format!("{{\"stream\":true,\"messages\":{}", "[".repeat(100_000));
    let rows: [(&[u8], ExpectedError<'_>); 8] = [
        (b"nonsense", ("the body is not valid JSON: expected a value at line 1 column 1", None, Some("invalid_json"))),
        (
            b"{\"stream\":true,",
            (
                "the body is not valid JSON: expected a name in quotation marks, found the end at line 1 column 16",
                None,
                Some("invalid_json"),
            ),
        ),
        (b"[]", ("the body is an array, expected an object", None, Some("invalid_type"))),
        (b"null", ("the body is null, expected an object", None, Some("invalid_type"))),
        (
            b"{\"model\":\"\xff\"}",
            (
                "the body is not valid JSON: found bytes that are not UTF-8 at line 1 column 11",
                None,
                Some("invalid_json"),
            ),
        ),
        (
            b"{\"model\":\"\\ud800\"}",
            (
                "the body is not valid JSON: found an escape that is not a Unicode character: a lone surrogate at line 1 column 11",
                None,
                Some("invalid_json"),
            ),
        ),
        (
            b"{\"stream\":true,\"stream\":true}",
            (
                "the body is not valid JSON: the name \"stream\" occurs twice in one object at line 1 column 16",
                None,
                Some("invalid_json"),
            ),
        ),
        (
            deep.as_bytes(),
            (
                "the body is not valid JSON: arrays and objects are nested deeper than 127 levels at line 1 column 153",
                None,
                Some("invalid_json"),
            ),
        ),
    ];
    for path in [CHAT, COMPLETIONS] {
        for (body, error) in &rows {
            check(&server.request("POST", path, &JSON, body), 400, *error);
        }
        let large = format!("{{\"stream\":true,\"user\":\"{}\"}}", "a".repeat(300_000));
        let error = ("the body is larger than 200000 bytes", None, Some("request_too_large"));
        check(&server.post(path, &large), 413, error);
        let error = (
            "the body must be JSON, with the header `Content-Type: application/json`",
            None,
            Some("unsupported_media_type"),
        );
        check(&server.request("POST", path, &[("Content-Type", "text/plain")], b"{\"stream\":true}"), 415, error);
        let wrong = server.get(path);
        assert_eq!(wrong.header("allow"), Some("POST"));
        let message = format!("GET {path}: this route does not support the method; it has POST");
        check(&wrong, 405, (message.as_str(), None, Some("method_not_allowed")));
    }
    for path in [CHAT, COMPLETIONS] {
        let error =
            ("the model \"gpt-4o\" does not exist; this server has \"tiny\"", Some("model"), Some("model_not_found"));
        refuses(&server, path, "\"model\":\"gpt-4o\"", 404, error);
    }
}

#[test]
fn messages() {
    let server = Server::start();
    let (typed, missing) = (Some("invalid_type"), Some("missing_required_parameter"));
    let rows = [
        ("null", "messages is missing", "messages", missing),
        ("[]", "messages: expected at least one message, found none", "messages", Some("empty_array")),
        ("\"hi\"", "messages: expected an array, found a string", "messages", typed),
        ("[\"hi\"]", "messages[0]: expected an object, found a string", "messages[0]", typed),
        ("[{\"role\":\"user\"}]", "messages[0].content is missing", "messages[0].content", missing),
        ("[{\"content\":\"hi\"}]", "messages[0].role is missing", "messages[0].role", missing),
        (
            "[{\"role\":\"user\",\"content\":7}]",
            "messages[0].content: expected a string or an array of text parts, found an integer",
            "messages[0].content",
            typed,
        ),
        (
            "[{\"role\":\"wizard\",\"content\":\"hi\"}]",
            "messages[0].role: expected system, developer, user, assistant or tool, found \"wizard\"",
            "messages[0].role",
            Some("invalid_value"),
        ),
        (
            "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"http://127.0.0.1:9/a\"}}]}]",
            "messages[0].content[0].type: this model reads text only, found \"image_url\"",
            "messages[0].content[0].type",
            Some("unsupported_value"),
        ),
    ];
    for (messages, message, param, code) in rows {
        refuses(&server, CHAT, &format!("\"messages\":{messages}"), 400, (message, Some(param), code));
    }
}

#[test]
fn prompts_that_are_too_long() {
    let server = Server::start();
    let long = "a".repeat(300);
    let exceeded = Some("context_length_exceeded");
    let tokens = |text: &str| server.post("/tokenize", text).ok()["count"].as_u64().unwrap();
    let count = tokens(&format!("{{\"prompt\":\"{long}\"}}"));
    let message = format!("this model's maximum context length is 256 tokens, but the prompt has {count}");
    refuses(&server, COMPLETIONS, &format!("\"prompt\":\"{long}\""), 400, (&message, Some("prompt"), exceeded));
    let messages = format!("\"messages\":[{{\"role\":\"user\",\"content\":\"{long}\"}}]");
    let count = tokens(&format!("{{{messages}}}"));
    let message = format!("this model's maximum context length is 256 tokens, but the prompt has {count}");
    refuses(&server, CHAT, &messages, 400, (&message, Some("messages"), exceeded));
    // A text that cannot fit is not encoded at all: no token of this vocabulary has more than 6 bytes.
    let long = "a".repeat(60_000);
    let message = "this model's maximum context length is 256 tokens, but the prompt has at least 10000";
    refuses(&server, COMPLETIONS, &format!("\"prompt\":\"{long}\""), 400, (message, Some("prompt"), exceeded));
    let count = tokens("{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}");
    let message = format!(
        "this model's maximum context length is 256 tokens, but the request needs {}: {count} for the prompt \
         and up to 256 for the reply",
        count + 256
    );
    refuses(&server, CHAT, "\"max_tokens\":256", 400, (&message, Some("messages"), exceeded));
}

#[test]
fn numbers() {
    let server = Server::start();
    let (range, typed) = (Some("out_of_range"), Some("invalid_type"));
    let rows = [
        ("temperature", "2.5", "temperature: expected 0 to 2, found 2.5", range),
        ("temperature", "-1", "temperature: expected 0 to 2, found -1", range),
        ("temperature", "\"1\"", "temperature: expected a number, found a string", typed),
        ("temperature", "true", "temperature: expected a number, found a boolean", typed),
        ("temperature", "1e-45", "", range),
        ("top_p", "1.1", "top_p: expected 0 to 1, found 1.1", range),
        ("frequency_penalty", "-3", "frequency_penalty: expected -2 to 2, found -3", range),
        ("presence_penalty", "[]", "presence_penalty: expected a number, found an array", typed),
        ("seed", "-2", "seed: expected -1 to 9223372036854775807, found -2", range),
        ("seed", "1.5", "seed: expected an integer, found a number", typed),
        ("max_tokens", "0.5", "max_tokens: expected an integer, found a number", typed),
        ("max_tokens", "-1", "", range),
        ("n", "0", "n: expected 1 to 128, found 0", range),
        ("n", "1000000000", "n: expected 1 to 128, found 1000000000", range),
        ("n", "1e30", "n: expected 1 to 128, found 1e30", range),
        ("top_k", "-1", "top_k: expected 0 to 4294967295, found -1", range),
    ];
    for (name, value, message, code) in rows {
        for path in [CHAT, COMPLETIONS] {
            // Completions allow `max_tokens: 0`, to score the prompt alone; chats do not.
            let message = match (name, value, path) {
                ("max_tokens", "-1", CHAT) => "max_tokens: expected 1 to 2147483647, found -1",
                ("max_tokens", "-1", _) => "max_tokens: expected 0 to 2147483647, found -1",
                ("temperature", "1e-45", _) => {
                    "temperature: expected 0 or at least 1.1754944e-38, found a number between them"
                }
                _ => message,
            };
            refuses(&server, path, &format!("\"{name}\":{value}"), 400, (message, Some(name), code));
        }
    }
    for value in ["NaN", "Infinity", "-Infinity", "1e400"] {
        for (path, body) in [(CHAT, chat_body as fn(&str) -> String), (COMPLETIONS, completion_body)] {
            for stream in ["", ",\"stream\":true"] {
                let reply = server.post(path, &body(&format!("\"temperature\":{value}{stream}")));
                assert_eq!(reply.refused(400), (None, Some("invalid_json".into())), "{value} is not JSON");
            }
        }
    }
}

#[test]
fn limits_of_lists() {
    let server = Server::start();
    let range = Some("out_of_range");
    let above = Some("array_above_max_length");
    let stops: Vec<String> = (0..17).map(|i| format!("\"stop {i}\"")).collect();
    let bias: Vec<String> = (0..5000).map(|id| format!("\"{id}\":1")).collect();
    for path in [CHAT, COMPLETIONS] {
        let fields = format!("\"stop\":[{}]", stops.join(","));
        refuses(&server, path, &fields, 400, ("stop: expected at most 16 entries, found 17", Some("stop"), above));
        let fields = format!("\"logit_bias\":{{{}}}", bias.join(","));
        let error = ("logit_bias: expected at most 4096 entries, found 5000", Some("logit_bias"), above);
        refuses(&server, path, &fields, 400, error);
        let error = ("logit_bias: expected -100 to 100, found 101", Some("logit_bias"), range);
        refuses(&server, path, "\"logit_bias\":{\"5\":101}", 400, error);
        let error = ("logit_bias: token 96 is outside the vocabulary of 96", Some("logit_bias"), range);
        refuses(&server, path, "\"logit_bias\":{\"96\":1}", 400, error);
    }
    let error = ("top_logprobs: expected 0 to 20, found 21", Some("top_logprobs"), range);
    refuses(&server, CHAT, "\"logprobs\":true,\"top_logprobs\":21", 400, error);
    let error = ("logprobs: expected 0 to 20, found 21", Some("logprobs"), range);
    refuses(&server, COMPLETIONS, "\"logprobs\":21", 400, error);
    let error = ("best_of: expected 1 to 128, found 1000000000", Some("best_of"), range);
    refuses(&server, COMPLETIONS, "\"best_of\":1000000000", 400, error);
    let error = ("prompt: the token id 96 is outside the vocabulary of 96", Some("prompt"), range);
    refuses(&server, COMPLETIONS, "\"prompt\":[5,96]", 400, error);
    for prompt in ["\"\"", "[]", "[[]]"] {
        let error = (
            "prompt: expected a prompt of at least one token, found an empty one",
            Some("prompt"),
            Some("invalid_value"),
        );
        refuses(&server, COMPLETIONS, &format!("\"prompt\":{prompt}"), 400, error);
    }
    let error = ("tools[0].function is missing", Some("tools[0].function"), Some("missing_required_parameter"));
    refuses(&server, CHAT, "\"tools\":[{\"type\":\"function\"}]", 400, error);
    for path in [CHAT, COMPLETIONS] {
        let error = ("unknown field \"tempreature\"", Some("tempreature"), Some("unknown_parameter"));
        refuses(&server, path, "\"tempreature\":1", 400, error);
    }
}

#[test]
fn keys() {
    let server = Server::with(Setup { tenants: vec![tenant("a", "key-of-a")], ..Setup::default() });
    let missing = "missing API key: send it as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`";
    let wrong = "Incorrect API key provided: it is none of this server's keys";
    for (path, body) in [(CHAT, chat_body as fn(&str) -> String), (COMPLETIONS, completion_body)] {
        for stream in ["", "\"stream\":true"] {
            let reply = server.post(path, &body(stream));
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
            check(&reply, 401, (missing, None, Some("invalid_api_key")));
            check(&server.post_as("key-of-b", path, &body(stream)), 401, (wrong, None, Some("invalid_api_key")));
            assert_eq!(server.post_as("key-of-a", path, &body(stream)).status, 200, "the right key is accepted");
        }
    }
}

#[test]
fn a_full_queue_and_a_server_that_shuts_down() {
    let server = Server::with(Setup { max_sequences: 1, max_waiting: 1, ..Setup::default() });
    server.slow_down(200);
    let long = chat_body("\"ignore_eos\":true,\"max_tokens\":200,\"stream\":true");
    let running = server.stream(CHAT, &long);
    server.until("pellucid_sequences_running", 1.0);
    let waiting = server.send("POST", CHAT, &JSON, long.as_bytes());
    server.until("pellucid_requests_waiting", 1.0);
    for (path, body) in [(CHAT, chat_body as fn(&str) -> String), (COMPLETIONS, completion_body)] {
        for stream in ["", "\"stream\":true"] {
            let reply = server.post(path, &body(stream));
            assert_eq!(reply.header("retry-after"), Some("1"));
            check(&reply, 429, ("the queue is full; try again later", None, Some("queue_full")));
        }
    }
    server.drain.signal();
    let draining = "the server is shutting down and takes no new requests; try again later or on another server";
    for (path, body) in [(CHAT, chat_body as fn(&str) -> String), (COMPLETIONS, completion_body)] {
        for stream in ["", "\"stream\":true"] {
            let reply = server.post(path, &body(stream));
            assert_eq!(reply.header("retry-after"), Some("10"));
            check(&reply, 503, (draining, None, Some("draining")));
        }
    }
    drop((running, waiting));
}

/// Logits that are NaN end their own request and no other.
#[test]
fn an_error_after_the_stream_began() {
    let server = Server::start();
    let short = chat_body("\"seed\":1,\"ignore_eos\":true,\"max_tokens\":60");
    let long = format!(
        "\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}],\"ignore_eos\":true,\"max_tokens\":60",
        "a".repeat(120)
    );
    let alone = server.post(CHAT, &short).ok()["choices"].clone();
    server.fail_from(150);
    let other = server.send("POST", CHAT, &JSON, short.as_bytes());
    let error = json!({
        "message": "internal error while serving this request; the server's log has the cause",
        "type": "server_error", "param": null, "code": "internal_error"
    });
    let data = server.stream(CHAT, &chat_body(&format!("{long},\"stream\":true"))).all();
    assert!(data.len() > 5 && data[..data.len() - 1].iter().all(|data| data.contains("\"choices\"")), "{data:?}");
    let last: Value = serde_json::from_str(data.last().unwrap()).unwrap();
    assert_eq!(last, json!({ "error": error }), "an error event, and no [DONE] after it");
    let whole = server.post(CHAT, &chat_body(&long));
    whole.refused(500);
    assert_eq!(whole.json(), json!({ "error": error }));
    assert_eq!(Response::read(&mut BufReader::new(other)).ok()["choices"], alone);
    server.settles();
    assert_eq!(server.metric("pellucid_engine_failures_total"), 2.0);
}

/// A step that runs out of device memory ends its requests with a 503; later requests are served.
#[test]
fn a_step_that_runs_out_of_memory() {
    let server = Server::start();
    let body = chat_body("\"seed\":1,\"max_tokens\":5");
    let usual = server.post(CHAT, &body).ok()["choices"].clone();
    server.fail_with(NO_MEMORY);
    let refused = server.post(CHAT, &body);
    refused.refused(503);
    assert_eq!(refused.json()["error"]["code"], "out_of_memory");
    server.fail_with(0);
    assert_eq!(server.post(CHAT, &body).ok()["choices"], usual);
    server.settles();
}

/// When the device is lost, requests in flight get a 503 and the server shuts down.
#[test]
fn a_device_that_is_lost() {
    let server = Server::start();
    server.slow_down(100);
    let waits = server.send("POST", CHAT, &JSON, chat_body("\"ignore_eos\":true,\"max_tokens\":60").as_bytes());
    server.fail_with(LOST_DEVICE);
    let refused = Response::read(&mut BufReader::new(waits));
    refused.refused(503);
    assert_eq!(refused.json()["error"]["code"], "device_lost");
    assert_eq!(server.ended(), Ended::EngineStopped);
}

/// A body that is sent only in part is refused after `body_timeout`.
#[test]
fn a_body_that_does_not_arrive() {
    let limits = Limits { body_timeout: Duration::from_millis(200), min_transfer_rate: 0, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let mut stream = server.connect();
    let head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 100";
    write!(stream, "POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n{{\"stream\":true,").unwrap();
    let reply = Response::read(&mut BufReader::new(stream));
    check(&reply, 408, ("the body did not arrive in time", None, Some("body_timeout")));
}
