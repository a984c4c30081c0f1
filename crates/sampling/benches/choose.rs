//! Microseconds per token on one core, beside the time of a sum over the logits, which is the read limit.
//!
//! `cargo bench -p pellucid-sampling [-- PART OF A CASE'S NAME]` prints the best and the median of many runs: the best
//! shows what the code can do, the median what a busy machine gives. "of read" is the time of the sum as a share of the
//! best.

use std::hint::black_box;
use std::time::Instant;

use pellucid_sampling::{Input, Sampler, SamplingParams, Workspace, uniform};

const VOCABULARIES: [usize; 2] = [128_256, 262_144];
const RUNS: u32 = 300;

/// Returns the sum of twelve uniform numbers less six: close enough to a normal number for a benchmark.
fn normal(index: u32) -> f32 {
    ((0..12).map(|part| uniform(99, part, index)).sum::<f64>() - 6.0) as f32
}

/// Returns logits like those of a language model: a broad bell far below a few peaks.
fn realistic(vocab_size: usize) -> Vec<f32> {
    let mut logits: Vec<f32> = (0..vocab_size as u32).map(|token| 2.2 * normal(token)).collect();
    for (rank, peak) in [17.0, 16.1, 15.2, 14.9, 14.0, 13.5, 13.1, 12.8, 12.2, 12.0].into_iter().enumerate() {
        logits[rank * 9973 + 71] = peak;
    }
    logits
}

/// Returns logits with a small spread and no peaks: nothing can be skipped.
fn flat(vocab_size: usize) -> Vec<f32> {
    (0..vocab_size as u32).map(|token| 0.01 * normal(token)).collect()
}

/// Returns the best and the median time in microseconds.
fn time(mut work: impl FnMut(u32)) -> (f64, f64) {
    let mut times: Vec<f64> = (0..RUNS)
        .map(|run| {
            let start = Instant::now();
            work(run);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[times.len() / 2])
}

/// Returns the sum of the logits, in lanes so that memory limits it and not one adder.
fn plain_sum(logits: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for row in logits.as_chunks::<32>().0 {
        for lane in 0..32 {
            lanes[lane] += row[lane];
        }
    }
    lanes.iter().sum()
}

fn cases() -> Vec<(&'static str, SamplingParams)> {
    let neutral = SamplingParams::default();
    let penalties =
        SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.2, presence_penalty: 0.1, ..neutral.clone() };
    let usual = SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..neutral.clone() };
    vec![
        ("greedy", SamplingParams { temperature: 0.0, ..neutral.clone() }),
        ("temperature 0.8 alone", SamplingParams { temperature: 0.8, ..neutral.clone() }),
        ("temperature 1 alone", neutral.clone()),
        ("T 0.8, k 40, p 0.95, min-p 0.05", usual.clone()),
        (
            "the same with penalties",
            SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..penalties },
        ),
        ("the same with logprobs 20", SamplingParams { logprobs: Some(20), ..usual }),
        ("top-p 0.95 alone", SamplingParams { top_p: 0.95, ..neutral.clone() }),
        ("min-p 0.05 alone", SamplingParams { min_p: 0.05, ..neutral.clone() }),
        ("typical 0.95 alone", SamplingParams { typical_p: 0.95, ..neutral.clone() }),
        ("top-n-sigma 1 alone", SamplingParams { top_n_sigma: 1.0, ..neutral.clone() }),
        ("xtc 1, 0.1 alone", SamplingParams { xtc_probability: 1.0, ..neutral.clone() }),
        ("dynamic temperature 1 +- 0.5", SamplingParams { dynamic_temperature_range: 0.5, ..neutral.clone() }),
        ("mirostat 5, 0.1", SamplingParams { mirostat_tau: Some(5.0), ..neutral.clone() }),
        ("dry 0.8 alone", SamplingParams { dry_multiplier: 0.8, ..neutral }),
    ]
}

fn main() {
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    println!("{:<34} {:>9} {:<9} {:>9} {:>9} {:>8}", "case", "vocab", "logits", "best us", "median us", "of read");
    for vocab_size in VOCABULARIES {
        for (name, logits) in [("realistic", realistic(vocab_size)), ("flat", flat(vocab_size))] {
            let (read, read_median) = time(|_| {
                black_box(plain_sum(black_box(&logits)));
            });
            println!(
                "{:<34} {vocab_size:>9} {name:<9} {read:>9.1} {read_median:>9.1} {:>8}",
                "plain sum of the logits", "100%"
            );
            for (case, params) in cases().into_iter().filter(|case| case.0.contains(&wanted)) {
                let sampler = Sampler::new(&params, vocab_size).expect("the cases are valid");
                // A conversation of 4,000 tokens, about 1,500 of them distinct.
                let prompt: Vec<u32> =
                    (0..3000).map(|i| (uniform(1, i, 0).powi(4) * vocab_size as f64) as u32).collect();
                let mut history = sampler.history(&prompt);
                (0..1000).for_each(|i| history.push((uniform(2, i, 0).powi(4) * vocab_size as f64) as u32));
                let (mut state, mut space) = (sampler.state(), Workspace::new());
                let (best, median) = time(|run| {
                    let input = Input { logits: &logits, history: &history, position: run, mask: None };
                    black_box(sampler.sample(black_box(&input), &mut state, &mut space).expect("a token"));
                });
                let share = 100.0 * read / best;
                println!("{case:<34} {vocab_size:>9} {name:<9} {best:>9.1} {median:>9.1} {share:>7.0}%");
            }
        }
    }
}
