//! Values out of range and options without effect are refused by name.

use crate::{Error, Input, Sampler, SamplingParams, StepKind, Workspace};

type SetParameter = fn(&mut SamplingParams, f32);

/// A parameter's name, how to set it, and values inside and outside its range.
const NUMBERS: [(&str, SetParameter, [f32; 2], [f32; 2]); 16] = [
    ("temperature", |p, v| p.temperature = v, [0.0, 100.0], [-0.1, 100.1]),
    ("dynamic_temperature_range", |p, v| p.dynamic_temperature_range = v, [0.0, 100.0], [-0.1, 101.0]),
    ("dynamic_temperature_exponent", |p, v| p.dynamic_temperature_exponent = v, [0.0, 100.0], [-0.1, 101.0]),
    ("top_n_sigma", |p, v| p.top_n_sigma = v, [0.0, 100.0], [-1.0, 101.0]),
    ("typical_p", |p, v| p.typical_p = v, [0.0, 1.0], [-0.1, 1.1]),
    ("top_p", |p, v| p.top_p = v, [0.0, 1.0], [-0.1, 1.1]),
    ("min_p", |p, v| p.min_p = v, [0.0, 1.0], [-0.1, 1.1]),
    ("xtc_probability", |p, v| p.xtc_probability = v, [0.0, 1.0], [-0.1, 1.1]),
    ("xtc_threshold", |p, v| p.xtc_threshold = v, [0.0, 0.5], [-0.1, 0.6]),
    ("repetition_penalty", |p, v| p.repetition_penalty = v, [0.01, 100.0], [0.0, 101.0]),
    ("frequency_penalty", |p, v| p.frequency_penalty = v, [-2.0, 2.0], [-2.1, 2.1]),
    ("presence_penalty", |p, v| p.presence_penalty = v, [-2.0, 2.0], [-2.1, 2.1]),
    ("dry_multiplier", |p, v| p.dry_multiplier = v, [0.0, 100.0], [-0.1, 101.0]),
    ("dry_base", |p, v| p.dry_base = v, [1.0, 100.0], [0.9, 101.0]),
    ("mirostat_tau", |p, v| p.mirostat_tau = Some(v), [0.0, 100.0], [-0.1, 101.0]),
    ("mirostat_eta", |p, v| p.mirostat_eta = Some(v), [0.0, 1.0], [-0.1, 1.1]),
];

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    for (name, set, inside, outside) in NUMBERS {
        let with = |value| {
            let mut params = SamplingParams::default();
            set(&mut params, value);
            params.check()
        };
        for value in inside {
            assert_eq!(with(value), Ok(()), "{name} {value}");
        }
        for value in outside.into_iter().chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            match with(value) {
                Err(Error::OutOfRange { name: refused, .. }) => assert_eq!(refused, name),
                other => panic!("{name} {value}: {other:?}"),
            }
        }
    }
    let text = SamplingParams { top_p: 1.5, ..SamplingParams::default() }.check().unwrap_err().to_string();
    assert_eq!(text, "top_p: expected 0 to 1, found 1.5");
}

/// With every parameter neutral, the chain is only the mask and the draw.
#[test]
fn neutral_is_left_out() {
    let sampler = Sampler::new(&SamplingParams::default(), 10).unwrap();
    assert_eq!(sampler.steps().map(|step| step.0).collect::<Vec<_>>(), [StepKind::Mask, StepKind::Draw]);
    let preset = Sampler::new(&crate::Preset::Chat.params(), 10).unwrap();
    let names: Vec<String> = preset.steps().map(|(kind, setting)| format!("{kind} {setting}")).collect();
    assert_eq!(names, ["grammar ", "temperature 0.7", "top_k 40", "top_p 0.9", "draw "]);
}

