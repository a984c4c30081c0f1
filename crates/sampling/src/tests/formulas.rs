//! Known answers, and each step alone at the ends of its range, with the smallest and a large vocabulary.

use super::{choose, oracle, row, survivor_ids, survivors};
use crate::{Error, History, Input, PELLUCID_DEFAULT, Sampler, SamplingParams, Workspace};

fn neutral() -> SamplingParams {
    SamplingParams::default()
}

fn no_history() -> History {
    History::new(&[], None)
}

/// mat, floor, table, bed, roof, ground, couch.
const SAT_ON_THE: [f32; 7] = [8.7, 6.2, 5.9, 5.1, 4.3, 4.1, 3.8];

#[test]
fn temperature_known_answers() {
    let at = |temperature: f32| survivors(&SamplingParams { temperature, ..neutral() }, &SAT_ON_THE, &no_history(), 0);
    assert!((at(1.0)[0].1 - 0.83).abs() < 0.005 && (at(1.0)[1].1 - 0.07).abs() < 0.005);
    assert!((at(0.5)[0].1 - 0.99).abs() < 0.005);
    assert!(at(2.0)[0].1 < 0.6 && at(2.0)[6].1 > 0.04, "the spread is wide");
    assert_eq!(at(0.0), [(0, 1.0)]);
}

#[test]
fn truncation_known_answers() {
    // Lyon, Paris, the, and a tail.
    let probabilities = [0.35f32, 0.32, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02];
    let logits = probabilities.map(f32::ln);
    assert_eq!(survivor_ids(&SamplingParams { top_k: 2, ..neutral() }, &logits), [0, 1]);
    assert_eq!(survivor_ids(&SamplingParams { top_p: 0.75, ..neutral() }, &logits), [0, 1, 2]);
    let sure = [0.82f32, 0.0821, 0.0819, 0.016].map(f32::ln);
    assert_eq!(survivor_ids(&SamplingParams { min_p: 0.1, ..neutral() }, &sure), [0, 1]);
}

#[test]
fn top_choices_are_excluded_but_for_the_least() {
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let at =
        |xtc_threshold| survivor_ids(&SamplingParams { xtc_probability: 1.0, xtc_threshold, ..neutral() }, &logits);
    assert_eq!(at(0.15), [2, 3]);
    assert_eq!(at(0.25), [1, 2, 3]);
    assert_eq!(at(0.35), [0, 1, 2, 3], "a single top choice stays");
    assert_eq!(at(0.5), [0, 1, 2, 3]);
    assert_eq!(at(0.0), [3]);
    // The coin falls as often as its probability says.
    let params = SamplingParams { xtc_probability: 0.3, xtc_threshold: 0.15, ..neutral() };
    let excluded =
        (0..2000).filter(|&position| survivors(&params, &logits, &no_history(), position).len() == 2).count();
    assert!((500..700).contains(&excluded), "{excluded} of 2000");
}

#[test]
fn top_n_sigma_keeps_what_stands_out() {
    // Mean 0, standard deviation 1, but for the one that stands out.
    let mut logits: Vec<f32> = (0..1000).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
    logits[7] = 20.0;
    assert_eq!(survivor_ids(&SamplingParams { top_n_sigma: 1.0, ..neutral() }, &logits), [7]);
    assert_eq!(survivor_ids(&SamplingParams { top_n_sigma: 100.0, ..neutral() }, &logits).len(), 1000);
    let hot = SamplingParams { top_n_sigma: 1.0, temperature: 50.0, ..neutral() };
    assert_eq!(survivor_ids(&hot, &logits), [7], "temperature does not matter");
}

#[test]
fn dynamic_temperature_is_hot_where_the_model_is_unsure() {
    let params = SamplingParams { dynamic_temperature_range: 0.5, ..neutral() };
    let flat = survivors(&params, &[0.0, 0.0, 0.0, 0.1], &no_history(), 0);
    let plain = survivors(&SamplingParams { temperature: 1.5, ..neutral() }, &[0.0, 0.0, 0.0, 0.1], &no_history(), 0);
    assert!((flat[3].1 - plain[3].1).abs() < 1e-4, "nearly the highest entropy: 1 + 0.5");
    let sure = survivors(&params, &[12.0, 0.0, 0.0, 0.0], &no_history(), 0);
    let cold = survivors(&SamplingParams { temperature: 0.5, ..neutral() }, &[12.0, 0.0, 0.0, 0.0], &no_history(), 0);
    assert!((sure[1].1 / cold[1].1).ln().abs() < 0.1, "nearly none: 1 - 0.5");
}

