//! Speed of matrix products with weights of every format, beside the memory bandwidth at the time.
//!
//! `cargo bench -p pellucid-cpu --bench products -- [format] [isa] [rows ...] [busy] [cached]`: for one row the figure
//! is bytes of weights read per second, for many rows operations per second (a multiplication and an addition are two).
//! All weights together exceed the caches. Machines are noisy: the best and the median of several rounds are printed.
//! With `busy`, one thread runs and its CPU time is measured, to compare kernels on a machine that others use too. With
//! `cached`, a single small weight is multiplied again and again, which shows the cost of arithmetic alone.

use std::hint::black_box;
use std::time::{Duration, Instant};

use pellucid_cpu::{CpuBackend, CpuOptions, Isa};
use pellucid_tensor::{Backend, DType, HostWeight, Linear};

/// Rows and columns of W in a Llama of a billion parameters: down, gate or up, query.
const SHAPES: [(usize, usize); 3] = [(2048, 8192), (8192, 2048), (2048, 2048)];
/// Bytes of weights in a round of one row: more than any cache holds.
const WORKING_SET: usize = 400 << 20;
/// A weight that stays in the second-level caches, and how often a round multiplies it.
const CACHED_SHAPE: [(usize, usize); 1] = [(512, 2048)];
const CACHED_TIMES: usize = 200;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let formats: Vec<DType> =
        DType::ALL.into_iter().filter(|dtype| words.iter().any(|word| word == dtype.name())).collect();
    let isa = words.iter().find_map(|word| word.parse::<Isa>().ok()).unwrap_or(Isa::best());
    let rows: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let rows = if rows.is_empty() { vec![1, 512] } else { rows };
    let formats = if formats.is_empty() { DType::ALL.to_vec() } else { formats };
    let busy = words.iter().any(|word| word == "busy");
    let cached = words.iter().any(|word| word == "cached");
    let mut options = CpuOptions { isa, ..CpuOptions::default() };
    if busy {
        options.num_threads = 1;
    }
    let backend = CpuBackend::new(options).expect("the instruction set is here");
    println!("{}", backend.description());
    for dtype in formats {
        for &rows in &rows {
            println!(
                "read {:5.1} GB/s | {dtype:5} {rows:4} rows: {}",
                read_bandwidth(),
                measure(&backend, dtype, rows, busy, cached)
            );
        }
    }
}

/// Measures products with all shapes, in a model's proportions.
fn measure(backend: &CpuBackend, dtype: DType, rows: usize, busy: bool, cached: bool) -> String {
    let shapes: &[(usize, usize)] = if cached { &CACHED_SHAPE } else { &SHAPES };
    let bytes: usize = shapes.iter().map(|(m, k)| dtype.bytes_for(m * k).expect("whole blocks")).sum();
    let copies = if rows < 32 && !cached { WORKING_SET.div_ceil(bytes) } else { 1 };
    let times_each = if cached { CACHED_TIMES } else { 1 };
    let layers: Vec<Vec<Linear>> = (0..copies)
        .map(|_| shapes.iter().map(|&(m, k)| Linear { weight: weight(backend, dtype, m, k), bias: None }).collect())
        .collect();
    let x: Vec<f32> = (0..rows * 8192).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect();
    let mut inputs = Vec::new();
    for &(m, k) in shapes {
        let mut input = backend.zeros(DType::F32, rows, k).expect("memory");
        backend.write(&x[..rows * k], &mut input).expect("a write");
        inputs.push((input, backend.zeros(DType::F32, rows, m).expect("memory")));
    }
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || (start.elapsed() < Duration::from_secs(2) && times.len() < 40) {
        let round = now(busy);
        for layer in layers.iter().cycle().take(copies * times_each) {
            for (linear, (input, out)) in layer.iter().zip(&mut inputs) {
                backend.linear(input, linear, out).expect("a product");
            }
        }
        times.push(now(busy) - round);
    }
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[times.len() / 2]);
    let numbers: usize = shapes.iter().map(|(m, k)| m * k).sum::<usize>() * copies * times_each;
    let gigabytes = (bytes * copies * times_each) as f64 / 1e9;
    let operations = (2 * numbers * rows) as f64 / 1e12;
    format!(
        "{:6.2} GB/s best, {:6.2} median; {:5.3} T/s best, {:5.3} median",
        gigabytes / best,
        gigabytes / median,
        operations / best,
        operations / median
    )
}

/// Seconds of the clock, or of this thread's CPU time.
fn now(busy: bool) -> f64 {
    let clock = if busy { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the given structure.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A weight whose bytes are small values in every format.
fn weight(backend: &CpuBackend, dtype: DType, rows: usize, cols: usize) -> pellucid_tensor::Tensor {
    let len = dtype.bytes_for(rows * cols).expect("whole blocks");
    let bytes: Vec<u8> = (0..len).map(|i| 0x28 + (i * 7 % 8) as u8).collect();
    backend.linear_weight(HostWeight { dtype, rows, cols, bytes: bytes.into() }).expect("memory")
}

/// Returns the GB/s that all threads read from memory now: the limit for one row.
fn read_bandwidth() -> f64 {
    let threads = CpuOptions::default().num_threads;
    let words = vec![1u64; WORKING_SET / 8];
    let mut best = 0f64;
    for _ in 0..3 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(words.len().div_ceil(threads)) {
                scope.spawn(move || black_box(part.iter().fold(0u64, |sum, word| sum.wrapping_add(*word))));
            }
        });
        best = best.max(WORKING_SET as f64 / 1e9 / start.elapsed().as_secs_f64());
    }
    best
}
