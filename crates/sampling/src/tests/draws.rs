//! The draw follows the probabilities, and depends only on them, the seed and the position.

use super::{choose, oracle, row};
use crate::candidates::{Candidates, Workspace};
use crate::draw::race;
use crate::{Input, Sampler, SamplingParams};

/// Returns the chi-square of `draws` draws at consecutive positions against the softmax of `logits`.
fn chi_square(logits: &[f32], seed: u64, draws: u32) -> f64 {
    let sampler = Sampler::new(&SamplingParams { seed, ..SamplingParams::default() }, logits.len()).unwrap();
    let (history, mut state, mut space) = (sampler.history(&[]), sampler.state(), Workspace::new());
    let mut counts = vec![0u32; logits.len()];
    for position in 0..draws {
        let input = Input { logits, history: &history, position, mask: None };
        counts[sampler.sample(&input, &mut state, &mut space).unwrap().token as usize] += 1;
    }
    let set: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
    let expected = oracle::probabilities(&set);
    counts
        .iter()
        .zip(expected)
        .map(|(&count, p)| (f64::from(count) - p * f64::from(draws)).powi(2) / (p * f64::from(draws)))
        .sum()
}

/// A correct generator exceeds this chi-square less than once in a thousand tests.
fn bound(degrees: f64) -> f64 {
    degrees + 3.3 * (2.0 * degrees).sqrt() + 4.0
}

#[test]
fn a_million_draws_follow_a_skewed_distribution() {
    // From about 1/2 down to about 1/10,000.
    let logits: Vec<f32> = (0..13).map(|i| -0.69 * i as f32).collect();
    let found = chi_square(&logits, 1, 1_000_000);
    assert!(found < bound(12.0), "chi-square {found}");
}

#[test]
fn a_million_draws_follow_a_flat_distribution() {
    let found = chi_square(&[0.5; 30], 2, 1_000_000);
    assert!(found < bound(29.0), "chi-square {found}");
}

#[test]
fn other_seeds_and_shapes_follow_too() {
    for seed in 10..16 {
        let logits = row(5 + 40 * (seed as usize - 10), seed, 1.5);
        let found = chi_square(&logits, seed, 30_000);
        assert!(found < bound(logits.len() as f64 - 1.0), "seed {seed}: chi-square {found}");
    }
}

/// The statistics have power: they tell draws from one distribution from those of another that is five percent off for
/// one token.
#[test]
fn a_distribution_five_percent_off_does_not_pass() {
    let drawn: Vec<f32> = (0..13).map(|i| -0.69 * i as f32).collect();
    let mut claimed = drawn.clone();
    claimed[3] += 0.05;
    let set: Vec<(u32, f64)> = (0..).zip(claimed.iter().map(|&logit| f64::from(logit))).collect();
    let p = oracle::probabilities(&set)[3];
    let draws = 200_000;
    let count =
        (0..draws).filter(|&position| choose(&SamplingParams::default(), &drawn, position) == Ok(3)).count() as f64;
    let deviation = (count - p * f64::from(draws)) / (p * f64::from(draws)).sqrt();
    assert!(deviation.abs() > 4.0, "five percent off shows: {deviation} standard deviations");
}

/// For a row and for a list in any order, winner and runner-up are those of the race in which every candidate runs.
#[test]
fn the_order_of_candidates_does_not_matter() {
    let mut space = Workspace::new();
    for seed in 0..40u64 {
        let logits = row(1000, seed, [0.0, 0.5, 3.0, 12.0][seed as usize % 4]);
        let mut set = Candidates::new(&logits, &mut space).unwrap();
        set.divide(if seed % 3 == 0 { 0.7 } else { 1.0 });
        let as_row = race(&set, seed, 5, true).unwrap();
        assert_eq!(race(&set, seed, 5, false).unwrap().winner, as_row.winner);
        set.keep_from(f32::MIN);
        assert_eq!(race(&set, seed, 5, true).unwrap(), as_row);
        for turn in 1..4 {
            set.shuffle(seed * 10 + turn);
            assert_eq!(race(&set, seed, 5, true).unwrap(), as_row);
        }
        let temperature = set.temperature();
        let open: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&logit| f64::from(logit) / temperature)).collect();
        assert_eq!(as_row.winner.id, oracle::winner(&open, seed, 5));
        let others: Vec<(u32, f64)> = open.into_iter().filter(|entry| entry.0 != as_row.winner.id).collect();
        // Without the winner, the runner-up wins.
        assert_eq!(as_row.second.unwrap().id, oracle::winner(&others, seed, 5));
    }
}

#[test]
fn the_same_seed_and_position_give_the_same_token() {
    let logits = row(1000, 4, 2.0);
    let draw =
        |seed, position| choose(&SamplingParams { seed, ..SamplingParams::default() }, &logits, position).unwrap();
    let tokens: Vec<u32> = (0..50).map(|position| draw(1, position)).collect();
    assert_eq!(tokens, (0..50).map(|position| draw(1, position)).collect::<Vec<_>>());
    assert!(tokens.windows(2).any(|pair| pair[0] != pair[1]), "positions draw anew");
    assert!((0..50).any(|position| draw(2, position) != tokens[position as usize]), "seeds differ");
}

/// The highest random number must not let a hopeless token win, as it would if u were rounded to an f32.
#[test]
fn the_improbable_do_not_win_by_rounding() {
    let mut logits = vec![-60.0f32; 20_000];
    logits[0] = 0.0;
    for position in 0..2000 {
        assert_eq!(choose(&SamplingParams::default(), &logits, position), Ok(0));
    }
}