/// Somebody who asks for a file with one change gets the rest of it as it is: the token that continues a copy keeps its
/// probability, however long the copy is.
#[test]
fn the_default_does_not_penalise_copies() {
    let copied = [2, 3, 3, 3, 3, 4, 5, 6, 7, 8];
    let history = History::new(&[&copied[..], &[9, 1], &copied[..9]].concat(), None);
    let mut logits = [0.0; 12];
    logits[8] = 8.0;
    let left = survivors(&PELLUCID_DEFAULT.params(), &logits, &history, 0);
    assert_eq!(left.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [8]);
    let with_dry = SamplingParams { dry_multiplier: 0.8, ..PELLUCID_DEFAULT.params() };
    assert!(survivors(&with_dry, &logits, &history, 0).len() > 1, "control: DRY penalises it");
}

#[test]
fn a_repeat_is_penalised_by_its_length() {
    // "1 2 3 4 ... 1 2 3": a 4 would make it four long, and three is one more than is free.
    let history = History::new(&[1, 2, 3, 4, 9, 1, 2, 3], None);
    let dry = SamplingParams { dry_multiplier: 0.8, ..neutral() };
    let penalty_of_4 = |params: SamplingParams| {
        let left = survivors(&params, &[0.0; 12], &history, 0);
        (left[0].1 / left[4].1).ln()
    };
    assert!((penalty_of_4(dry.clone()) - 0.8 * 1.75).abs() < 1e-5);
    assert!((penalty_of_4(SamplingParams { dry_allowed_length: 3, ..dry.clone() }) - 0.8).abs() < 1e-5);
    assert_eq!(penalty_of_4(SamplingParams { dry_allowed_length: 4, ..dry.clone() }), 0.0);
    assert_eq!(
        penalty_of_4(SamplingParams { dry_sequence_breakers: vec![vec![2]], ..dry.clone() }),
        0.0,
        "one token since the breaker"
    );
    assert_eq!(
        penalty_of_4(SamplingParams { dry_sequence_breakers: vec![vec![4]], ..dry.clone() }),
        0.0,
        "a breaker is free"
    );
    assert_eq!(penalty_of_4(SamplingParams { dry_range: Some(5), ..dry }), 0.0, "out of range");
}

#[test]
fn token_rules_hold() {
    let logits = row(40, 3, 4.0);
    let best = choose(&SamplingParams { temperature: 0.0, ..neutral() }, &logits, 0).unwrap();
    let greedy = SamplingParams { temperature: 0.0, ..neutral() };
    let banned = SamplingParams { banned_tokens: vec![best], ..greedy.clone() };
    assert_ne!(choose(&banned, &logits, 0).unwrap(), best);
    let allowed = SamplingParams { allowed_tokens: Some(vec![5, 6, 39]), ..neutral() };
    assert_eq!(survivor_ids(&allowed, &logits), [5, 6, 39]);
    let neither = SamplingParams { banned_tokens: vec![5, 6, 39], ..allowed };
    assert_eq!(choose(&neither, &logits, 0), Err(Error::AllExcluded { name: "banned_tokens" }));
    let biased = SamplingParams { logit_bias: vec![(11, 100.0)], ..greedy.clone() };
    assert_eq!(choose(&biased, &logits, 0), Ok(11));

    let patient = SamplingParams { end_ids: vec![best], stop_ids: vec![0], min_tokens: 2, ..greedy };
    let sampler = Sampler::new(&patient, 40).unwrap();
    let mut history = sampler.history(&[1, 2, 3]);
    let mut ends = Vec::new();
    for position in 3..6 {
        let input = Input { logits: &logits, history: &history, position, mask: None };
        let choice = sampler.sample(&input, &mut sampler.state(), &mut Workspace::new()).unwrap();
        ends.push(choice.end.is_some());
        history.push(choice.token);
    }
    assert_eq!(ends, [false, false, true]);
}

#[test]
fn penalties_look_at_their_window() {
    let params =
        SamplingParams { presence_penalty: 1.0, repetition_penalty: 2.0, penalty_window: Some(2), ..neutral() };
    let sampler = Sampler::new(&params, 4).unwrap();
    let mut history = sampler.history(&[0]);
    [1, 2].into_iter().for_each(|token| history.push(token));
    let logits = [1.0f32; 4];
    let left = survivors(&params, &logits, &history, 0);
    assert_eq!(left[0].1, left[3].1, "the prompt's token is out of the window");
    assert!((left[1].1 / left[3].1 - (-1.5f64).exp()).abs() < 1e-6, "1 / 2 - 1 against 1");
}

