//! A digest leads to the same token as its row, and the usual chains need only the digest.

use proptest::prelude::*;

use super::row;
use crate::digest::{OwnedDigest, RACE_MARGIN};
use crate::philox::token_word;
use crate::{Choice, Input, Sampler, SamplingParams, StepKind, Workspace};

const NUM_TOP: usize = 64;

/// Samples from the row and from its digest; the second is `None` where the digest holds too little.
fn both(params: &SamplingParams, logits: &[f32], position: u32) -> (Choice, Option<Choice>) {
    both_masked(params, logits, position, None)
}

/// Samples as [`both`] does, with the mask of a grammar.
fn both_masked(
    params: &SamplingParams,
    logits: &[f32],
    position: u32,
    mask: Option<&[u32]>,
) -> (Choice, Option<Choice>) {
    let sampler = Sampler::new(params, logits.len()).unwrap();
    let (history, mut space) = (sampler.history(&[]), Workspace::new());
    let input = Input { logits, history: &history, position, mask };
    let whole = sampler.sample(&input, &mut sampler.state(), &mut space).unwrap();
    let query = sampler.query(position).expect("a usual chain");
    let digest = OwnedDigest::of(logits, &query, NUM_TOP).expect("a plain row");
    (whole, sampler.sample_digest(&digest.as_digest(), position, mask, &mut space).unwrap())
}

