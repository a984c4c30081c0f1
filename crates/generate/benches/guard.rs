//! Time that a guard of patterns takes for each token of a reply: `cargo bench -p pellucid-generate --bench guard`.
//! Patterns are two words each, of which the text has many beginnings and no whole match.
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use pellucid_generate::{Guard, Passage, PatternGuard, Scan};

const TEXT: &str = "The river rises in the hills above the town and reaches the sea after forty miles. Boats carried \
                    grain and timber along it until the railway came; today its banks are a path for walkers, and in \
                    spring the meadows beside it are flooded for a week or two, which the farmers expect. ";
const NUM_TOKENS: usize = 5_000;
/// Characters of a token, as in usual vocabularies.
const TOKEN_CHARACTERS: usize = 4;

fn main() {
    let text: Vec<char> = TEXT.chars().cycle().take(NUM_TOKENS * TOKEN_CHARACTERS).collect();
    let tokens: Vec<String> = text.chunks(TOKEN_CHARACTERS).map(|token| token.iter().collect()).collect();
    let words: Vec<&str> = TEXT.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty()).collect();
    for num_patterns in [1, 10, 100, 1_000] {
        let pattern = |i: usize| format!("\\b{}\\s{{1,3}}secret{i}\\b", words[i % words.len()]);
        let patterns: Vec<String> = (0..num_patterns).map(pattern).collect();
        let begun = Instant::now();
        let guard = PatternGuard::parse(&patterns.join("\n")).unwrap();
        let parsed = begun.elapsed();
        let mut scanner = guard.scanner().unwrap();
        let mut times: Vec<Duration> = Vec::with_capacity(tokens.len());
        for (number, token) in tokens.iter().enumerate() {
            let begun = Instant::now();
            let scan = scanner.push(number, Passage::Answer, token);
            times.push(begun.elapsed());
            assert!(matches!(scan, Scan::Passed(_)));
        }
        times.sort_unstable();
        let mean = times.iter().sum::<Duration>() / times.len() as u32;
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "{num_patterns:>6} patterns, compiled in {parsed:>8.1?}: mean {mean:.2?} per token, median {:.2?}, p99 {:.2?}",
            at(0.5),
            at(0.99)
        );
    }
}