#[test]
fn lists_and_counts_have_limits() {
    let refused = |params: SamplingParams| params.check().unwrap_err().to_string();
    let neutral = SamplingParams::default;
    assert_eq!(refused(SamplingParams { logprobs: Some(21), ..neutral() }), "logprobs: expected 0 to 20, found 21");
    assert_eq!(
        refused(SamplingParams { penalty_window: Some(0), ..neutral() }),
        "penalty_window: expected 1 to 4294967295, found 0"
    );
    assert_eq!(
        refused(SamplingParams { logit_bias: vec![(1, -101.0)], ..neutral() }),
        "logit_bias: expected -100 to 100, found -101"
    );
    assert_eq!(
        refused(SamplingParams { logit_bias: vec![(4, 1.0), (2, 0.0), (4, 2.0)], ..neutral() }),
        "logit_bias: token 4 is listed twice"
    );
    assert_eq!(
        refused(SamplingParams { logit_bias: (0..5000).map(|i| (i, 0.0)).collect(), ..neutral() }),
        "logit_bias: expected at most 4096 entries, found 5000"
    );
    assert_eq!(
        refused(SamplingParams { allowed_tokens: Some(vec![]), ..neutral() }),
        "allowed_tokens: expected at least one entry, found none"
    );
    assert_eq!(
        refused(SamplingParams { dry_sequence_breakers: vec![vec![]], ..neutral() }),
        "dry_sequence_breakers, tokens of one: expected at least one entry, found none"
    );
    let free = SamplingParams { dry_allowed_length: 0, ..neutral() };
    assert!(refused(free).starts_with("dry_allowed_length: expected 1 to"));
}

#[test]
fn ids_must_be_of_the_vocabulary() {
    let neutral = SamplingParams::default;
    let all = [
        SamplingParams { logit_bias: vec![(10, 1.0)], ..neutral() },
        SamplingParams { banned_tokens: vec![3, 10], ..neutral() },
        SamplingParams { allowed_tokens: Some(vec![u32::MAX]), ..neutral() },
        SamplingParams { end_ids: vec![10], ..neutral() },
        SamplingParams { stop_ids: vec![10], ..neutral() },
        SamplingParams { dry_sequence_breakers: vec![vec![1, 10]], ..neutral() },
    ];
    for params in all {
        assert!(matches!(Sampler::new(&params, 10), Err(Error::OutsideVocabulary { .. })), "{params:?}");
    }
    assert!(matches!(Sampler::new(&neutral(), 0), Err(Error::VocabularySize { .. })));
    assert!(matches!(Sampler::new(&neutral(), usize::MAX), Err(Error::VocabularySize { .. })));
}

