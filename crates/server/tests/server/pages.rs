//! The pages `/`, `/overview` and `/docs`: formats, content, escaping, headers, and how little they tell without a key.

use std::collections::HashSet;
use std::io::{Read, Write};

use crate::support::{Response, Server, Setup, tenant};

/// As Chromium sends it.
const BROWSER: (&str, &str) =
    ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8");

fn browse(server: &Server, path: &str) -> String {
    let reply = server.request("GET", path, &[BROWSER], b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
    check_headers(&reply);
    reply.text()
}

/// Checks that a page may load no other file, and that browsers show it as a page only.
#[track_caller]
fn check_headers(reply: &Response) {
    let policy = reply.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-"), "{policy}");
    for part in ["frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'"] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("script-src") && !policy.contains("unsafe") && !policy.contains("http"), "{policy}");
    for (name, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
    ] {
        assert_eq!(reply.header(name), Some(value));
    }
}

/// Sends a browser's request with the given `Host` and returns the whole response.
fn exchange(server: &Server, request: &str, host: &str) -> String {
    let mut stream = server.connect();
    let (name, value) = BROWSER;
    let head = format!("{request} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{name}: {value}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

/// Returns the values of an attribute.
fn attributes<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let opening = format!("{name}=\"");
    page.split(opening.as_str()).skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
}

#[test]
fn the_overview_says_what_is_served_and_how_to_call_it() {
    let server = Server::with(Setup { aliases: vec!["gpt-4o".into()], ..Setup::default() });
    let page = browse(&server, "/overview");
    let base_url = format!("http://{}", server.address);
    for words in ["<h1>tiny</h1>", "gpt-4o", "256 tokens", "a device for tests", "600 seconds", "4 MiB"] {
        assert!(page.contains(words), "{words}");
    }
    for words in [
        format!("curl {base_url}/v1/chat/completions"),
        format!("OpenAI(base_url=&quot;{base_url}/v1&quot;, api_key=&quot;unused&quot;)"),
        format!("new OpenAI({{ baseURL: &quot;{base_url}/v1&quot;, apiKey: &quot;unused&quot; }})"),
        "model=&quot;tiny&quot;".to_owned(),
    ] {
        assert!(page.contains(&words), "{words} in {page}");
    }
    assert!(!page.contains("PELLUCID_API_KEY"));
    // A model without a template continues texts.
    let server = Server::with(Setup { has_template: false, ..Setup::default() });
    let page = browse(&server, "/overview");
    assert!(page.contains("/v1/completions") && !page.contains("chat.completions"), "{page}");
}

#[test]
fn programs_get_text_or_json() {
    let server = Server::start();
    for headers in [&[][..], &[("Accept", "*/*")], &[("Accept", "text/plain")]] {
        let reply = server.request("GET", "/", headers, b"");
        assert_eq!((reply.status, reply.header("content-type")), (200, Some("text/plain; charset=utf-8")));
        assert_eq!(reply.header("vary"), Some("accept"));
        let text = reply.text();
        assert!(text.starts_with("Pellucid is running.\n") && text.contains("\"tiny\""), "{text}");
    }
    let json = server.request("GET", "/", &[("Accept", "application/json")], b"").ok();
    assert_eq!((json["status"].as_str(), json["models"][0].as_str()), (Some("ok"), Some("tiny")));
    for path in ["/", "/docs"] {
        let get = server.request("GET", path, &[BROWSER], b"");
        let head = exchange(&server, &format!("HEAD {path}"), &server.address.to_string());
        let (head, body) = head.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200") && body.is_empty(), "{head}");
        for line in [format!("content-length: {}", get.body.len()), "content-security-policy: default-src".into()] {
            assert!(head.contains(&line), "{line} in {head}");
        }
        assert_eq!(server.post(path, "{}").refused(405).1.as_deref(), Some("method_not_allowed"));
    }
}

#[test]
fn browsers_get_the_page_and_its_files_under_a_strict_policy() {
    let server = Server::start();
    let kinds = [("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/app.css", "text/css")];
    for (path, kind) in kinds {
        let reply = server.request("GET", path, &[BROWSER], b"");
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.header("content-type"), Some(&*format!("{kind}; charset=utf-8")));
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'; "), "{policy}");
        for part in ["connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "trusted-types 'none'"] {
            assert!(policy.contains(part), "{policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains("http") && !policy.contains('*'), "{policy}");
        // A browser that has the file is not sent it again.
        let tag = reply.header("etag").unwrap().to_owned();
        let again = server.request("GET", path, &[BROWSER, ("If-None-Match", &tag)], b"");
        assert_eq!((again.status, again.body.len()), (304, 0), "{path}");
    }
    let page = server.request("GET", "/", &[BROWSER], b"").text();
    assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains(" onclick"), "{page}");
    for link in attributes(&page, "src").into_iter().chain(attributes(&page, "href")) {
        assert!(link.starts_with("data:") || server.get(link).status == 200, "{link}");
    }
}

#[test]
fn links_lead_somewhere_and_nothing_comes_from_elsewhere() {
    let server = Server::start();
    for path in ["/overview", "/docs"] {
        let page = browse(&server, path);
        assert!(!page.contains("<script") && !page.contains("javascript:") && !page.contains(" onclick"), "{path}");
        assert!(attributes(&page, "src").is_empty() && attributes(&page, "style").is_empty(), "{path}");
        let ids: HashSet<&str> = attributes(&page, "id").into_iter().collect();
        assert_eq!(ids.len(), attributes(&page, "id").len(), "{path}: an id occurs twice");
        for link in attributes(&page, "href") {
            match link.strip_prefix('#') {
                Some(id) => assert!(ids.contains(id), "{path}: {link}"),
                None if link.starts_with("data:image/svg+xml,") => {}
                None => assert_eq!(server.get(link).status, 200, "{path}: {link}"),
            }
        }
    }
}

#[test]
fn the_api_page_shows_the_whole_document() {
    let server = Server::start();
    let page = browse(&server, "/docs");
    let document = server.get("/openapi.json").ok();
    for path in document["paths"].as_object().unwrap().keys() {
        assert!(page.contains(&format!("<code>{path}</code>")), "{path}");
    }
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        for field in schema["properties"].as_object().into_iter().flatten().map(|(field, _)| field) {
            assert!(page.contains(&format!("<dt><code>{field}</code>")), "{name}.{field}");
        }
    }
    assert!(page.contains(&format!("curl http://{}/v1/chat/completions", server.address)), "the example can be run");
    assert!(page.contains("number, 0 to 2, default <code>1.0</code>"), "limits are shown");
}

