//! The digest of a row of logits: a device computes it, so that the row itself need not be copied to the host.
//!
//! The usual chains (temperature, top-k, top-p, min-p and the draw, in any order) need only the highest logits, the sum
//! of all weights, and the tokens that can win the race. A [`Digest`] holds just that. The same code runs the chain
//! over a digest and samples the same token as over the row. Where a digest holds too little,
//! [`Sampler::sample_digest`] returns `None` and the caller fetches the row.

use crate::candidates::{Candidate, Candidates, Workspace, allows, by_rank};
use crate::draw::{approximate_time, race};
use crate::exponential::exp_of_nonpositive;
use crate::logprobs::ModelView;
use crate::philox::token_word;
use crate::row_blocks;
use crate::sampler::ChainStep;
use crate::steps::Context;
use crate::{Choice, Error, History, Input, Sampler, StepKind};

/// A device reports every token whose time, computed in f32, is within this margin of the fastest. The f32 error is
/// below a hundredth of it.
pub const RACE_MARGIN: f32 = 1e-4;

/// The values that a sampler needs to know about a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DigestQuery {
    /// Temperature at which the weights are summed, beside 1.
    pub temperature: f64,
    /// Seed and position of the draw, if the draw is over the whole row.
    pub race: Option<(u64, u32)>,
    /// Rules by which a device can guess the token, if the draw is not over the whole row and the steps have the
    /// default order.
    pub shortlist: Option<Shortlist>,
}

/// The truncating steps in their default order, and the draw after them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shortlist {
    /// Seed and position.
    pub draw: (u64, u32),
    /// Keeps the `k` highest logits.
    pub k: u32,
    /// Of those, keeps the smallest set whose probabilities sum to `p`.
    pub p: f32,
    /// Of those, keeps tokens with at least `min_p` times the weight of the highest.
    pub min_p: f32,
}

/// Digest of a row without NaN whose highest logit is finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Digest<'a> {
    /// The most probable tokens and their logits.
    pub top: &'a [(u32, f32)],
    /// Whether `top` has every token whose logit is above -inf.
    pub has_all: bool,
    /// Sums of all weights e^((logit - largest) / T), at temperature 1 and at the query's; bit for bit those of this
    /// crate.
    pub totals: [f64; 2],
    /// Temperature of the query.
    pub temperature: f64,
    /// Tokens that may win the race of the query; empty if the query has none, or if there are too many.
    pub finalists: &'a [(u32, f32)],
}

impl Digest<'_> {
    /// Returns the sum of weights: at temperature 1 before the temperature step, at the query's after it.
    pub(crate) fn total(&self, temperature: f64) -> f64 {
        if temperature == 1.0 { self.totals[0] } else { self.totals[1] }
    }
}

/// A digest computed on the host: the reference for devices.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedDigest {
    pub top: Vec<(u32, f32)>,
    pub has_all: bool,
    pub totals: [f64; 2],
    pub temperature: f64,
    pub finalists: Vec<(u32, f32)>,
    /// Token that will most likely be sampled, computed in f32. A device may start the next step with it before the
    /// host has sampled.
    pub assumed: Option<u32>,
}

impl OwnedDigest {
    /// Returns the digest of a row with its `num_top` most probable tokens; `None` for a row with NaN or without a
    /// finite maximum.
    pub fn of(logits: &[f32], query: &DigestQuery, num_top: usize) -> Option<OwnedDigest> {
        let mut maxima = Vec::new();
        row_blocks::scan(logits, &mut maxima).ok()?;
        let largest = row_blocks::largest(&maxima);
        if !largest.is_finite() {
            return None;
        }
        let candidates = (0u32..).zip(logits.iter().copied()).filter(|entry| entry.1 > f32::NEG_INFINITY);
        let mut top: Vec<(u32, f32)> = candidates.clone().collect();
        top.sort_by(|&(id, logit), &(other, than)| {
            by_rank(&Candidate { id, logit }, &Candidate { id: other, logit: than })
        });
        let has_all = top.len() <= num_top;
        top.truncate(num_top);
        let total = |inverse: f32| row_blocks::mass(logits, &maxima, largest, inverse).total;
        let time = |seed: u64, position: u32, (id, logit): (u32, f32)| {
            approximate_time(token_word(seed, position, id), (largest - logit) * inverse(query.temperature))
        };
        let fastest = |runners: &mut dyn Iterator<Item = (u32, f32)>, (seed, position)| {
            let timed = runners.map(|entry| (time(seed, position, entry), entry.0));
            timed.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        };
        let totals = [total(1.0), total(inverse(query.temperature))];
        let mut finalists = Vec::new();
        let mut assumed = None;
        if let Some((seed, position)) = query.race {
            let winner = fastest(&mut candidates.clone(), (seed, position)).expect("the highest logit is a candidate");
            finalists = candidates.filter(|&entry| time(seed, position, entry) <= winner.0 + RACE_MARGIN).collect();
            assumed = Some(winner.1);
        } else if let Some(shortlist) = query.shortlist {
            let listed = shortlist.of(&top, has_all, totals[1], inverse(query.temperature));
            assumed = fastest(&mut listed.into_iter(), shortlist.draw).map(|winner| winner.1);
        }
        Some(OwnedDigest { top, has_all, totals, temperature: query.temperature, finalists, assumed })
    }