#[test]
fn infinities_are_defined_and_nan_is_refused() {
    let infinite = f32::INFINITY;
    assert_eq!(choose(&neutral(), &[0.0, f32::NAN, f32::NAN], 0), Err(Error::NotANumber { token: 1 }));
    let mut long = vec![0.0f32; 1000];
    long[700] = f32::NAN;
    assert_eq!(choose(&neutral(), &long, 0), Err(Error::NotANumber { token: 700 }));
    let hidden = SamplingParams { banned_tokens: vec![700], ..neutral() };
    assert_eq!(choose(&hidden, &long, 0), Err(Error::NotANumber { token: 700 }), "a ban does not hide it");
    assert_eq!(choose(&neutral(), &[-infinite; 70], 0), Err(Error::NothingLeft));
    assert_eq!(survivor_ids(&neutral(), &[0.0, infinite, 3.0, infinite]), [1, 3]);
    assert_eq!(choose(&SamplingParams { temperature: 0.0, ..neutral() }, &[0.0, infinite, infinite], 0), Ok(1));
    let all = SamplingParams {
        top_k: 3,
        top_p: 0.9,
        min_p: 0.1,
        typical_p: 0.9,
        top_n_sigma: 1.0,
        xtc_probability: 1.0,
        logprobs: Some(5),
        ..neutral()
    };
    assert!([1, 3].contains(&choose(&all, &[0.0, infinite, 3.0, infinite], 0).unwrap()));
    assert_eq!(choose(&neutral(), &[0.0, f32::MAX, f32::MIN], 3), Ok(1));
    let cold = SamplingParams { temperature: 1e-45, ..neutral() };
    assert_eq!(choose(&cold, &[0.0, 1e-30, 0.0], 3), Ok(1));
    let harsh = SamplingParams { repetition_penalty: 100.0, ..neutral() };
    let history = History::new(&[0, 1], None);
    assert_eq!(survivors(&harsh, &[f32::MIN, f32::MIN], &history, 0).len(), 2, "a penalty excludes no token");
    let elsewhere = History::new(&[u32::MAX, 2], None);
    assert_eq!(survivors(&harsh, &[1.0, 1.0], &elsewhere, 0).len(), 2, "ids without a logit are passed over");
}

#[test]
fn vocabularies_of_one_and_of_a_quarter_million() {
    let everything = SamplingParams {
        temperature: 0.7,
        top_k: 50,
        top_p: 0.9,
        min_p: 0.02,
        typical_p: 0.95,
        top_n_sigma: 3.0,
        xtc_probability: 0.5,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        dry_multiplier: 0.8,
        logprobs: Some(20),
        ..neutral()
    };
    assert_eq!(choose(&everything, &[-3.0], 9), Ok(0));
    let vocab_size = 262_144;
    let logits = row(vocab_size, 8, 9.0);
    let history = History::new(&[1, 2, 3, 1, 2], None);
    let alone = [
        SamplingParams { top_k: 40, ..neutral() },
        SamplingParams { top_k: 100_000, ..neutral() },
        SamplingParams { top_p: 0.6, ..neutral() },
        SamplingParams { top_p: 0.999, ..neutral() },
        SamplingParams { min_p: 0.05, ..neutral() },
        SamplingParams { typical_p: 0.5, ..neutral() },
        SamplingParams { top_n_sigma: 1.5, ..neutral() },
        SamplingParams { xtc_probability: 1.0, xtc_threshold: 1e-4, ..neutral() },
        SamplingParams { temperature: 0.4, ..neutral() },
        everything,
    ];
    for params in alone {
        let left = survivors(&params, &logits, &history, 17);
        let mut verdict = oracle::chain(&params, &logits, &[1, 2, 3, 1, 2], &[], 17);
        verdict.set.sort_by_key(|entry| entry.0);
        // In a large vocabulary some tokens are always near the edge; the two sets may differ only in those.
        let theirs: std::collections::HashSet<u32> = verdict.set.iter().map(|entry| entry.0).collect();
        let differing =
            left.iter().filter(|entry| !theirs.contains(&entry.0)).count() + theirs.len().abs_diff(left.len());
        assert!(differing <= 1 + theirs.len() / 10_000, "{differing} of {} differ: {params:?}", theirs.len());
        assert!(left.iter().all(|entry| (entry.0 as usize) < vocab_size));
        let token = Sampler::new(&params, vocab_size)
            .unwrap()
            .sample(
                &Input { logits: &logits, history: &history, position: 17, mask: None },
                &mut crate::State { mu: 0.0 },
                &mut Workspace::new(),
            )
            .unwrap()
            .token;
        assert_eq!(token, oracle::winner(&verdict.set, params.seed, 17), "{params:?}");
    }
}

#[test]
fn mirostat_cuts_surprise_above_mu() {
    let probabilities = [0.5f32, 0.25, 0.125, 0.0625, 0.0625];
    let logits = probabilities.map(f32::ln);
    // mu begins at 2 tau: 2.5 bits let 1/2 and 1/4 through, and 3.5 bits 1/8 too.
    let at = |tau| survivor_ids(&SamplingParams { mirostat_tau: Some(tau), ..neutral() }, &logits);
    assert_eq!(at(1.25), [0, 1]);
    assert_eq!(at(1.75), [0, 1, 2]);
    assert_eq!(at(0.1), [0], "the most probable always stays");
    assert_eq!(at(5.0), [0, 1, 2, 3, 4]);
}
