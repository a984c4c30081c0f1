//! Random prompts that share prefixes, so that the prefix cache is used.

use pellucid_engine::{Request, Scope, TenantId};
use pellucid_sampling::{SamplingParams, uniform};

use super::ProveArgs;

/// Number of prompts that share one prefix.
const FAMILY: u32 = 8;

pub(super) fn random(args: &ProveArgs, vocab_size: usize) -> Vec<Request> {
    (0..args.prompts).map(|i| one(args, i, vocab_size)).collect()
}

fn one(args: &ProveArgs, i: u32, vocab_size: usize) -> Request {
    // Random numbers are keyed by (prompt, purpose). Families count down from the maximum, so that no prompt has the
    // same key.
    let draw = |owner: u32, purpose: u32| uniform(args.seed, owner, purpose);
    let family = u32::MAX - i / FAMILY;
    // Lengths are uniform on a logarithmic scale, so that short prompts are as common as long ones.
    let len = (f64::from(args.longest).powf(draw(i, 0)) as u32).clamp(1, args.longest);
    let shared = (draw(family, 0) * f64::from(args.longest)) as u32;
    let token = |at: u32| {
        let owner = if at < shared { family } else { i };
        (draw(owner, 1 + at) * vocab_size as f64) as u32 % vocab_size as u32
    };
    let temperature = if i.is_multiple_of(2) { 0.0 } else { 0.9 };
    let sampling =
        SamplingParams { temperature, seed: args.seed ^ u64::from(i), logprobs: Some(3), ..SamplingParams::default() };
    let mut request = Request::new((0..len).map(token).collect(), sampling);
    request.max_tokens = Some(args.reply as usize);
    request
}

/// Returns the request with a cache scope of its own, in which it finds nothing.
pub(super) fn apart(request: &Request, i: usize) -> Request {
    Request { scope: Scope::salted(TenantId(0), &i.to_string()), ..request.clone() }
}
