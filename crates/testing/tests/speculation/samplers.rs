//! Every option of the sampler, at several temperatures, with the fake model.

use pellucid_engine::Request;
use pellucid_sampling::{OPTIONS as SAMPLING_OPTIONS, SamplingParams, StepKind};

use crate::support::{OPTIONS, compare, fake, prompts};

/// Changes one or more options.
type Change = fn(&mut SamplingParams);

/// Cases by the options that they change.
const CASES: [(&[&str], Change); 17] = [
    (&["temperature", "seed"], |_| ()),
    (&["dynamic_temperature_range", "dynamic_temperature_exponent"], |p| {
        (p.dynamic_temperature_range, p.dynamic_temperature_exponent) = (0.5, 1.5);
    }),
    (&["top_n_sigma"], |p| p.top_n_sigma = 1.0),
    (&["top_k"], |p| p.top_k = 5),
    (&["typical_p"], |p| p.typical_p = 0.6),
    (&["top_p", "min_p"], |p| (p.top_p, p.min_p) = (0.8, 0.05)),
    (&["xtc_probability", "xtc_threshold"], |p| (p.xtc_probability, p.xtc_threshold) = (0.6, 0.05)),
    (&["repetition_penalty", "penalty_window"], |p| (p.repetition_penalty, p.penalty_window) = (1.5, Some(6))),
    (&["repetition_penalty"], |p| p.repetition_penalty = 0.8),
    (&["frequency_penalty", "presence_penalty"], |p| (p.frequency_penalty, p.presence_penalty) = (0.9, -0.7)),
    (&["dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers"], |p| {
        (p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_range) = (2.0, 1.5, 1, Some(12));
        p.dry_sequence_breakers = vec![vec![3], vec![5, 6]];
    }),
    (&["mirostat_tau", "mirostat_eta"], |p| (p.mirostat_tau, p.mirostat_eta) = (Some(2.0), Some(0.3))),
    (&["logit_bias"], |p| p.logit_bias = vec![(7, 2.0), (9, -3.0)]),
    (&["banned_tokens"], |p| p.banned_tokens = vec![1, 2, 3, 4]),
    (&["allowed_tokens"], |p| p.allowed_tokens = Some(vec![1, 5, 9])),
    (&["stop_ids", "min_tokens"], |p| (p.stop_ids, p.end_ids, p.min_tokens) = (vec![4, 5], vec![6, 7], 5)),
    (&["samplers"], |p| {
        (p.top_k, p.min_p) = (8, 0.02);
        p.samplers = Some(vec![StepKind::MinP, StepKind::TopK, StepKind::Temperature]);
    }),
];

#[test]
fn drafts_change_no_reply_of_any_sampler() {
    for option in SAMPLING_OPTIONS {
        let has_case = CASES.iter().any(|(names, _)| names.contains(&option.param()));
        assert!(has_case, "no case has {}", option.param());
    }
    for (names, change) in CASES {
        let mut requests = Vec::new();
        for (i, prompt) in prompts(18, 24, 0).into_iter().enumerate() {
            let mut sampling = SamplingParams {
                seed: i as u64,
                temperature: [0.0, 0.7, 1.5][i % 3],
                logprobs: (i % 4 != 3).then_some(2),
                ..SamplingParams::default()
            };
            change(&mut sampling);
            let (loop_guard, trace) = (i % 5 == 1, i % 6 == 2);
            requests.push(Request { max_tokens: Some(16), loop_guard, trace, ..Request::new(prompt, sampling) });
        }
        compare(&format!("{names:?}"), &|| fake(OPTIONS, |_| ()), &requests);
    }
}
