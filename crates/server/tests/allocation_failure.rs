//! The server when the system refuses memory. For each kind of request, the first, the second, the third... allocation
//! above 8 KiB fails, until none is left that can fail. Each time the request succeeds, or gets a 503 with
//! `Retry-After`, or, if its reply has begun, an error event, a close code or the end of the connection. Afterwards the
//! server answers as before, and nothing is held any more.
//!
//! Allocations of up to 8 KiB are let through: a failure of one ends the process. Their sizes do not grow with a
//! request (a future, a timer, a small string), they are too many to handle each (the standard library and all
//! libraries make them), and the system refuses large allocations long before it refuses small ones.
//!
//! Two things above 8 KiB are let through. The buffers of connections in `hyper` and `bytes`, whose size is bounded for
//! each connection. And allocations whose size the model determines and not the request, such as a row of logits; those
//! of the tiny model are small.
//!
//! This is a separate test program because it replaces the allocator of the whole process. An allocation that cannot
//! report its failure aborts the process, so the test fails there.

#[path = "server/support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};
use support::socket::Socket;
use support::{MODEL, Response, Server, Setup};

/// Minimum bytes of an allocation that grows with a request. The buffer that every connection begins with has 8 KiB.
const LARGE: usize = (8 << 10) + 1;
/// Libraries whose allocations are let through: they hold the buffers of connections, which are bounded.
const LIBRARIES: [&str; 2] = ["bytes", "hyper"];
/// Every failing allocation of a request is tested up to this number, and beyond it every seventh: a reply of many
/// pieces makes the same allocations for each.
const ALL_UP_TO: usize = 40;

/// Large allocations until the one that fails; 0 if none does.
static COUNTDOWN: AtomicUsize = AtomicUsize::new(0);
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread's allocations always succeed.
    static IS_EXEMPT: Cell<bool> = const { Cell::new(false) };
}

struct Failing;

impl Failing {
    fn refuses(size: usize) -> bool {
        if size < LARGE || COUNTDOWN.load(Ordering::Relaxed) == 0 || IS_EXEMPT.get() {
            return false;
        }
        let before = COUNTDOWN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if before != Ok(1) {
            return false;
        }
        IS_EXEMPT.set(true);
        let library = library(&Backtrace::force_capture().to_string());
        let is_refused = library.is_none_or(|name| !LIBRARIES.contains(&name.as_str()));
        HAS_FAILED.store(is_refused, Ordering::Relaxed);
        IS_EXEMPT.set(false);
        is_refused
    }
}

// SAFETY: every call is refused or forwarded to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if Failing::refuses(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if Failing::refuses(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: passed on from the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if Failing::refuses(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: passed on from the caller.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static FAILING: Failing = Failing;

/// Returns the library that allocates, by the innermost frame that is not the standard library's; `None` for the
/// server and the crates below it. A frame has a source file, or, without debug information, a path as its symbol.
fn library(trace: &str) -> Option<String> {
    let mut lines = trace.lines().map(str::trim_start).peekable();
    while let Some(line) = lines.next() {
        let place = lines.next_if(|next| next.starts_with("at "));
        let found = match place {
            Some(place) => library_of_file(place),
            None => library_of_symbol(line.split_once(": ").map_or(line, |(_, symbol)| symbol)),
        };
        match found {
            Origin::Standard => {}
            Origin::Library(name) => return Some(name),
            Origin::Own => return None,
        }
    }
    None
}

/// The code that a frame belongs to.
enum Origin {
    /// The standard library, or this test's allocator.
    Standard,
    Library(String),
    Own,
}

fn library_of_file(place: &str) -> Origin {
    if place.contains("/rustc/") || place.contains("allocation_failure.rs") {
        return Origin::Standard;
    }
    let folder = place.split_once("/registry/src/").and_then(|(_, rest)| rest.split('/').nth(1));
    let name = folder.and_then(|folder| folder.rsplit_once('-'));
    name.map_or(Origin::Own, |(name, _)| Origin::Library(name.to_owned()))
}

