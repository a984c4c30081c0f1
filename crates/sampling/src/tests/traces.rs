//! The trace of a token, and the model's own log probabilities.

use super::row;
use crate::{Input, Sampler, SamplingParams, StepKind, Workspace};

#[test]
fn a_trace_tells_who_was_cut_by_which_step() {
    let logits = [0.35f32, 0.32, 0.12, 0.1, 0.06, 0.05].map(f32::ln);
    let params =
        SamplingParams { top_k: 4, top_p: 0.7, logit_bias: vec![(5, 2.0)], seed: 3, ..SamplingParams::default() };
    let sampler = Sampler::new(&params, 6).unwrap();
    let history = sampler.history(&[]);
    let input = Input { logits: &logits, history: &history, position: 12, mask: None };
    let (choice, trace) = sampler.trace(&input, &mut sampler.state(), &mut Workspace::new()).unwrap();
    assert_eq!(trace.position, 12);
    let steps: Vec<_> =
        trace.steps.iter().map(|step| (step.name, step.setting.as_str(), step.entered, step.left)).collect();
    assert_eq!(steps, [("logit_bias", "1 tokens", 6, 6), ("top_k", "4", 6, 4), ("top_p", "0.7", 4, 3)]);

    let bias = &trace.steps[0];
    let lifted = bias.candidates.iter().find(|candidate| candidate.id == 5).unwrap();
    assert!((lifted.before - 0.05).abs() < 1e-6 && lifted.after > 0.25 && !lifted.cut);
    let shown: Vec<u32> = bias.candidates.iter().map(|candidate| candidate.id).collect();
    assert_eq!(shown, [0, 1, 5, 2, 3, 4], "by the higher of both probabilities");
    let cut: Vec<u32> =
        trace.steps[1].candidates.iter().filter(|candidate| candidate.cut).map(|candidate| candidate.id).collect();
    assert_eq!(cut, [3, 4]);
    for step in &trace.steps {
        for probabilities in [|c: &crate::CandidateTrace| c.before, |c: &crate::CandidateTrace| c.after] {
            assert!((step.candidates.iter().map(probabilities).sum::<f64>() - 1.0).abs() < 1e-6);
        }
        assert!(step.candidates.iter().all(|candidate| !candidate.cut || candidate.after == 0.0));
    }
    let draw = trace.draw;
    let runner_up = draw.runner_up.unwrap();
    assert_eq!((draw.winner.id, draw.entrants), (choice.token, 3));
    assert_eq!(draw.winner.u, crate::uniform(3, 12, choice.token));
    for runner in [draw.winner, runner_up] {
        assert!((runner.time - -runner.u.ln() / runner.probability).abs() < 1e-6 * runner.time);
    }
    assert!(draw.winner.time < runner_up.time);
    assert!((f64::from(trace.logprob) - f64::from(logits[choice.token as usize])).abs() < 1e-5, "of the model itself");
}

#[test]
fn a_trace_is_bounded_and_shows_a_mask_only_where_there_is_one() {
    let logits = row(5000, 2, 3.0);
    let sampler = Sampler::new(&SamplingParams { temperature: 0.9, ..SamplingParams::default() }, 5000).unwrap();
    let history = sampler.history(&[]);
    let mask = vec![0x5555_5555; 5000usize.div_ceil(32)];
    let mut kinds = Vec::new();
    for mask in [None, Some(mask.as_slice())] {
        let input = Input { logits: &logits, history: &history, position: 0, mask };
        let (_, trace) = sampler.trace(&input, &mut sampler.state(), &mut Workspace::new()).unwrap();
        assert!(trace.steps.iter().all(|step| step.candidates.len() <= 20));
        kinds.push(trace.steps.iter().map(|step| (step.kind, step.left)).collect::<Vec<_>>());
    }
    assert_eq!(kinds[0], [(StepKind::Temperature, 5000)]);
    assert_eq!(kinds[1], [(StepKind::Mask, 2500), (StepKind::Temperature, 2500)]);
}

#[test]
fn logprobs_are_the_model_s_own() {
    let logits = row(3000, 5, 6.0);
    let plain = SamplingParams { temperature: 0.0, logprobs: Some(20), ..SamplingParams::default() };
    let best = {
        let sampler = Sampler::new(&plain, 3000).unwrap();
        let history = sampler.history(&[]);
        let input = Input { logits: &logits, history: &history, position: 0, mask: None };
        sampler.sample(&input, &mut sampler.state(), &mut Workspace::new()).unwrap()
    };
    let hidden = 1234;
    let bent = SamplingParams {
        logit_bias: vec![(hidden, 100.0)],
        banned_tokens: vec![best.token],
        repetition_penalty: 3.0,
        ..plain
    };
    let sampler = Sampler::new(&bent, 3000).unwrap();
    let history = sampler.history(&[best.token, 7]);
    let input = Input { logits: &logits, history: &history, position: 0, mask: None };
    let choice = sampler.sample(&input, &mut sampler.state(), &mut Workspace::new()).unwrap();
    assert_eq!(choice.token, hidden);
    let (before, after) = (best.logprobs.unwrap(), choice.logprobs.unwrap());
    assert_eq!(before.top, after.top, "neither bias nor ban nor penalty moves a reported number");
    assert!(!after.top.iter().any(|entry| entry.0 == hidden));

    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let exact = |token: u32| (f64::from(logits[token as usize]).exp() / total).ln();
    assert!((f64::from(after.chosen) - exact(hidden)).abs() < 1e-5);
    assert_eq!(after.top.len(), 20);
    let mut order: Vec<u32> = (0..3000).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    for (&(id, logprob), expected) in after.top.iter().zip(order) {
        assert_eq!(id, expected);
        assert!((f64::from(logprob) - exact(id)).abs() < 1e-5);
    }
}

#[test]
fn logprobs_of_infinite_logits() {
    let params = SamplingParams { logprobs: Some(2), ..SamplingParams::default() };
    let sampler = Sampler::new(&params, 4).unwrap();
    let history = sampler.history(&[]);
    let input = Input {
        logits: &[0.0, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY],
        history: &history,
        position: 0,
        mask: None,
    };
    let (choice, _) = sampler.trace(&input, &mut sampler.state(), &mut Workspace::new()).unwrap();
    let half = -std::f32::consts::LN_2;
    let logprobs = choice.logprobs.unwrap();
    assert_eq!(logprobs.top, [(1, half), (3, half)]);
    assert_eq!(logprobs.chosen, half);
}