#[test]
fn orders_are_checked() {
    let with = |samplers: Vec<StepKind>| SamplingParams {
        temperature: 0.5,
        samplers: Some(samplers),
        ..SamplingParams::default()
    };
    assert_eq!(with(vec![StepKind::TopK, StepKind::Temperature]).check(), Ok(()));
    let refused = |samplers| with(samplers).check().unwrap_err().to_string();
    assert_eq!(refused(vec![StepKind::Temperature, StepKind::Temperature]), "samplers: temperature is listed twice");
    assert_eq!(refused(vec![StepKind::Draw]), "samplers: draw runs at a fixed position and cannot be listed");
    assert!(refused(vec![StepKind::TopK]).starts_with("samplers: temperature is set but not listed"));
    assert_eq!("top_k".parse(), Ok(StepKind::TopK));
    assert!(matches!("draw".parse::<StepKind>(), Err(Error::StepFixed { .. })));
    let unknown = "tail_free".parse::<StepKind>().unwrap_err().to_string();
    assert!(
        unknown.starts_with("samplers: no step is called \"tail_free\"; expected repetition_penalty, "),
        "{unknown}"
    );
    for kind in StepKind::movable() {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    let both = SamplingParams { mirostat_tau: Some(5.0), top_k: 5, ..SamplingParams::default() };
    assert_eq!(
        both.check().unwrap_err().to_string(),
        "top_k: mirostat does its own truncation; leave top_k neutral or mirostat off"
    );
}

/// The order matters, and the steps run in the order of `samplers`.
#[test]
fn the_steps_run_in_the_given_order() {
    let logits = [2.0f32, 1.0, 0.0];
    let with = |samplers: &[StepKind]| {
        let params = SamplingParams {
            temperature: 4.0,
            top_p: 0.8,
            samplers: Some(samplers.to_vec()),
            ..SamplingParams::default()
        };
        super::survivor_ids(&params, &logits)
    };
    assert_eq!(with(&[StepKind::Temperature, StepKind::TopP]), [0, 1, 2]);
    assert_eq!(with(&[StepKind::TopP, StepKind::Temperature]), [0, 1]);
}

#[test]
fn inputs_of_the_wrong_size_are_refused() {
    let sampler = Sampler::new(&SamplingParams::default(), 40).unwrap();
    let history = sampler.history(&[]);
    let sample = |logits: &[f32], mask: Option<&[u32]>| {
        let input = Input { logits, history: &history, position: 0, mask };
        sampler.sample(&input, &mut sampler.state(), &mut Workspace::new())
    };
    assert_eq!(sample(&[0.0; 41], None), Err(Error::NumLogits { expected: 40, found: 41 }));
    assert_eq!(sample(&[0.0; 40], Some(&[0])), Err(Error::MaskLength { expected: 2, found: 1 }));
    assert_eq!(sample(&[0.0; 40], Some(&[0, 0])), Err(Error::NothingLeft));
    assert_eq!(sample(&[0.0; 40], Some(&[0, 1 << 7])).unwrap().token, 39);
}

/// Rules that leave no token are refused with the parameters, not when the first token is sampled.
#[test]
fn rules_that_exclude_every_token_are_refused() {
    let refused = |params: SamplingParams| Sampler::new(&params, 40).map(drop);
    let usual = SamplingParams::default();
    let all: Vec<u32> = (0..40).collect();
    let excluded = |name| Err(Error::AllExcluded { name });
    assert_eq!(refused(SamplingParams { banned_tokens: all.clone(), ..usual.clone() }), excluded("banned_tokens"));
    assert_eq!(refused(SamplingParams { banned_tokens: all[1..].to_vec(), ..usual.clone() }), Ok(()));
    let repeated = [&all[1..], &all[1..]].concat();
    assert_eq!(refused(SamplingParams { banned_tokens: repeated, ..usual.clone() }), Ok(()), "token 0 is left");
    let allowed = SamplingParams { allowed_tokens: Some(vec![3, 4]), ..usual.clone() };
    assert_eq!(refused(SamplingParams { banned_tokens: vec![4, 3], ..allowed.clone() }), excluded("banned_tokens"));
    assert_eq!(refused(SamplingParams { banned_tokens: vec![4, 5], ..allowed.clone() }), Ok(()));
    let ends = SamplingParams { end_ids: vec![3], stop_ids: vec![4], ..allowed };
    assert_eq!(refused(ends.clone()), Ok(()));
    assert_eq!(refused(SamplingParams { min_tokens: 1, ..ends }), excluded("min_tokens"));
    assert_eq!(refused(SamplingParams { min_tokens: 1, end_ids: all, ..usual }), excluded("min_tokens"));
}

#[test]
fn settings_of_steps_that_are_off_are_refused_by_name() {
    let usual = SamplingParams::default();
    assert_eq!(usual.check_effect(), Ok(()));
    let idle = [
        ("dynamic_temperature_exponent", SamplingParams { dynamic_temperature_exponent: 2.0, ..usual.clone() }),
        ("xtc_threshold", SamplingParams { xtc_threshold: 0.2, ..usual.clone() }),
        ("penalty_window", SamplingParams { penalty_window: Some(8), ..usual.clone() }),
        ("dry_base", SamplingParams { dry_base: 2.0, ..usual.clone() }),
        ("dry_allowed_length", SamplingParams { dry_allowed_length: 3, ..usual.clone() }),
        ("dry_range", SamplingParams { dry_range: Some(64), ..usual.clone() }),
        ("mirostat_eta", SamplingParams { mirostat_eta: Some(0.1), ..usual.clone() }),
        ("dry_sequence_breakers", SamplingParams { dry_sequence_breakers: vec![vec![1]], ..usual.clone() }),
    ];
    for (expected, params) in idle {
        assert!(
            matches!(params.check_effect(), Err(Error::NoEffect { name, .. }) if name == expected),
            "{expected}: {:?}",
            params.check_effect()
        );
        let mut used =
            SamplingParams { dynamic_temperature_range: 0.5, xtc_probability: 0.5, presence_penalty: 0.5, ..params };
        used.dry_multiplier = 0.5;
        used.mirostat_tau = Some(5.0);
        assert_eq!(used.check_effect(), Ok(()), "{expected}");
    }
    let greedy = SamplingParams { temperature: 0.0, dynamic_temperature_range: 1.0, ..usual };
    assert_eq!(greedy.check_effect(), Err(Error::NothingToMove { name: "dynamic_temperature_range" }));
}