fn library_of_symbol(symbol: &str) -> Origin {
    let path = symbol.trim_start_matches(['<', '&', '*', '(', '[']);
    let name = path.split([':', '<', ' ']).next().unwrap_or_default();
    match name {
        "std" | "core" | "alloc" | "allocation_failure" | "__rustc" => Origin::Standard,
        _ if name.starts_with("pellucid") => Origin::Own,
        _ => Origin::Library(name.to_owned()),
    }
}

/// Calls `request` while its `n`-th large allocation fails. Returns whether one failed, and whether there were `n`.
fn with_failure<T>(n: usize, request: impl FnOnce() -> T) -> (T, bool, bool) {
    HAS_FAILED.store(false, Ordering::Relaxed);
    COUNTDOWN.store(n, Ordering::Relaxed);
    let reply = request();
    let left = COUNTDOWN.swap(0, Ordering::Relaxed);
    (reply, HAS_FAILED.load(Ordering::Relaxed), left == 0)
}

/// A reply as a client sees it: its status, and the parts that are the same every time.
#[derive(Debug, PartialEq)]
struct Seen {
    status: u16,
    content: Vec<Value>,
    /// Whether the reply is a refusal that may be tried again, a stream that ended with such an error, or a reply that
    /// broke off.
    is_shortage: bool,
}

impl Seen {
    fn whole(reply: &Response) -> Seen {
        if !reply.is_complete {
            return Seen { status: reply.status, content: Vec::new(), is_shortage: true };
        }
        let body: Value = serde_json::from_str(&reply.text()).unwrap();
        let content = if body["choices"].is_null() { body.clone() } else { body["choices"].clone() };
        let has_header = reply.header("retry-after").is_some();
        Seen { status: reply.status, content: vec![content], is_shortage: reply.status == 503 && has_header }
    }

    /// `is_complete` tells whether the last event may be half an event.
    fn events(mut events: Vec<String>, is_complete: bool) -> Seen {
        let is_done = events.pop_if(|event| event == "[DONE]").is_some();
        let mut values = Vec::new();
        for event in &events {
            match serde_json::from_str::<Value>(event) {
                Ok(value) => values.push(value),
                Err(error) => assert!(!is_complete, "{error}: {event}"),
            }
        }
        let is_error = values.last().is_some_and(|value| value["error"]["type"] == "service_unavailable");
        // Neighbouring chunks may be joined differently in each reply, so the text of each choice is compared.
        let mut content = Vec::<Value>::new();
        for choice in values.iter().flat_map(|value| value["choices"].as_array().into_iter().flatten()) {
            let index = choice["index"].as_u64().unwrap() as usize;
            content.resize(content.len().max(index + 1), json!(["", [], ""]));
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
            let before = content[index][0].as_str().unwrap().to_owned();
            content[index][0] = json!(before + text);
            let logprobs = &choice["logprobs"];
            let tokens = logprobs["content"].as_array().or(logprobs["token_logprobs"].as_array());
            content[index][1].as_array_mut().unwrap().extend(tokens.into_iter().flatten().cloned());
            if let Some(reason) = choice["finish_reason"].as_str() {
                content[index][2] = json!(reason);
            }
        }
        Seen { status: 200, content, is_shortage: !is_done && (is_error || !is_complete) }
    }
}

fn post(server: &Server, path: &str, body: &Value) -> Seen {
    Seen::whole(&server.post(path, &body.to_string()))
}

fn stream(server: &Server, path: &str, body: &Value) -> Seen {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_obfuscation": false });
    let reply = server.post(path, &body.to_string());
    if reply.status != 200 {
        return Seen::whole(&reply);
    }
    let text = reply.text();
    let events = text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned);
    Seen::events(events.collect(), reply.is_complete)
}

