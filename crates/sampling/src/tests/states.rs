//! Mirostat's state, which changes from token to token.

use super::{choose, row};
use crate::{Input, Sampler, SamplingParams, Workspace};

#[test]
fn mirostat_holds_the_surprise() {
    let rows: Vec<Vec<f32>> = (0..50).map(|seed| row(500, seed, 5.0)).collect();
    for tau in [2.0f32, 4.0] {
        let params = SamplingParams { mirostat_tau: Some(tau), ..SamplingParams::default() };
        let sampler = Sampler::new(&params, 500).unwrap();
        let (history, mut state, mut space) = (sampler.history(&[]), sampler.state(), Workspace::new());
        assert_eq!(state.mu, 2.0 * f64::from(tau));
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
