//! What moves from token to token: mirostat's state, which can be copied and made anew.

use super::{choose, row};
use crate::params::Mirostat;
use crate::{Error, History, Input, Sampler, SamplingParams, Workspace};

fn generate(sampler: &Sampler, history: &mut History, from: u32, to: u32, state: &mut crate::State) -> Vec<u32> {
    let mut space = Workspace::new();
    (from..to)
        .map(|position| {
            let logits = row(500, u64::from(position), 8.0);
            let input = Input { logits: &logits, history, position, mask: None };
            let token = sampler.sample(&input, state, &mut space).unwrap().token;
            history.push(token);
            token
        })
        .collect()
}

#[test]
fn a_dropped_sequence_gets_its_state_back() {
    let params = SamplingParams {
        mirostat: Some(Mirostat { tau: 3.0, eta: 0.2 }),
        repetition_penalty: 1.1,
        ..SamplingParams::default()
    };
    let sampler = Sampler::new(&params, 500).unwrap();
    let (mut history, mut state) = (sampler.history(&[1, 2]), sampler.state());
    assert_eq!(state.mu, 6.0);
    let first = generate(&sampler, &mut history, 2, 30, &mut state);
    let saved = state;

    let (mut again, mut replayed) = (sampler.history(&[1, 2]), sampler.state());
    for (position, &token) in (2..).zip(&first) {
        let logits = row(500, u64::from(position), 8.0);
        let input = Input { logits: &logits, history: &again, position, mask: None };
        sampler.replay(&input, token, &mut replayed, &mut Workspace::new()).unwrap();
        again.push(token);
    }
    assert_eq!(replayed, saved, "to the bit");
    assert_ne!(saved, sampler.state());
    let rest = generate(&sampler, &mut history, 30, 50, &mut state);
    assert_eq!(generate(&sampler, &mut again, 30, 50, &mut replayed), rest);
}

#[test]
fn a_token_that_was_cut_cannot_be_replayed() {
    let params = SamplingParams { mirostat: Some(Mirostat { tau: 0.5, eta: 0.1 }), ..SamplingParams::default() };
    let sampler = Sampler::new(&params, 3).unwrap();
    let history = sampler.history(&[]);
    let input = Input { logits: &[5.0, 0.0, 0.0], history: &history, position: 4, mask: None };
    let mut state = sampler.state();
    let refused = sampler.replay(&input, 1, &mut state, &mut Workspace::new());
    assert_eq!(refused, Err(Error::NotReplayable { token: 1, position: 4 }));
    assert_eq!(state, sampler.state(), "an error moves nothing");
}

#[test]
fn mirostat_holds_the_surprise() {
    let rows: Vec<Vec<f32>> = (0..50).map(|seed| row(500, seed, 5.0)).collect();
    for tau in [2.0f32, 4.0] {
        let params = SamplingParams { mirostat: Some(Mirostat { tau, eta: 0.1 }), ..SamplingParams::default() };
        let sampler = Sampler::new(&params, 500).unwrap();
        let (history, mut state, mut space) = (sampler.history(&[]), sampler.state(), Workspace::new());
        let mut bits = 0.0;
        const TOKENS: u32 = 3000;
        for position in 0..TOKENS {
            let input = Input { logits: &rows[position as usize % 50], history: &history, position, mask: None };
            let before = state.mu;
            sampler.sample(&input, &mut state, &mut space).unwrap();
            // mu moves by eta times the distance from the target.
            bits += f64::from(tau) - (state.mu - before) / f64::from(0.1f32);
        }
        let mean = bits / f64::from(TOKENS);
        assert!((mean - f64::from(tau)).abs() < 0.1, "target {tau}, found {mean}");
    }
}

#[test]
fn without_mirostat_nothing_is_remembered() {
    let sampler = Sampler::new(&SamplingParams::default(), 100).unwrap();
    let (history, mut state) = (sampler.history(&[]), sampler.state());
    let logits = row(100, 1, 3.0);
    let input = Input { logits: &logits, history: &history, position: 7, mask: None };
    let token = sampler.sample(&input, &mut state, &mut Workspace::new()).unwrap().token;
    assert_eq!(state, sampler.state());
    assert_eq!(choose(&SamplingParams::default(), &logits, 7), Ok(token));
}