fn socket(server: &Server, body: &Value) -> Seen {
    let mut body = body.clone();
    body["stream_options"] = json!({ "include_obfuscation": false });
    let (_, mut socket) = Socket::open(server, "");
    socket.send(&body.to_string());
    let mut events = Vec::new();
    while let Some(event) = socket.next() {
        let is_last = event == "[DONE]" || event.starts_with("{\"error\"");
        events.push(event);
        if is_last {
            break;
        }
    }
    Seen::events(events, true)
}

/// Fails the large allocations of a request, one after the other. Returns the number that failed.
fn sweep(server: &Server, name: &str, request: impl Fn() -> Seen) -> usize {
    let expected = request();
    assert_eq!((expected.status, expected.is_shortage), (200, false), "{name}: {expected:?}");
    // The caches of the engine and of this process are warm now.
    assert_eq!(request(), expected, "{name}");
    let probe = json!({ "model": MODEL, "prompt": "Hello", "max_tokens": 2, "temperature": 0 });
    let probe = || post(server, "/v1/completions", &probe);
    let usual = probe();
    let (mut n, mut num_failed) = (1, 0);
    loop {
        let (seen, has_failed, was_reached) = with_failure(n, &request);
        num_failed += usize::from(has_failed);
        let survived = seen == expected || has_failed && seen.is_shortage;
        assert!(survived, "{name}, allocation {n} (failed: {has_failed}): {seen:?}");
        server.settles();
        server.until("pellucid_client_memory_bytes", 0.0);
        assert_eq!(probe(), usual, "{name}, after the failure of allocation {n}");
        if !was_reached {
            break;
        }
        n += if n < ALL_UP_TO { 1 } else { 7 };
    }
    assert_eq!(request(), expected, "{name}, after {num_failed} failures");
    println!("{name}: {num_failed} of up to {n} allocations failed");
    num_failed
}

