//! A header with false counts costs neither time nor memory. The test runs alone in its process, because it measures
//! the peak memory of the process.

#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use pellucid_checkpoint::Checkpoint;

/// Returns the peak resident memory so far, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line on peak memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn false_counts_cost_under_100_ms_and_16_mib() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let key = [&1u64.to_le_bytes()[..], b"k"].concat();
    let before_kib = peak_kib();
    // The second file is sparse and has 64 GiB, so that the bytes that are left allow most counts.
    for file_bytes in [4096, 1u64 << 36] {
        for count in [1u64 << 31, 1 << 32, 1 << 36, 1 << 63, u64::MAX] {
            let start = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
            let counts = |tensors: u64, keys: u64| [tensors.to_le_bytes(), keys.to_le_bytes()].concat();
            let mut headers = vec![
                [&start[..], &counts(count, 0)].concat(),
                [&start[..], &counts(0, count)].concat(),
                // The length of a key, of a string, and of arrays of each element type.
                [&start[..], &counts(0, 1), &count.to_le_bytes()].concat(),
                [&start[..], &counts(0, 1), &key, &8u32.to_le_bytes(), &count.to_le_bytes()].concat(),
            ];
            for element in 0..=12u32 {
                let array = [&9u32.to_le_bytes()[..], &element.to_le_bytes(), &count.to_le_bytes()].concat();
                headers.push([&start[..], &counts(0, 1), &key, &array].concat());
            }
            for header in headers {
                let mut file = File::create(&path).unwrap();
                file.write_all(&header).unwrap();
                file.set_len(file_bytes).unwrap();
                // The best of three attempts, because a busy machine may interrupt one of them.
                let took = (0..3).map(|_| {
                    let start = Instant::now();
                    let error = Checkpoint::open(&path).expect_err("a false count").to_string();
                    let took = start.elapsed();
                    assert!(error.contains("ends within") || error.contains("at most"), "for its count: {error}");
                    took
                });
                let best = took.min().expect("three times");
                assert!(best < Duration::from_millis(100), "{best:?} for a count of {count}");
            }
        }
    }
    let grown_kib = peak_kib() - before_kib;
    assert!(grown_kib < 16 * 1024, "{grown_kib} KiB");
}