/// Returns a mask that allows about one token of `one_in`, and at least one of the row.
fn mask(len: usize, seed: u64, one_in: u32) -> Vec<u32> {
    let mut words = vec![0; len.div_ceil(32)];
    let allowed = (0..len as u32).filter(|&id| token_word(seed, 1, id).is_multiple_of(one_in));
    for id in allowed.chain([token_word(seed, 2, 0) % len as u32]) {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words
}

/// Returns the token that a device would guess.
fn assumed(params: &SamplingParams, logits: &[f32], position: u32) -> Option<u32> {
    let query = Sampler::new(params, logits.len()).unwrap().query(position).expect("a usual chain");
    OwnedDigest::of(logits, &query, NUM_TOP).expect("a plain row").assumed
}

fn usual_params() -> impl Strategy<Value = SamplingParams> {
    let order =
        prop::sample::subsequence(vec![StepKind::Temperature, StepKind::TopK, StepKind::TopP, StepKind::MinP], 0..=4)
            .prop_shuffle();
    let logprobs = prop::option::of(0u32..20);
    (any::<u64>(), prop::sample::select(vec![0.0f32, 0.3, 0.8, 1.0, 1.7]), order, 1u32..90, 0.05f32..1.0, logprobs)
        .prop_map(|(seed, temperature, order, top_k, share, logprobs)| {
            let uses = |kind| order.contains(&kind);
            SamplingParams {
                seed,
                temperature: if uses(StepKind::Temperature) { temperature } else { 1.0 },
                top_k: if uses(StepKind::TopK) { top_k } else { 0 },
                top_p: if uses(StepKind::TopP) { share } else { 1.0 },
                min_p: if uses(StepKind::MinP) { share / 10.0 } else { 0.0 },
                logprobs,
                samplers: Some(order),
                ..SamplingParams::default()
            }
        })
}

proptest! {
    #[test]
    fn the_digest_leads_to_the_row_s_choice(
        params in usual_params(),
        (len, spread, row_seed, position) in (1usize..900, 0.0f32..12.0, any::<u64>(), 0u32..5000),
        steps in prop::option::of(1u32..40),
    ) {
        let mut logits = row(len, row_seed, spread);
        if let Some(steps) = steps {
            // Many ties, at the edges of every cut.
            logits.iter_mut().for_each(|logit| *logit = (*logit * steps as f32).round() / steps as f32);
        }
        let (whole, from_digest) = both(&params, &logits, position);
        if let Some(from_digest) = from_digest {
            prop_assert_eq!(whole, from_digest);
        } else {
            // A digest holds too little only if it does not have every token.
            prop_assert!(len > NUM_TOP);
        }
    }
}

proptest! {
    #[test]
    fn a_mask_leads_to_the_row_s_choice(
        params in usual_params(),
        (len, spread, row_seed, position) in (1usize..900, 0.0f32..12.0, any::<u64>(), 0u32..5000),
        steps in prop::option::of(1u32..40),
        one_in in prop::sample::select(vec![1u32, 2, 5, 50, 1000]),
    ) {
        let mut logits = row(len, row_seed, spread);
        if let Some(steps) = steps {
            logits.iter_mut().for_each(|logit| *logit = (*logit * steps as f32).round() / steps as f32);
        }
        let mask = mask(len, row_seed, one_in);
        let (whole, from_digest) = both_masked(&params, &logits, position, Some(&mask));
        if let Some(from_digest) = from_digest {
            prop_assert_eq!(whole, from_digest);
        } else {
            prop_assert!(len > NUM_TOP);
        }
    }
}

#[test]
fn a_mask_leaves_most_digests_enough() {
    let chains = [
        (SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 20),
        (SamplingParams { temperature: 0.7, ..SamplingParams::default() }, 5),
        (SamplingParams { temperature: 0.7, top_k: 5, top_p: 0.9, ..SamplingParams::default() }, 20),
        (SamplingParams { temperature: 0.7, min_p: 0.3, ..SamplingParams::default() }, 15),
    ];
    for (params, least) in chains {
        let sampler = Sampler::new(&params, 50_000).unwrap();
        assert_eq!(sampler.masked_query(3), sampler.query(3), "{params:?}");
        let enough = (0..20).filter(|&position| {
            let logits = row(50_000, u64::from(position), 18.0);
            let mask = mask(logits.len(), u64::from(position), 2);
            let (whole, from_digest) = both_masked(&params, &logits, position, Some(&mask));
            from_digest.is_some_and(|from_digest| {
                assert_eq!(whole, from_digest, "{params:?} at {position}");
                true
            })
        });
        assert!(enough.count() >= least, "{params:?}");
    }
}

#[test]
fn a_mask_and_a_share_of_all_weights_need_the_row() {
    let unusual = Some(vec![StepKind::TopP, StepKind::TopK, StepKind::Temperature]);
    for params in [
        SamplingParams { top_p: 0.9, ..SamplingParams::default() },
        SamplingParams { top_p: 0.9, top_k: 40, samplers: unusual, ..SamplingParams::default() },
    ] {
        let sampler = Sampler::new(&params, 5000).unwrap();
        assert!(sampler.query(3).is_some() && sampler.masked_query(3).is_none(), "{params:?}");
        let logits = row(5000, 7, 18.0);
        assert_eq!(both_masked(&params, &logits, 3, Some(&mask(5000, 7, 2))).1, None, "{params:?}");
    }
}

#[test]
fn usual_chains_need_only_the_digest() {
    let chains = [
        SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        SamplingParams::default(),
        SamplingParams { temperature: 0.7, ..SamplingParams::default() },
        SamplingParams { temperature: 0.7, top_k: 40, top_p: 0.95, min_p: 0.05, ..SamplingParams::default() },
        SamplingParams { temperature: 1.3, top_k: 5, ..SamplingParams::default() },
        SamplingParams { temperature: 0.9, min_p: 0.2, ..SamplingParams::default() },
        SamplingParams { top_p: 0.5, logprobs: Some(20), ..SamplingParams::default() },
    ];
    let logits = row(50_000, 7, 18.0);
    for params in chains {
        for position in 0..20 {
            let (whole, from_digest) = both(&params, &logits, position);
            let token = whole.token;
            assert_eq!(Some(whole), from_digest, "{params:?}");
            assert_eq!(Some(token), assumed(&params, &logits, position), "{params:?} at {position}");
        }
    }
}

#[test]
fn an_unusual_order_has_no_guess_unless_it_is_greedy() {
    let unusual = Some(vec![StepKind::TopP, StepKind::TopK, StepKind::Temperature]);
    let params = SamplingParams { temperature: 0.7, top_k: 40, top_p: 0.9, samplers: unusual, ..Default::default() };
    let logits = row(500, 7, 18.0);
    assert_eq!(assumed(&params, &logits, 3), None);
    let greedy = SamplingParams { temperature: 0.0, ..params };
    assert_eq!(assumed(&greedy, &logits, 3), Some(both(&greedy, &logits, 3).0.token));
}

#[test]
fn a_chain_that_edits_logits_has_no_query() {
    for params in [
        SamplingParams { repetition_penalty: 1.1, ..SamplingParams::default() },
        SamplingParams { logit_bias: vec![(1, 2.0)], ..SamplingParams::default() },
        SamplingParams { typical_p: 0.5, ..SamplingParams::default() },
    ] {
        assert_eq!(Sampler::new(&params, 100).unwrap().query(0), None, "{params:?}");
    }
}

#[test]
fn a_row_with_nan_or_without_a_finite_maximum_has_no_digest() {
    let query = Sampler::new(&SamplingParams::default(), 3).unwrap().query(0).unwrap();
    for row in [[0.0, f32::NAN, 1.0], [0.0, f32::INFINITY, 1.0], [f32::NEG_INFINITY; 3]] {
        assert_eq!(OwnedDigest::of(&row, &query, NUM_TOP), None);
    }
}

/// The margin is more than a hundred times the error of an f32.
#[test]
fn approximate_times_are_close() {
    let mut worst = 0.0f64;
    for word in (0..=u32::MAX).step_by(9973).chain([u32::MAX]) {
        let exact = libm::log(-libm::log(crate::philox::unit(word)));
        worst = worst.max((f64::from(crate::draw::approximate_time(word, 0.0)) - exact).abs());
    }
    assert!(worst < f64::from(RACE_MARGIN) / 100.0, "{worst:e}");
}
