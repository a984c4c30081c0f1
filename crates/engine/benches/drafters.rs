//! Microseconds that lookup drafters and the choice of draft lengths take on one core.
//!
//! `cargo bench -p pellucid-engine [-- PART OF A CASE'S NAME]` prints the mean, the median and the longest time of a
//! call. Each call of a drafter adds one token to a context of 32k tokens and asks for a draft of the maximum length.

use std::hint::black_box;
use std::time::Instant;

use pellucid_engine::scheduler::{StepCosts, Work};
use pellucid_engine::speculation::{
    Candidate, DraftLengths, Limits, NgramDrafter, PredictionDrafter, SuffixLimits, SuffixStore,
};
use pellucid_engine::{MAX_DRAFT_LEN, Scope, TenantId};
use pellucid_sampling::uniform;

const CONTEXT: usize = 32 * 1024;
const CALLS: usize = 2048;

/// Makes a text of the given number of tokens.
type Text = fn(usize) -> Vec<u32>;

/// Texts with 32k tokens and more: how often their n-grams repeat decides the time of a lookup.
const TEXTS: [(&str, Text); 4] =
    [("distinct", distinct), ("words", words), ("quotes", quotes), ("two tokens", two_tokens)];

/// Tokens that never repeat.
fn distinct(len: usize) -> Vec<u32> {
    (0..len as u32).collect()
}

/// Tokens with the frequencies of words: few are common, most are rare.
fn words(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (1.0 / (uniform(7, i, 0) + 1e-5)) as u32).collect()
}

/// Words of which 200 at a time repeat what was 1000 tokens before, with single tokens replaced.
fn quotes(len: usize) -> Vec<u32> {
    let mut tokens = words(len);
    for i in 1000..len {
        if (i / 200).is_multiple_of(2) && uniform(8, i as u32, 0) > 0.05 {
            tokens[i] = tokens[i - 1000];
        }
    }
    tokens
}

/// Two tokens at random: every n-gram has many occurrences.
fn two_tokens(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| u32::from(uniform(9, i, 0) < 0.5)).collect()
}

/// Prints the times of calls, if the name has the filter in it.
fn time(name: &str, num_calls: usize, mut call: impl FnMut(usize)) {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    if !name.contains(&filter) {
        return;
    }
    let mut times: Vec<f64> = (0..num_calls)
        .map(|i| {
            let start = Instant::now();
            call(i);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let mean = times.iter().sum::<f64>() / num_calls as f64;
    println!("{name:<40} {mean:>10.2} {:>10.2} {:>10.2}", times[num_calls / 2], times[num_calls - 1]);
}

fn drafters() {
    for (text, generate) in TEXTS {
        let tokens = generate(CONTEXT + CALLS);
        let mut ngram = NgramDrafter::default();
        time(&format!("ngram, {text}: first 32k tokens"), 1, |_| {
            black_box(ngram.propose(&tokens[..CONTEXT], MAX_DRAFT_LEN));
        });
        ngram.propose(&tokens[..CONTEXT], MAX_DRAFT_LEN);
        time(&format!("ngram, {text}: one token"), CALLS, |i| {
            black_box(ngram.propose(&tokens[..=CONTEXT + i], MAX_DRAFT_LEN));
        });

        let mut prediction = PredictionDrafter::new(&tokens[..CONTEXT]).expect("enough memory");
        time(&format!("prediction, {text}: one token"), CALLS, |i| {
            black_box(prediction.propose(&tokens[CONTEXT..=CONTEXT + i], MAX_DRAFT_LEN));
        });

        let (mut store, scope) = (SuffixStore::new(SuffixLimits::default()), Scope::of(TenantId(1)));
        let output = generate(2 * CONTEXT);
        let replies: Vec<&[u32]> = output.chunks(1024).collect();
        time(&format!("suffix, {text}: reply of 1024 tokens"), replies.len(), |i| store.add(scope, replies[i]));
        time(&format!("suffix, {text}: one token"), CALLS, |i| {
            black_box(store.propose(scope, &tokens[..=CONTEXT + i], MAX_DRAFT_LEN));
        });
    }
}

fn lengths() {
    let mut costs = StepCosts::default();
    for i in 0..200 {
        let num_rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096][i % 12];
        costs.measure(Work::chunk(1000, num_rows), 8e-3 + 2e-5 * num_rows as f64);
    }
    for num_sequences in [1, 4, 16, 64, 256] {
        for (drafter, seconds_per_token) in [("lookup", 0.0), ("draft model", 1e-3)] {
            let candidates: Vec<Candidate> = (0..num_sequences)
                .map(|i| Candidate {
                    len: MAX_DRAFT_LEN,
                    rates: [0.5 + 0.4 * uniform(1, i, 0); MAX_DRAFT_LEN],
                    seconds_per_token,
                    ..Candidate::without_draft(1000 + 10 * i as usize)
                })
                .collect();
            let base = candidates.iter().fold(Work::default(), |work, of| work.and(Work::chunk(of.depth, 1)));
            let limits = Limits { num_rows: 8192, max_lengthening: f64::INFINITY };
            costs.measure(base, 8e-3 + 2e-5 * base.num_rows as f64);
            let mut lengths = DraftLengths::default();
            time(&format!("lengths, {drafter}: {num_sequences} sequences"), 200, |_| {
                black_box(lengths.choose(&costs, base, &candidates, limits));
            });
        }
    }
}

fn main() {
    println!("{:<40} {:>10} {:>10} {:>10}", "us", "mean", "median", "longest");
    drafters();
    lengths();
}
