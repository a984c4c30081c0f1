//! The reference: every step straight from its definition, in f64, with everything sorted and nothing skipped.
//!
//! Each step returns the remaining candidates and its margin, the distance of the nearest decision from going the other
//! way. A decision with a margin below rounding proves nothing.

use std::collections::HashMap;

use crate::{SamplingParams, StepKind, uniform};

/// Candidates with their logits.
pub(super) type Set = Vec<(u32, f64)>;

/// Candidates after a chain, and the least margin of its steps.
pub(super) struct Verdict {
    pub(super) set: Set,
    pub(super) margin: f64,
}

pub(super) fn probabilities(set: &[(u32, f64)]) -> Vec<f64> {
    let largest = set.iter().fold(f64::NEG_INFINITY, |best, entry| best.max(entry.1));
    let weights: Vec<f64> = set.iter().map(|entry| (entry.1 - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

fn entropy(probabilities: &[f64]) -> f64 {
    -probabilities.iter().filter(|&&p| p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}

/// Applies the movable steps in their order, or in that of `samplers`.
pub(super) fn chain(params: &SamplingParams, logits: &[f32], prompt: &[u32], output: &[u32], position: u32) -> Verdict {
    let mut set: Set = (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
    set.retain(|entry| entry.1 > f64::NEG_INFINITY);
    let mut verdict = Verdict { set, margin: f64::INFINITY };
    let order = params.samplers.clone().unwrap_or_else(|| StepKind::movable().collect());
    for kind in order.into_iter().filter(|&kind| params.uses(kind)) {
        let Verdict { set, margin } = verdict;
        let (set, near) = step(kind, params, set, prompt, output, position);
        assert!(!set.is_empty(), "{kind} left no candidate");
        verdict = Verdict { set, margin: margin.min(near) };
    }
    verdict
}

fn step(
    kind: StepKind,
    params: &SamplingParams,
    set: Set,
    prompt: &[u32],
    output: &[u32],
    position: u32,
) -> (Set, f64) {
    let value = f64::from;
    match kind {
        StepKind::Repetition => (repetition(set, prompt, output, value(params.repetition_penalty)), f64::INFINITY),
        StepKind::FrequencyPresence => (
            frequency_presence(set, output, value(params.frequency_penalty), value(params.presence_penalty)),
            f64::INFINITY,
        ),
        StepKind::Dry => (dry(set, &[prompt, output].concat(), params), f64::INFINITY),
        StepKind::Temperature if params.dynamic_temperature_range > 0.0 => dynamic_temperature(set, params),
        StepKind::Temperature => temperature(set, value(params.temperature)),
        StepKind::TopNSigma => top_n_sigma(set, value(params.top_n_sigma)),
        StepKind::TopK => top_k(set, params.top_k as usize),
        StepKind::Typical => typical(set, value(params.typical_p)),
        StepKind::TopP => top_p(set, value(params.top_p)),
        StepKind::MinP => min_p(set, value(params.min_p)),
        StepKind::Xtc => {
            let coin = (f64::from(
                crate::philox([params.seed as u32, (params.seed >> 32) as u32], [position, 0, 1, 0])[0] >> 8,
            ) + 0.5)
                / 16_777_216.0;
            if coin < value(params.xtc_probability) {
                xtc(set, value(params.xtc_threshold))
            } else {
                (set, f64::INFINITY)
            }
        }
        _ => unreachable!("only movable steps are listed"),
    }
}

pub(super) fn repetition(mut set: Set, prompt: &[u32], output: &[u32], penalty: f64) -> Set {
    for (id, logit) in &mut set {
        if prompt.contains(id) || output.contains(id) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
    set
}

pub(super) fn frequency_presence(mut set: Set, output: &[u32], frequency: f64, presence: f64) -> Set {
    for (id, logit) in &mut set {
        let count = output.iter().filter(|&token| token == id).count() as f64;
        *logit -= frequency * count + if count > 0.0 { presence } else { 0.0 };
    }
    set
}

/// Compares the tokens before each earlier position with the end of the text, one by one.
pub(super) fn dry(mut set: Set, text: &[u32], params: &SamplingParams) -> Set {
    let text = &text[text.len().saturating_sub(params.dry_range.map_or(usize::MAX, |range| range as usize))..];
    let mut limit = text.len();
    for breaker in &params.dry_sequence_breakers {
        for end in breaker.len()..=text.len() {
            if &text[end - breaker.len()..end] == breaker.as_slice() {
                limit = limit.min(text.len() - end);
            }
        }
    }
    let mut longest: HashMap<u32, usize> = HashMap::new();
    for position in 0..text.len() {
        let mut repeat = 0;
        while repeat < limit && repeat < position && text[position - 1 - repeat] == text[text.len() - 1 - repeat] {
            repeat += 1;
        }
        let entry = longest.entry(text[position]).or_default();
        *entry = repeat.max(*entry);
    }
    for (id, logit) in &mut set {
        let repeat = longest.get(id).copied().unwrap_or(0);
        if repeat >= params.dry_allowed_length as usize && !params.dry_sequence_breakers.contains(&vec![*id]) {
            let over = (repeat - params.dry_allowed_length as usize) as i32;
            *logit -= f64::from(params.dry_multiplier) * f64::from(params.dry_base).powi(over);
        }
    }
    set
}

fn ranked(mut set: Set) -> Set {
    set.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    set
}

pub(super) fn temperature(set: Set, temperature: f64) -> (Set, f64) {
    if temperature == 0.0 {
        return (ranked(set)[..1].to_vec(), f64::INFINITY);
    }
    (set.into_iter().map(|(id, logit)| (id, logit / temperature)).collect(), f64::INFINITY)
}

pub(super) fn dynamic_temperature(set: Set, params: &SamplingParams) -> (Set, f64) {
    if set.len() == 1 {
        return (set, f64::INFINITY);
    }
    let (middle, range) = (f64::from(params.temperature), f64::from(params.dynamic_temperature_range));
    let share = entropy(&probabilities(&set)) / (set.len() as f64).ln();
    let low = (middle - range).max(0.0);
    let chosen = low + (middle + range - low) * share.min(1.0).powf(f64::from(params.dynamic_temperature_exponent));
    // A temperature close to 0 magnifies every rounding.
    if chosen < 1e-3 { (set, 0.0) } else { temperature(set, chosen) }
}

pub(super) fn top_k(set: Set, k: usize) -> (Set, f64) {
    let mut set = ranked(set);
    set.truncate(k);
    (set, f64::INFINITY)
}

/// Returns the shortest prefix whose probabilities reach p.
fn reaching(order: Vec<(u32, f64, f64)>, p: f64) -> (Set, f64) {
    let (mut sum, mut margin) = (0.0, f64::INFINITY);
    let mut kept = Set::new();
    for (id, logit, probability) in order {
        sum += probability;
        margin = margin.min((sum - p).abs());
        kept.push((id, logit));
        if sum >= p {
            break;
        }
    }
    (kept, margin)
}

fn with_probabilities(set: Set) -> Vec<(u32, f64, f64)> {
    let probabilities = probabilities(&set);
    set.into_iter().zip(probabilities).map(|((id, logit), p)| (id, logit, p)).collect()
}

pub(super) fn top_p(set: Set, p: f64) -> (Set, f64) {
    reaching(with_probabilities(ranked(set)), p)
}

pub(super) fn min_p(set: Set, share: f64) -> (Set, f64) {
    let order = with_probabilities(ranked(set));
    let least = share * order[0].2;
    let margin = order.iter().skip(1).map(|entry| (entry.2 / least - 1.0).abs()).filter(|&m| m > 0.0 || share < 1.0);
    let margin = margin.fold(f64::INFINITY, f64::min);
    (order.into_iter().filter(|entry| entry.2 >= least).map(|entry| (entry.0, entry.1)).collect(), margin)
}

pub(super) fn typical(set: Set, p: f64) -> (Set, f64) {
    let mut order = with_probabilities(ranked(set));
    let entropy = entropy(&order.iter().map(|entry| entry.2).collect::<Vec<_>>());
    let distance = |entry: &(u32, f64, f64)| (-entry.2.ln() - entropy).abs();
    order.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    // Equal logits have the same order in any arithmetic; the distance of others must exceed rounding.
    let closest = order
        .windows(2)
        .filter(|pair| pair[0].1 != pair[1].1)
        .map(|pair| distance(&pair[1]) - distance(&pair[0]))
        .fold(f64::INFINITY, f64::min);
    let (kept, margin) = reaching(order, p);
    (kept, margin.min(closest))
}

pub(super) fn top_n_sigma(set: Set, n: f64) -> (Set, f64) {
    let count = set.len() as f64;
    let mean = set.iter().map(|entry| entry.1).sum::<f64>() / count;
    let sigma = (set.iter().map(|entry| (entry.1 - mean).powi(2)).sum::<f64>() / count).sqrt();
    let largest = set.iter().fold(f64::NEG_INFINITY, |best, entry| best.max(entry.1));
    let cut = largest - n * sigma;
    let margin = set.iter().map(|entry| (entry.1 - cut).abs()).filter(|_| sigma > 0.0).fold(f64::INFINITY, f64::min);
    (set.into_iter().filter(|entry| entry.1 >= cut).collect(), margin)
}

pub(super) fn xtc(set: Set, threshold: f64) -> (Set, f64) {
    let order = with_probabilities(ranked(set));
    let margin = order.iter().map(|entry| (entry.2 - threshold).abs()).fold(f64::INFINITY, f64::min);
    let num_top = order.iter().filter(|entry| entry.2 >= threshold).count();
    let kept = order.into_iter().skip(num_top.saturating_sub(1)).map(|entry| (entry.0, entry.1)).collect();
    (kept, margin)
}

/// Returns the winner of the race in which every candidate runs.
pub(super) fn winner(set: &[(u32, f64)], seed: u64, position: u32) -> u32 {
    let probabilities = probabilities(set);
    let times = set.iter().zip(probabilities).map(|(entry, p)| (-uniform(seed, position, entry.0).ln() / p, entry.0));
    times.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
}
