//! Access: keys on every route, limits of tenants, hosts and origins.

use std::io::{BufReader, Write};
use std::net::TcpStream;

use crate::support::socket::Socket;
use crate::support::{Response, Server, Setup, chat_body, tenant};
use pellucid_server::{Limits, TenantConfig};

const CHAT: &str = "/v1/chat/completions";

fn with_keys() -> Server {
    // The tests send many wrong keys, all from one address.
    let limits = Limits { max_wrong_keys: 10_000, ..Limits::default() };
    let tenants = vec![tenant("a", "key-of-a"), tenant("b", "key-of-b")];
    Server::with(Setup { tenants, limits, ..Setup::default() })
}

/// Returns every route of the OpenAPI document, and some that do not exist.
fn routes(server: &Server) -> Vec<(String, String)> {
    let key = [("Authorization", "Bearer key-of-a")];
    let document = server.request("GET", "/openapi.json", &key, b"").ok();
    let mut routes: Vec<(String, String)> = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            routes.push((method.to_uppercase(), path.replace("{id}", "tiny")));
        }
    }
    assert!(routes.len() >= 11, "{routes:?}");
    for (method, path) in
        [("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/"), ("DELETE", CHAT), ("GET", "/v1/models/a/b")]
    {
        routes.push((method.into(), path.into()));
    }
    routes
}

/// Whether a route has errors in OpenAI's form, and not in that of another API.
fn has_openais_errors(path: &str) -> bool {
    !path.starts_with("/v1/messages") && !path.starts_with("/api/")
}

#[test]
fn no_route_but_health_answers_without_a_key() {
    let server = with_keys();
    for (method, path) in routes(&server) {
        for key in [
            None,
            Some("Bearer key-of-c"),
            Some("Bearer "),
            Some("key-of-a"),
            Some("Basic key-of-a"),
            Some("Bearer key-of-a2"),
        ] {
            let mut headers = vec![("Content-Type", "application/json")];
            headers.extend(key.map(|key| ("Authorization", key)));
            let reply = server.request(&method, &path, &headers, b"");
            if path == "/health" {
                assert_eq!(reply.status, 200);
            } else {
                assert_eq!(reply.status, 401, "{method} {path} {key:?}");
                if has_openais_errors(&path) {
                    assert_eq!(reply.refused(401).1.as_deref(), Some("invalid_api_key"), "{method} {path} {key:?}");
                }
                assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
            }
        }
        for header in [("Authorization", "Bearer key-of-a"), ("X-Api-Key", "key-of-b")] {
            let reply = server.request(&method, &path, &[header], b"");
            assert_ne!(reply.status, 401, "{method} {path}: the control: with a key it is another answer");
        }
    }
    assert_ne!(
        server
            .request("GET", "/v1/models", &[("X-Api-Key", "key-of-a"), ("Authorization", "Bearer key-of-b")], b"")
            .status,
        200
    );
}

#[test]
fn metrics_of_all_tenants_need_permission() {
    let watcher = TenantConfig { metrics: true, requests_per_minute: Some(0), ..tenant("watcher", "key-of-watcher") };
    let tenants = vec![tenant("a", "key-of-a"), tenant("b", "key-of-b"), watcher];
    let server = Server::with(Setup { tenants, ..Setup::default() });
    let ask = |server: &Server, key: &str| server.request("GET", "/metrics", &[("X-Api-Key", key)], b"");
    server.post_as("key-of-a", CHAT, &chat_body("")).ok();
    let refused = ask(&server, "key-of-b");
    assert_eq!(refused.refused(403).1.as_deref(), Some("metrics_not_allowed"));
    assert!(ask(&server, "key-of-watcher").text().contains("tenant=\"a\""), "a tenant with the right sees the metrics");
    assert_eq!(
        server.post_as("key-of-watcher", CHAT, &chat_body("")).refused(429).1.as_deref(),
        Some("requests_per_minute")
    );
    // A single tenant sees only itself, so it needs no right.
    let server = Server::with(Setup { tenants: vec![tenant("a", "key-of-a")], ..Setup::default() });
    assert_eq!(ask(&server, "key-of-a").status, 200);
}

