//! The server when the system refuses memory. For each kind of request, the first, the second, the third... allocation
//! above 8 KiB fails, until none is left that can fail. Each time the request gets a 503 or succeeds; afterwards the
//! same request gets the same reply, and nothing is held any more.
//!
//! This is a separate test program because it replaces the allocator of the whole process. An allocation that cannot
//! report its failure aborts the process, so the test fails there. Allocations inside other libraries and inside the
//! tokenizer are let through: the test lists those libraries, and SECURITY.md names them.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};
use support::socket::Socket;
use support::{MODEL, Response, Server, Setup};

/// Minimum bytes of an allocation that grows with a request. The buffer that every connection begins with has 8 KiB.
const LARGE: usize = (8 << 10) + 1;
/// Libraries whose allocations cannot report a failure: buffers of connections, which are bounded; chat templates and
/// the values that they read; the tokenizer, for which `generate` checks the memory first.
const LIBRARIES: [&str; 6] = ["bytes", "hyper", "minijinja", "pellucid-tokenizer", "serde_json", "tungstenite"];

/// Large allocations until the one that fails; 0 if none does.
static COUNTDOWN: AtomicUsize = AtomicUsize::new(0);
static HAS_FAILED: AtomicBool = AtomicBool::new(false);
/// Libraries whose allocations were let through.
static LET_THROUGH: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

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
        HAS_FAILED.store(library.is_none(), Ordering::Relaxed);
        let is_refused = library.is_none();
        LET_THROUGH.lock().unwrap().extend(library);
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
/// server and the crates below it.
fn library(trace: &str) -> Option<String> {
    let places = trace.lines().filter_map(|line| line.trim_start().strip_prefix("at "));
    let mut own = places.filter(|place| !place.contains("/rustc/") && !place.contains("allocation_failure.rs"));
    let place = own.next()?;
    if place.contains("crates/tokenizer/") {
        return Some("pellucid-tokenizer".into());
    }
    let (_, rest) = place.split_once("/registry/src/")?;
    let folder = rest.split('/').nth(1)?;
    folder.rsplit_once('-').map(|(name, _)| name.to_owned())
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
    /// Whether the reply is a refusal that may be tried again, or a stream that ended with such an error.
    is_shortage: bool,
}

impl Seen {
    fn whole(reply: &Response) -> Seen {
        let body: Value = serde_json::from_str(&reply.text()).unwrap();
        let content = if body["choices"].is_null() { body.clone() } else { body["choices"].clone() };
        let has_header = reply.header("retry-after").is_some();
        Seen { status: reply.status, content: vec![content], is_shortage: reply.status == 503 && has_header }
    }

    fn events(status: u16, events: impl Iterator<Item = String>) -> Seen {
        let events: Vec<String> = events.collect();
        let is_done = events.last().is_some_and(|event| event == "[DONE]");
        let values = events.iter().filter(|event| *event != "[DONE]");
        let values: Vec<Value> = values.map(|event| serde_json::from_str(event).unwrap()).collect();
        let is_shortage =
            !is_done && values.last().is_some_and(|value| value["error"]["type"] == "service_unavailable");
        let content = values.into_iter().map(|value| value["choices"].clone()).collect();
        Seen { status, content, is_shortage }
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
    Seen::events(200, text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned))
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
    Seen::events(200, events.into_iter())
}

/// Fails every large allocation of a request, one after the other. Returns the number that failed.
fn sweep(server: &Server, name: &str, request: impl Fn() -> Seen) -> usize {
    let expected = request();
    assert_eq!((expected.status, expected.is_shortage), (200, false), "{name}: {expected:?}");
    // The caches of the engine and of this process are warm now.
    assert_eq!(request(), expected, "{name}");
    let mut num_failed = 0;
    for n in 1.. {
        let (seen, has_failed, was_reached) = with_failure(n, &request);
        num_failed += usize::from(has_failed);
        let survived = seen == expected || has_failed && seen.is_shortage;
        assert!(survived, "{name}, allocation {n} (failed: {has_failed}): {seen:?}");
        server.settles();
        server.until("pellucid_client_memory_bytes", 0.0);
        assert_eq!(request(), expected, "{name}, after the failure of allocation {n}");
        if !was_reached {
            break;
        }
    }
    num_failed
}

#[test]
#[ignore = "has not been run to its end yet; run it with --ignored and make fallible what it finds"]
fn a_refused_allocation_ends_one_request_and_nothing_else() {
    IS_EXEMPT.set(true);
    let server = Server::with(Setup { context_len: 16 << 10, ..Setup::default() });
    let text = "Hello there, ".repeat(700);
    let chat = json!({ "model": MODEL, "messages": [{ "role": "user", "content": text }], "max_tokens": 4,
                       "temperature": 1, "seed": 1 });
    let parts = json!([{ "type": "text", "text": text }, { "type": "text", "text": "and more" }]);
    let mut several = chat.clone();
    several["messages"][0]["content"] = parts;
    several["n"] = json!(3);
    several["max_tokens"] = json!(40);
    several["logprobs"] = json!(true);
    several["top_logprobs"] = json!(20);
    let ids: Vec<u32> = (0..3000).map(|i| 5 + i % 50).collect();
    let by_ids = json!({ "model": MODEL, "prompt": ids, "max_tokens": 2, "temperature": 0 });
    let beams = json!({ "model": MODEL, "prompt": ids, "max_tokens": 2, "beam_width": 2, "n": 2 });
    let echo = json!({ "model": MODEL, "prompt": &text[..2400], "max_tokens": 2, "temperature": 0, "echo": true,
                       "logprobs": 5 });
    let tokenize = json!({ "prompt": text, "return_token_strs": true });
    let template = json!({ "messages": chat["messages"] });
    let more_ids: Vec<u32> = ids.iter().chain(&ids).chain(&ids).copied().collect();
    let detokenize = json!({ "tokens": more_ids });
    let (chats, completions) = ("/v1/chat/completions", "/v1/completions");
    let counts = [
        ("chat", sweep(&server, "chat", || post(&server, chats, &chat))),
        ("stream", sweep(&server, "stream", || stream(&server, chats, &chat))),
        ("websocket", sweep(&server, "websocket", || socket(&server, &chat))),
        ("several", sweep(&server, "several", || post(&server, chats, &several))),
        ("ids", sweep(&server, "ids", || post(&server, completions, &by_ids))),
        ("beams", sweep(&server, "beams", || post(&server, completions, &beams))),
        ("echo", sweep(&server, "echo", || post(&server, completions, &echo))),
        ("streamed echo", sweep(&server, "streamed echo", || stream(&server, completions, &echo))),
        ("tokenize", sweep(&server, "tokenize", || post(&server, "/tokenize", &tokenize))),
        ("detokenize", sweep(&server, "detokenize", || post(&server, "/detokenize", &detokenize))),
        ("template", sweep(&server, "template", || post(&server, "/apply-template", &template))),
    ];
    for (name, count) in counts {
        assert!(count >= 3, "{name}: only {count} allocations failed");
    }
    let let_through = LET_THROUGH.lock().unwrap().clone();
    println!("failed: {counts:?}; let through: {let_through:?}");
    let unknown: Vec<&String> = let_through.iter().filter(|name| !LIBRARIES.contains(&name.as_str())).collect();
    assert!(unknown.is_empty(), "allocations of {unknown:?}");
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