#[test]
fn names_from_a_model_are_text() {
    let hostile = "</code></pre><script>alert(1)</script><img src=x onerror='alert(2)'>\"&$(id)\u{202e}";
    let server = Server::with(Setup { model_id: hostile, aliases: vec![hostile.to_uppercase()], ..Setup::default() });
    for path in ["/overview", "/docs"] {
        let page = browse(&server, path);
        let lower = page.to_lowercase();
        assert!(lower.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "the control: {path} shows the name");
        for markup in ["<script", "<img", "onerror='", "\u{202e}"] {
            assert!(!lower.contains(markup), "{path}: {markup}");
        }
        // Every element is closed as often as it is opened, so the name has closed none.
        for element in ["pre", "code", "section", "article", "main", "dl", "figure"] {
            let opened = page.matches(&format!("<{element}>")).count() + page.matches(&format!("<{element} ")).count();
            assert_eq!(opened, page.matches(&format!("</{element}>")).count(), "{path}: {element}");
        }
    }
    let text = server.get("/").text();
    assert!(!text.contains('\u{202e}') && text.lines().count() == 5, "{text}");
}

#[test]
fn without_a_key_the_pages_tell_no_more_than_health() {
    let server = Server::with(Setup {
        tenants: vec![tenant("research", "key-of-a"), tenant("sales", "key-of-b")],
        model_id: "model-of-the-house",
        aliases: vec!["alias-of-it".into()],
        context_len: 7232,
        ..Setup::default()
    });
    let secret = [
        "model-of-the-house",
        "alias-of-it",
        "a device for tests",
        "research",
        "sales",
        "key-of",
        "7232",
        "7,232",
        "pellucid-test",
        env!("CARGO_PKG_VERSION"),
    ];
    let accepts = [BROWSER, ("Accept", "*/*"), ("Accept", "application/json")];
    let requests = [("/", accepts[0]), ("/", accepts[1]), ("/", accepts[2]), ("/overview", accepts[0])];
    for (path, accept) in requests.into_iter().chain([("/docs", accepts[0]), ("/page/app.js", accepts[0])]) {
        let reply = server.request("GET", path, &[accept], b"");
        assert_eq!(reply.status, 200, "{path}");
        // Numbers of the style and of the address are no secret.
        let text = reply.text().replace(&server.address.to_string(), "");
        let text = text.split_once("</style>").map_or(text.as_str(), |(_, body)| body).to_owned();
        for word in secret {
            assert!(!text.contains(word), "{path} tells {word:?}");
        }
        // Keys make no difference, so a page is no way to try them.
        for key in ["Bearer key-of-a", "Bearer wrong-key"] {
            let with_key = server.request("GET", path, &[accept, ("Authorization", key)], b"");
            assert_eq!((with_key.status, with_key.body), (200, reply.body.clone()), "{path} {key}");
        }
        assert_eq!(server.request("POST", path, &[accept], b"").refused(401).1.as_deref(), Some("invalid_api_key"));
    }
    let page = browse(&server, "/overview");
    assert!(page.contains("PELLUCID_API_KEY") && page.contains("&quot;MODEL&quot;"), "{page}");
    assert_eq!(server.get("/openapi.json").status, 401);
    assert_eq!(server.get("/docs/").status, 401);
}

#[test]
fn hosts_of_others_are_refused_and_strange_ones_not_shown() {
    let server = Server::start();
    let from = |server: &Server, host: &str| exchange(server, "GET /overview", host);
    assert!(from(&server, "evil.example").starts_with("HTTP/1.1 403"), "a page of another name cannot read it");
    let server = Server::with(Setup { loopback_hosts_only: false, ..Setup::default() });
    assert!(from(&server, "inference.example:8443").contains("curl http://inference.example:8443/v1/"));
    for host in ["a'$(id)'", "\"><b>", "user@host"] {
        let reply = from(&server, host);
        assert!(!reply.contains(host), "{reply}");
        if reply.starts_with("HTTP/1.1 200") {
            assert!(reply.contains(&format!("curl http://{}/v1/", server.address)), "{reply}");
        }
    }
}