#[test]
fn refusals_name_the_limit_and_when_to_retry() {
    let limited = |name: &str, config: TenantConfig| TenantConfig {
        name: name.into(),
        keys: vec![format!("key-of-{name}")],
        ..config
    };
    let tenants = vec![
        limited("requests", TenantConfig { requests_per_minute: Some(2), ..TenantConfig::default() }),
        limited("tokens", TenantConfig { tokens_per_minute: Some(20), ..TenantConfig::default() }),
        limited("logprobs", TenantConfig { logprobs_per_minute: Some(10), ..TenantConfig::default() }),
        limited("places", TenantConfig { concurrent_requests: Some(1), ..TenantConfig::default() }),
        limited("memory", TenantConfig { kv_tokens: Some(32), ..TenantConfig::default() }),
    ];
    let server = Server::with(Setup { tenants, ..Setup::default() });
    // Replies have a known length, so that their cost is known.
    let body =
        |fields: &str| chat_body(&["\"ignore_eos\":true", fields].join(if fields.is_empty() { "" } else { "," }));
    let ask = |name: &str, fields: &str| server.post_as(&format!("key-of-{name}"), CHAT, &body(fields));
    let expect = |name: &str, fields: &str, code: &str| {
        let reply = ask(name, fields);
        assert_eq!(reply.refused(429).1.as_deref(), Some(code));
        assert!(reply.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    };
    ask("requests", "").ok();
    ask("requests", "").ok();
    expect("requests", "", "requests_per_minute");
    ask("tokens", "").ok();
    expect("tokens", "", "tokens_per_minute");
    ask("logprobs", "\"logprobs\":true,\"top_logprobs\":1").ok();
    expect("logprobs", "\"logprobs\":true", "logprob_budget");
    ask("logprobs", "").ok();
    server.slow_down(20);
    let body = chat_body("\"stream\":true,\"max_tokens\":50,\"ignore_eos\":true");
    let first = server.stream_with(&[("X-Api-Key", "key-of-places")], CHAT, &body);
    expect("places", "", "concurrent_requests");
    drop(first);
    server.slow_down(0);
    // Another tenant is not affected by these limits.
    assert_eq!(
        ask("memory", "\"max_tokens\":200").refused(400).0.as_deref(),
        Some("max_tokens"),
        "exceeds the tenant's quota of KV memory"
    );
    ask("memory", "").ok();
}

/// Limits are checked before a body is parsed: 429 takes precedence over any other refusal.
#[test]
fn limits_are_checked_before_any_work() {
    let limited = TenantConfig { requests_per_minute: Some(2), ..tenant("requests", "key-of-requests") };
    let crowded = TenantConfig { concurrent_requests: Some(1), ..tenant("places", "key-of-places") };
    let indebted = TenantConfig { tokens_per_minute: Some(5), ..tenant("tokens", "key-of-tokens") };
    let server = Server::with(Setup { tenants: vec![limited, crowded, indebted], ..Setup::default() });
    let paths = [CHAT, "/v1/completions", "/tokenize", "/detokenize", "/apply-template"];
    let long = format!("{{\"prompt\":\"{}\"}}", "a".repeat(100_000));
    let expect = |name: &str, path: &str, body: &str, code: &str| {
        let reply = server.post_as(&format!("key-of-{name}"), path, body);
        assert_eq!(reply.refused(429).1.as_deref(), Some(code), "{path}");
        assert!(reply.header("retry-after").is_some());
    };
    // Wrong requests count, and so do requests that do not use the model.
    server.post_as("key-of-requests", CHAT, "nonsense").refused(400);
    server.post_as("key-of-requests", "/tokenize", "{\"prompt\":\"a\"}").ok();
    for path in paths {
        expect("requests", path, "nonsense", "requests_per_minute");
        expect("requests", path, &long, "requests_per_minute");
    }
    let (_, mut socket) = Socket::open(&server, "X-Api-Key: key-of-requests\r\n");
    socket.send("nonsense");
    assert_eq!(socket.json()["error"]["code"], "requests_per_minute");
    // The limit on tokens applies only to requests that use the model.
    server.post_as("key-of-tokens", CHAT, &chat_body("\"ignore_eos\":true")).ok();
    for path in paths {
        if path.starts_with("/v1/") {
            expect("tokens", path, "nonsense", "tokens_per_minute");
        } else {
            server.post_as("key-of-tokens", path, "nonsense").refused(400);
        }
    }
    server.slow_down(20);
    let body = chat_body("\"stream\":true,\"max_tokens\":100,\"ignore_eos\":true");
    let first = server.stream_with(&[("X-Api-Key", "key-of-places")], CHAT, &body);
    for path in paths {
        expect("places", path, "nonsense", "concurrent_requests");
    }
    drop(first);
}

/// Sends requests over one connection.
fn ask_over(connection: &mut BufReader<TcpStream>, server: &Server, key: &str) -> Response {
    let head = format!("GET /v1/models HTTP/1.1\r\nHost: {}\r\nX-Api-Key: {key}\r\n\r\n", server.address);
    connection.get_mut().write_all(head.as_bytes()).unwrap();
    Response::read(connection)
}

#[test]
fn a_removed_key_is_refused_at_once() {
    let server = with_keys();
    let mut idle = BufReader::new(server.connect());
    assert_eq!(ask_over(&mut idle, &server, "key-of-a").status, 200);
    let (_, mut removed) = Socket::open(&server, "X-Api-Key: key-of-a\r\n");
    let (_, mut kept) = Socket::open(&server, "X-Api-Key: key-of-b\r\n");
    server.slow_down(20);
    let body = chat_body("\"stream\":true,\"max_tokens\":20,\"ignore_eos\":true");
    let in_flight = server.stream_with(&[("X-Api-Key", "key-of-a")], CHAT, &body);
    let reloaded = server.tenants.replace(vec![tenant("b", "key-of-b"), tenant("c", "key-of-c")]).unwrap();
    assert_eq!((reloaded.added, reloaded.removed), (vec!["c".to_owned()], vec!["a".to_owned()]));
    assert_eq!(ask_over(&mut idle, &server, "key-of-a").refused(401).1.as_deref(), Some("invalid_api_key"));
    assert_eq!(ask_over(&mut BufReader::new(server.connect()), &server, "key-of-c").status, 200);
    // Sockets that were opened before: the control is the one whose key is still valid.
    removed.send(&chat_body(""));
    assert_eq!(removed.json()["error"]["code"], "invalid_api_key");
    kept.send(&chat_body(""));
    assert!(kept.json()["choices"].is_array());
    assert_eq!(
        in_flight.chunks().last().unwrap()["choices"][0]["finish_reason"],
        "length",
        "a reply in flight goes on"
    );
    // A refused file changes nothing.
    server.tenants.replace(vec![tenant("b", "key-of-c"), tenant("c", "key-of-c")]).unwrap_err();
    assert_eq!(ask_over(&mut BufReader::new(server.connect()), &server, "key-of-b").status, 200);
}

#[test]
fn a_request_without_a_host_is_refused() {
    let server = Server::start();
    let ask = |head: &str| {
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        Response::read(&mut BufReader::new(stream)).status
    };
    assert_eq!(ask("GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"), 400);
    assert_eq!(ask("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"), 200, "the control");
    assert_eq!(ask("GET /health HTTP/1.0\r\n\r\n"), 200, "HTTP/1.0 has no such header");
}

#[test]
fn repeated_headers_are_refused() {
    let server = with_keys();
    let ask = |headers: &[(&str, &str)]| server.request("GET", "/v1/models", headers, b"");
    let (good, bad) = (("Authorization", "Bearer key-of-a"), ("Authorization", "Bearer key-of-c"));
    assert_eq!(ask(&[good]).status, 200, "the control");
    let plain = ("X-Api-Key", "key-of-a");
    for headers in [&[good, bad][..], &[bad, good], &[good, good], &[plain, plain], &[good, ("Host", "localhost")]] {
        assert_eq!(ask(headers).refused(400).1.as_deref(), Some("repeated_header"), "{headers:?}");
    }
    // Without a key as well.
    assert_eq!(
        server.request("GET", "/health", &[("Host", "localhost")], b"").refused(400).1.as_deref(),
        Some("repeated_header")
    );
}

#[test]
fn paths_that_are_not_utf8_get_a_json_error() {
    let server = Server::start();
    assert_eq!(server.get("/v1/models/%ff").refused(400).1.as_deref(), Some("invalid_path"));
    for path in ["/v1/models/%", "/v1/models/%zz", "/v1/models/%f", "/v1/models/a/%ff", "/%ff", "/v1/%c3%28"] {
        server.get(path).refused(404);
    }
    assert_eq!(server.get("/v1/models/%74iny").status, 200, "the control: percent-encoding is decoded");
}

#[test]
fn a_server_without_keys_accepts_only_local_hosts() {
    let server = Server::start();
    let ask = |host: &str| {
        let mut stream = server.connect();
        write!(stream, "GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
        Response::read(&mut BufReader::new(stream))
    };
    for host in ["localhost", "127.0.0.1:8000", "[::1]"] {
        assert_eq!(ask(host).status, 200);
    }
    for host in ["attacker.example", "localhost.attacker.example:8000"] {
        assert_eq!(ask(host).refused(403).1.as_deref(), Some("host_not_allowed"));
    }
}

#[test]
fn only_listed_origins_pass_cors() {
    let origin = [("Origin", "https://app.example")];
    let closed = Server::start();
    assert_eq!(closed.request("GET", "/v1/models", &origin, b"").header("access-control-allow-origin"), None);
    let open = Server::with(Setup { cors_origins: vec!["https://app.example".into()], ..Setup::default() });
    let reply = open.request("GET", "/v1/models", &origin, b"");
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://app.example"));
    let asked = [
        ("Origin", "https://app.example"),
        ("Access-Control-Request-Method", "POST"),
        // Includes headers that OpenAI's JavaScript client sends.
        ("Access-Control-Request-Headers", "authorization,content-type,x-stainless-lang,x-stainless-retry-count"),
    ];
    let preflight = open.request("OPTIONS", CHAT, &asked, b"");
    assert_eq!(preflight.status, 200);
    assert_eq!(preflight.header("access-control-allow-headers"), Some(asked[2].1));
    assert_eq!(preflight.header("access-control-allow-origin"), Some("https://app.example"));
    let foreign = [("Origin", "https://other.example"), asked[1], asked[2]];
    assert_eq!(open.request("OPTIONS", CHAT, &foreign, b"").header("access-control-allow-origin"), None);
    let stranger = open.request("GET", "/v1/models", &[("Origin", "https://other.example")], b"");
    assert_eq!(stranger.header("access-control-allow-origin"), None);
}

#[test]
fn every_response_has_a_request_id() {
    let server = Server::start();
    assert!(server.get("/health").header("x-request-id").unwrap().starts_with("req-"));
    let given = server.request("GET", "/health", &[("X-Request-Id", "my-id.1")], b"");
    assert_eq!(given.header("x-request-id"), Some("my-id.1"));
    let odd = server.request("GET", "/nothing", &[("X-Request-Id", "a b\tc")], b"");
    assert!(odd.header("x-request-id").unwrap().starts_with("req-"));
}
