//! Random prompts that share prefixes, so that the prefix cache is used.

use pellucid_engine::{Request, Scope, TenantId};
use pellucid_sampling::{SamplingParams, uniform};

use super::Plan;

/// Number of prompts of a family: they share one prefix.
const FAMILY: u32 = 8;

pub(super) fn random(plan: Plan, vocab_size: usize) -> Vec<Request> {
    (0..plan.prompts).map(|i| request(plan, i, vocab_size)).collect()
}

fn request(plan: Plan, i: u32, vocab_size: usize) -> Request {
    // A random number is keyed by an owner, which is a prompt or a family of prompts, and a purpose. Families are
    // numbered from the maximum down, so that no prompt has the same number.
    let draw = |owner: u32, purpose: u32| uniform(plan.seed, owner, purpose);
    let family = u32::MAX - i / FAMILY;
    // Lengths are uniform on a logarithmic scale, so that short prompts are as common as long ones.
    let len = (f64::from(plan.longest).powf(draw(i, 0)) as u32).clamp(1, plan.longest);
    let shared = (draw(family, 0) * f64::from(plan.longest)) as u32;
    let token = |at: u32| {
        let owner = if at < shared { family } else { i };
        (draw(owner, 1 + at) * vocab_size as f64) as u32 % vocab_size as u32
    };
    let temperature = if i.is_multiple_of(2) { 0.0 } else { 0.9 };
    let sampling =
        SamplingParams { temperature, seed: plan.seed ^ u64::from(i), logprobs: Some(3), ..SamplingParams::default() };
    let prompt = (0..len).map(token).collect();
    Request { max_tokens: Some(plan.reply as usize), ..Request::new(prompt, sampling) }
}

/// Returns the request in its own cache scope, so that it finds no cached prefix.
pub(super) fn in_own_scope(request: &Request, i: usize) -> Request {
    Request { scope: Scope::salted(TenantId(0), &i.to_string()), ..request.clone() }
}
