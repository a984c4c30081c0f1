//! Encodes long texts and renders templates that make long lists while allocations fail: the caller gets an error, and
//! the process goes on.
//!
//! A separate test program, because its allocator serves the whole process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pellucid_tokenizer::{ChatTemplate, Conversation, Error, Segment, Tokenizer, message};

/// Refuses the large allocation with a given number, counted from when it is armed.
struct Failing;

/// Bytes from which an allocation counts: those whose size grows with the text.
const LARGE: usize = 16 << 10;
/// Large allocations until one fails; 0 if none does.
static LEFT: AtomicUsize = AtomicUsize::new(0);
/// Held by a test, so that no other one takes its failing allocation.
static ONE_TEST: Mutex<()> = Mutex::new(());

fn fails(size: usize) -> bool {
    let count_down = |left: usize| left.checked_sub(1);
    size >= LARGE && LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count_down) == Ok(1)
}

// SAFETY: every call is forwarded to the system's allocator with the same arguments, or refused.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: passed on from the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Fails the first, second, third... large allocation of `run` until none is left to fail. Returns their number.
fn fail_each<T: PartialEq + Debug>(run: &dyn Fn() -> Result<Vec<T>, Error>, expected: &[T], what: &str) -> usize {
    for number in 1.. {
        LEFT.store(number, Ordering::Relaxed);
        let result = run();
        let left = LEFT.swap(0, Ordering::Relaxed);
        match result {
            Ok(found) => assert_eq!(found, expected, "{what}, allocation {number}"),
            Err(Error::OutOfMemory { bytes }) => assert!(bytes > 0, "{what}"),
            Err(error) => panic!("{what}: {error}"),
        }
        if left > 0 {
            return number - 1;
        }
    }
    unreachable!()
}

#[test]
fn a_text_without_memory_is_an_error() {
    let _alone = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    let texts = [
        ("words", "The quick brown fox, 3.14! ".repeat(4_000)),
        ("one piece", "a".repeat(100_000)),
        ("spaces", " ".repeat(100_000)),
        ("to normalize", "e\u{301} ".repeat(30_000)),
        ("unknown characters", "\u{10ffff}".repeat(20_000)),
    ];
    for family in ["gpt2", "llama3", "llama2", "mistral", "gemma", "qwen2", "xglm", "foreign"] {
        let tokenizer = Tokenizer::from_hugging_face(&common::fixture(family)).unwrap();
        for (name, text) in &texts {
            let what = format!("{family}, {name}");
            let expected = tokenizer.encode(text);
            let num_failed = fail_each(&|| tokenizer.try_encode(text), &expected, &what);
            assert!(num_failed > 0, "{what}: no allocation was large enough to fail");
            let segments = [Segment::untrusted(text.clone())];
            fail_each(&|| tokenizer.try_encode_segments(&segments), &expected, &what);
        }
    }
}

/// Expressions that make lists as long as the message; `w` is the list of its words.
const LISTS: &[&str] = &[
    "messages[0].content.split() | length",
    "messages[0].content.split(' ') | length",
    "messages[0].content.rsplit(' ', 5000) | length",
    "messages[0].content.splitlines() | length",
    "messages[0].content | list | length",
    "messages[0].content[::2] | length",
    "messages[0].content.strip(messages[0].content) | length",
    "messages[0].content.startswith(w)",
    "range(9000) | list | length",
    "w | reverse | list | length",
    "w | sort | first",
    "w | unique | list | length if false else w[:40] | unique | list | length",
    "w | map('upper') | list | length",
    "messages | map(attribute='role') | list | length",
    "w | select('string') | list | length",
    "w | batch(2, '') | list | length",
    "w[:2] | batch(9000, '') | list | length",
    "w | slice(3000, '') | list | length",
    "w | groupby(0) | length",
    "w[::-1] | length",
    "(w[:10] * 900) | length",
    "dict(**dict(w | batch(2) | list)) | length",
    "dict(w | batch(2) | list) | dictsort | length",
    "dict(w | batch(2) | list).items() | list | length",
    "(dict(w | batch(2) | list) | list) | length",
];

#[test]
fn a_template_without_memory_for_its_lists_is_an_error() {
    let _alone = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    let tokenizer = Tokenizer::from_hugging_face(&common::fixture("llama3")).unwrap();
    // An even number of words, all of them different.
    let words: Vec<String> = (0..6000).map(|i| format!("w{i}")).collect();
    let messages = [message("user", &words.join(" ").replace("w5 ", "w5\n"))];
    let conversation = Conversation { messages: &messages, ..Conversation::default() };
    for list in LISTS {
        let source = format!("{{% set w = messages[0].content.split() %}}{{{{ {list} }}}}");
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        let text = |segments: Vec<Segment>| segments.into_iter().map(|segment| segment.text).collect::<Vec<String>>();
        let expected = text(template.render(&conversation).unwrap_or_else(|error| panic!("{list}: {error}")));
        let num_failed = fail_each(&|| template.render(&conversation).map(text), &expected, list);
        assert!(num_failed > 0, "{list}: no allocation was large enough to fail");
    }
    // A macro has its further arguments as a list, and a loop with a condition its items.
    let source = "{% macro count() %}{{ varargs | length }}{% endmacro %}{{ count(*messages[0].content.split()) }}\
                  {% for w in messages[0].content.split() if w != 'w1' %}{% if loop.last %}{{ loop.length }}{% endif %}\
                  {% endfor %}";
    let template = ChatTemplate::compile(source, &tokenizer).unwrap();
    let count = || template.render(&conversation).map(|segments| vec![segments.len()]);
    assert!(fail_each(&count, &count().unwrap(), "loop") > 0);
}