#[test]
fn a_refused_allocation_ends_one_request_and_nothing_else() {
    IS_EXEMPT.set(true);
    let server = Server::with(Setup { context_len: 16 << 10, max_waiting: 64, ..Setup::default() });
    let text = "Hello there, ".repeat(400);
    let fields = |fields: Value| {
        let mut body = json!({ "model": MODEL, "max_tokens": 2, "temperature": 0 });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    let user = |content: &Value| json!([{ "role": "user", "content": content }]);
    let parts = json!([{ "type": "text", "text": text }, { "type": "text", "text": "and more" }]);
    let chat = fields(json!({ "messages": user(&json!(text)) }));
    let several = fields(json!({ "messages": user(&parts), "n": 3, "max_tokens": 40, "temperature": 1, "seed": 1,
                                 "logprobs": true, "top_logprobs": 20 }));
    let escaped = fields(json!({ "messages": [{ "role": "developer", "content": "\n\"é\"\t".repeat(1500) }] }));
    let turn = |i: usize| json!({ "role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": "ab" });
    let turns = (0..400).map(turn);
    let turns = fields(json!({ "messages": turns.collect::<Vec<_>>() }));
    let traced = fields(json!({ "messages": user(&json!("Hi")), "max_tokens": 80, "temperature": 1, "seed": 1,
                                "ignore_eos": true, "trace": true }));
    let reported = fields(json!({ "messages": user(&json!("Hi")), "max_tokens": 200, "temperature": 1, "seed": 1,
                                  "ignore_eos": true, "logprobs": true, "top_logprobs": 20 }));
    let ids: Vec<u32> = (0..3000).map(|i| 5 + i % 50).collect();
    let by_ids = fields(json!({ "prompt": ids }));
    let prompts: Vec<String> = (0..60).map(|i| format!("{i} {}", &text[..20])).collect();
    let prompts = fields(json!({ "prompt": prompts }));
    let beams = json!({ "model": MODEL, "prompt": ids, "max_tokens": 2, "beam_width": 2, "n": 2 });
    let best = fields(json!({ "prompt": "Hello", "max_tokens": 150, "temperature": 1, "seed": 1, "best_of": 4, "n": 2,
                              "logprobs": 5, "ignore_eos": true }));
    let echo = fields(json!({ "prompt": &text[..2400], "echo": true, "logprobs": 5 }));
    let plain_echo = fields(json!({ "prompt": text, "echo": true }));
    let tokenize = json!({ "prompt": text, "return_token_strs": true });
    let tokenize_alone = json!({ "prompt": text, "add_special_tokens": false });
    let template = json!({ "messages": chat["messages"] });
    let turns_template = json!({ "messages": turns["messages"] });
    let more_ids: Vec<u32> = ids.iter().chain(&ids).chain(&ids).copied().collect();
    let detokenize = json!({ "tokens": more_ids });
    let (chats, completions) = ("/v1/chat/completions", "/v1/completions");
    let counts = [
        ("chat", sweep(&server, "chat", || post(&server, chats, &chat))),
        ("stream", sweep(&server, "stream", || stream(&server, chats, &chat))),
        ("websocket", sweep(&server, "websocket", || socket(&server, &chat))),
        ("escapes", sweep(&server, "escapes", || post(&server, chats, &escaped))),
        ("turns", sweep(&server, "turns", || post(&server, chats, &turns))),
        ("several", sweep(&server, "several", || post(&server, chats, &several))),
        ("trace", sweep(&server, "trace", || post(&server, chats, &traced))),
        ("streamed trace", sweep(&server, "streamed trace", || stream(&server, chats, &traced))),
        ("log probabilities", sweep(&server, "log probabilities", || stream(&server, chats, &reported))),
        ("ids", sweep(&server, "ids", || post(&server, completions, &by_ids))),
        ("prompts", sweep(&server, "prompts", || post(&server, completions, &prompts))),
        ("best_of", sweep(&server, "best_of", || post(&server, completions, &best))),
        ("streamed best_of", sweep(&server, "streamed best_of", || stream(&server, completions, &best))),
        ("beams", sweep(&server, "beams", || post(&server, completions, &beams))),
        ("echo", sweep(&server, "echo", || post(&server, completions, &echo))),
        ("streamed echo", sweep(&server, "streamed echo", || stream(&server, completions, &echo))),
        ("plain echo", sweep(&server, "plain echo", || stream(&server, completions, &plain_echo))),
        ("tokenize", sweep(&server, "tokenize", || post(&server, "/tokenize", &tokenize))),
        ("tokenize alone", sweep(&server, "tokenize alone", || post(&server, "/tokenize", &tokenize_alone))),
        ("detokenize", sweep(&server, "detokenize", || post(&server, "/detokenize", &detokenize))),
        ("template", sweep(&server, "template", || post(&server, "/apply-template", &template))),
        (
            "turns of a template",
            sweep(&server, "turns of a template", || post(&server, "/apply-template", &turns_template)),
        ),
    ];
    // The chunks of these two are large only if the reader is late and several tokens gather in one.
    let depends_on_timing = ["streamed trace", "log probabilities"];
    for (name, count) in counts.iter().filter(|(name, _)| !depends_on_timing.contains(name)) {
        assert!(*count >= 1, "{name}: no allocation failed");
    }
    let total: usize = counts.iter().map(|(_, count)| count).sum();
    assert!(total >= 100, "only {total} allocations failed");
}

/// An allocation that cannot report its failure ends the process: the test above would notice.
#[test]
fn an_allocation_that_cannot_report_its_failure_aborts() {
    const VARIABLE: &str = "PELLUCID_TEST_ABORTS";
    if std::env::var_os(VARIABLE).is_some() {
        COUNTDOWN.store(1, Ordering::Relaxed);
        std::hint::black_box(Vec::<u8>::with_capacity(LARGE));
        COUNTDOWN.store(0, Ordering::Relaxed);
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "an_allocation_that_cannot_report_its_failure_aborts"]).env(VARIABLE, "1");
    let ran = child.output().unwrap();
    assert_eq!(ran.status.code(), None, "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("memory allocation of"), "{ran:?}");
}