    pub fn as_digest(&self) -> Digest<'_> {
        let OwnedDigest { has_all, totals, temperature, .. } = *self;
        Digest { top: &self.top, has_all, totals, temperature, finalists: &self.finalists }
    }
}

impl Shortlist {
    /// Returns the tokens of `top` that stay; `total` is the sum of all weights.
    fn of(&self, top: &[(u32, f32)], has_all: bool, total: f64, inverse: f32) -> Vec<(u32, f32)> {
        let highest = &top[..top.len().min(self.k as usize)];
        let weight = |entry: &(u32, f32)| exp_of_nonpositive((entry.1 - top[0].1) * inverse);
        let is_whole = highest.len() == self.k as usize || has_all;
        let total = if is_whole { highest.iter().map(weight).sum() } else { total as f32 };
        let mut before = 0.0;
        let mut stays = |entry: &&(u32, f32)| {
            let weight = weight(entry);
            let stays = before == 0.0 || ((self.p >= 1.0 || before < self.p * total) && weight >= self.min_p);
            before += weight;
            stays
        };
        highest.iter().filter(|entry| stays(entry)).copied().collect()
    }
}

/// Returns 1 / T, by which logits are multiplied, rounded as the chain rounds it.
fn inverse(temperature: f64) -> f32 {
    (1.0 / temperature) as f32
}

/// A query while the steps of a chain add to it.
#[derive(Debug)]
pub(crate) struct DigestPlan {
    temperature: f64,
    pub(crate) shortlist: Shortlist,
}

impl DigestPlan {
    pub(crate) fn divide(&mut self, temperature: f64) {
        if inverse(temperature).is_finite() {
            self.temperature = temperature;
        } else {
            // Only the highest logit stays, whatever comes before or after.
            self.shortlist.k = 1;
        }
    }
}

impl Sampler {
    /// Returns the query of a row for the token at `position`; `None` where a step of the chain needs the whole row.
    pub fn query(&self, position: u32) -> Option<DigestQuery> {
        let draw = (self.seed, position);
        let shortlist = Shortlist { draw, k: u32::MAX, p: 1.0, min_p: 0.0 };
        let mut plan = DigestPlan { temperature: 1.0, shortlist };
        let (mut last, mut is_usual, mut is_truncated) = (StepKind::Mask, true, false);
        for ChainStep { kind, step } in &self.steps {
            if matches!(kind, StepKind::Mask | StepKind::Draw) {
                continue;
            }
            if !step.plan_digest(&mut plan) {
                return None;
            }
            is_truncated |= *kind != StepKind::Temperature || plan.shortlist.k == 1;
            is_usual &= last.index() < kind.index();
            last = *kind;
        }
        let DigestPlan { temperature, shortlist } = plan;
        let has_shortlist = is_truncated && (is_usual || shortlist.k == 1);
        Some(DigestQuery {
            temperature,
            race: (!is_truncated).then_some(draw),
            shortlist: has_shortlist.then_some(shortlist),
        })
    }

    /// Returns the query of a row whose tokens a mask will exclude; `None` where a digest cannot be enough: the sum of
    /// the weights that stay is not in it.
    pub fn masked_query(&self, position: u32) -> Option<DigestQuery> {
        self.query(position).filter(|query| match query.shortlist {
            Some(Shortlist { k, p, .. }) => k < u32::MAX || p >= 1.0,
            None => query.race.is_some(),
        })
    }

    /// Samples the token at `position` from the digest of [`Sampler::query`]: the same token as from the row with the
    /// same mask (see [`Input::mask`]). Returns `None` where the digest holds too little.
    pub fn sample_digest(
        &self,
        digest: &Digest<'_>,
        position: u32,
        mask: Option<&[u32]>,
        space: &mut Workspace,
    ) -> Result<Option<Choice>, Error> {
        let is_allowed = |token: u32| mask.is_none_or(|words| allows(words, token));
        if !digest.top.iter().any(|&(token, _)| is_allowed(token)) {
            return Ok(None);
        }
        let history = History::new(&[], None);
        // The steps of a chain with a query look only at the candidates.
        let input = Input { logits: &[], history: &history, position, mask };
        let mut set = Candidates::of_digest(digest, space);
        let view = self.logprobs.map(|num_top| ModelView::new(&mut set, num_top));
        let context = Context { input: &input, seed: self.seed, mu: 0.0 };
        for ChainStep { step, .. } in &self.steps {
            step.apply(&mut set, &context)?;
        }
        if set.lacks_tokens() || set.finalists().is_some_and(<[_]>::is_empty) {
            return Ok(None);
        }
        // If a token that is not allowed wins among the finalists, the fastest of the others may be no finalist.
        let outcome = race(&set, self.seed, position, false).filter(|outcome| is_allowed(outcome.winner.id));
        Ok(outcome.map(|outcome| self.choice(outcome.winner.id, outcome.winner.logit, view.as_ref())))
    }
}
