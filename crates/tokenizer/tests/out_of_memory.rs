//! Encodes long texts while allocations fail: the caller gets an error, and the process goes on.
//!
//! A separate test program, because its allocator serves the whole process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pellucid_tokenizer::{Error, Segment, Tokenizer};

/// Refuses the large allocation with a given number, counted from when it is armed.
struct Failing;

/// Bytes from which an allocation counts: those whose size grows with the text.
const LARGE: usize = 16 << 10;
/// Large allocations until one fails; 0 if none does.
static LEFT: AtomicUsize = AtomicUsize::new(0);

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

/// Fails the first, second, third... large allocation of `encode` until none is left to fail. Returns their number.
fn fail_each(encode: &dyn Fn() -> Result<Vec<u32>, Error>, expected: &[u32], what: &str) -> usize {
    for number in 1.. {
        LEFT.store(number, Ordering::Relaxed);
        let result = encode();
        let left = LEFT.swap(0, Ordering::Relaxed);
        match result {
            Ok(ids) => assert_eq!(ids, expected, "{what}, allocation {number}"),
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
