//! Tests of the crate against independent sources: definitions computed another way, published numbers, statistics.

mod candidates;
mod digests;
mod draws;
mod formulas;
mod goldens;
mod oracle;
mod parameters;
mod properties;
mod states;
mod traces;

use crate::{Error, History, Input, Sampler, SamplingParams, Workspace};

/// Returns the candidates after every step but the draw with their probabilities, by ascending id.
fn survivors(params: &SamplingParams, logits: &[f32], history: &History, position: u32) -> Vec<(u32, f64)> {
    let sampler = Sampler::new(params, logits.len()).unwrap();
    let mut space = Workspace::new();
    let input = Input { logits, history, position, mask: None };
    let (set, _, _) = sampler.run(&input, &sampler.state(), &mut space, false).unwrap();
    let probabilities = set.probabilities();
    let mut left: Vec<(u32, f64)> =
        set.from(f32::NEG_INFINITY).iter().map(|candidate| (candidate.id, probabilities.of(candidate.logit))).collect();
    left.sort_by_key(|entry| entry.0);
    left
}

fn survivor_ids(params: &SamplingParams, logits: &[f32]) -> Vec<u32> {
    survivors(params, logits, &History::new(&[], None), 0).into_iter().map(|entry| entry.0).collect()
}

/// Samples a token without a history.
fn choose(params: &SamplingParams, logits: &[f32], position: u32) -> Result<u32, Error> {
    let sampler = Sampler::new(params, logits.len())?;
    let history = sampler.history(&[]);
    let input = Input { logits, history: &history, position, mask: None };
    Ok(sampler.sample(&input, &mut sampler.state(), &mut Workspace::new())?.token)
}

/// Returns a row that looks like a model's, different for each seed.
fn row(len: usize, seed: u64, spread: f32) -> Vec<f32> {
    (0..len as u32)
        .map(|token| {
            let sum: f64 = (0..4).map(|part| crate::uniform(seed, part, token)).sum();
            spread * (sum as f32 - 2.0)
        })
        .collect()
}
