//! Compares the chain with the oracle for random logits, parameters and orders.

use proptest::prelude::*;

use super::{oracle, survivors};
use crate::{Error, History, Input, Sampler, SamplingParams, StepKind, Workspace};

/// Margin below which rounding may make the chain and the oracle decide differently.
const MARGIN: f64 = 2e-5;

/// Rows with hard cases: ties, excluded tokens, one survivor, large and tiny spreads.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        6 => -12.0f32..12.0,
        3 => (-8i32..8).prop_map(|quarter| quarter as f32 * 0.25),
        1 => Just(f32::NEG_INFINITY),
    ];
    prop::collection::vec(value, 1..200).prop_map(|mut row| {
        if row.iter().all(|logit| *logit == f32::NEG_INFINITY) {
            row[0] = 1.0;
        }
        row
    })
}

/// A share of the probability: usually neutral or mild, so that more than one candidate remains, and sometimes at an
/// end of the range.
fn share(neutral: f32) -> impl Strategy<Value = f32> {
    prop_oneof![6 => Just(neutral), 1 => Just(1.0 - neutral), 4 => 0.3f32..1.0]
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let min_p = prop_oneof![6 => Just(0.0f32), 1 => Just(1.0), 4 => 0.001f32..0.2];
    let top_k = prop_oneof![Just(0u32), 1u32..60];
    let truncation = (top_k, share(1.0), min_p, share(1.0), prop_oneof![Just(0.0f32), 0.5f32..4.0]);
    let heat = (
        prop_oneof![1 => Just(0.0f32), 4 => Just(1.0), 8 => 0.2f32..3.0],
        prop_oneof![3 => Just(0.0f32), 1 => 0.1f32..1.0],
        0.5f32..2.0,
    );
    let xtc = (prop_oneof![2 => Just(0.0f32), 1 => Just(1.0), 1 => 0.0f32..1.0], 0.0f32..0.5);
    let penalties = (
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), 0.1f32..2.0],
        1u32..4,
    );
    let order = prop_oneof![
        2 => Just(None),
        1 => Just(StepKind::movable().collect::<Vec<_>>()).prop_shuffle().prop_map(Some),
    ];
    (any::<u64>(), truncation, heat, xtc, penalties, order).prop_map(
        |(seed, truncation, heat, xtc, penalties, samplers)| SamplingParams {
            seed,
            top_k: truncation.0,
            top_p: truncation.1,
            min_p: truncation.2,
            typical_p: truncation.3,
            top_n_sigma: truncation.4,
            temperature: heat.0,
            dynamic_temperature_range: heat.1,
            dynamic_temperature_exponent: heat.2,
            xtc_probability: xtc.0,
            xtc_threshold: xtc.1,
            repetition_penalty: penalties.0,
            frequency_penalty: penalties.1,
            presence_penalty: penalties.2,
            dry_multiplier: penalties.3,
            dry_allowed_length: penalties.4,
            dry_sequence_breakers: vec![vec![3], vec![1, 2]],
            samplers,
            ..SamplingParams::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn the_chain_is_the_oracle_s(
        logits in logits(),
        params in params(),
        prompt in prop::collection::vec(0u32..6, 0..30),
        output in prop::collection::vec(0u32..6, 0..30),
        position in any::<u32>(),
    ) {
        let mut params = params;
        // Breakers must be tokens of the vocabulary.
        params.dry_sequence_breakers.retain(|breaker| breaker.iter().all(|&id| (id as usize) < logits.len()));
        let in_vocabulary = |ids: &[u32]| -> Vec<u32> { ids.iter().map(|&id| id % logits.len() as u32).collect() };
        let (prompt, output) = (in_vocabulary(&prompt), in_vocabulary(&output));
        let mut history = History::new(&prompt, None);
        output.iter().for_each(|&token| history.push(token));
        let left = survivors(&params, &logits, &history, position);
        prop_assert!(!left.is_empty());

        // Sampling and tracing give the same token, one of those that remain.
        let sampler = Sampler::new(&params, logits.len()).unwrap();
        let input = Input { logits: &logits, history: &history, position, mask: None };
        let mut space = Workspace::new();
        let choice = sampler.sample(&input, &mut sampler.state(), &mut space).unwrap();
        prop_assert!(left.iter().any(|entry| entry.0 == choice.token));
        let (traced, trace) = sampler.trace(&input, &mut sampler.state(), &mut space).unwrap();
        prop_assert_eq!(&traced, &choice);
        prop_assert_eq!(trace.draw.winner.id, choice.token);
        prop_assert_eq!(trace.draw.entrants, left.len());

        let verdict = oracle::chain(&params, &logits, &prompt, &output, position);
        if verdict.margin > MARGIN {
            let mut set = verdict.set;
            set.sort_by_key(|entry| entry.0);
            let ids: Vec<u32> = left.iter().map(|entry| entry.0).collect();
            prop_assert_eq!(ids, set.iter().map(|entry| entry.0).collect::<Vec<_>>());
            for (ours, theirs) in left.iter().zip(oracle::probabilities(&set)) {
                prop_assert!((ours.1 - theirs).abs() < 1e-5, "token {}: {} and {}", ours.0, ours.1, theirs);
            }
            prop_assert_eq!(choice.token, oracle::winner(&set, params.seed, position));
        }
    }

    #[test]
    fn the_mask_is_kept(logits in logits(), params in params(), bits in prop::collection::vec(any::<u32>(), 7)) {
        let mask = &bits[..logits.len().div_ceil(32)];
        let mut params = params;
        params.dry_sequence_breakers.clear();
        let sampler = Sampler::new(&params, logits.len()).unwrap();
        let history = sampler.history(&[]);
        let input = Input { logits: &logits, history: &history, position: 3, mask: Some(mask) };
        let allowed = |id: usize| mask[id / 32] >> (id % 32) & 1 == 1;
        let any_left = logits.iter().enumerate().any(|(id, logit)| allowed(id) && *logit > f32::NEG_INFINITY);
        match sampler.sample(&input, &mut sampler.state(), &mut Workspace::new()) {
            Ok(choice) => prop_assert!(allowed(choice.token as usize)),
            Err(error) => prop_assert!(error == Error::NothingLeft && !any_left),
        }
    }
}
