//! The candidates: the tokens that no step has dropped yet, in one of two forms.
//!
//! At first the set is the whole row of logits with the largest of each block (`row_blocks.rs`). The first step that
//! drops most of the row turns the set into a list. Logits are copied only when a step changes one. Temperature is a
//! number beside the logits, not a pass over them: it does not change their order, and steps that need probabilities
//! divide as they go.
//!
//! The order of the list has no meaning. Weights are summed as integers, so the order of adding cannot change a sum.
//! `keep.rs` holds the operations that drop candidates, `edit.rs` those that change logits.

mod edit;
mod keep;

pub(crate) use edit::allows;

use std::cell::Cell;
use std::cmp::Ordering;

use crate::Error;
use crate::digest::Digest;
use crate::exponential::{LEAST_EXPONENT, exp_of_nonpositive};
use crate::probabilities::Probabilities;
use crate::row_blocks::{self, BLOCK, Mass, UNITS, units};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) id: u32,
    /// Above -inf.
    pub(crate) logit: f32,
}

/// Compares by rank: from the most probable down, ties to the lower id.
pub(crate) fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Memory for sampling one token at a time, as large as the vocabulary. Reused from token to token; one per thread is
/// enough.
#[derive(Debug, Clone, Default)]
pub struct Workspace {
    edited: Vec<f32>,
    maxima: Vec<f32>,
    list: Vec<Candidate>,
    /// Blocks whose largest logit has to be found again.
    stale: Vec<usize>,
    /// Whether each block is in `stale`.
    is_stale: Vec<bool>,
    selection: Vec<f32>,
    /// Lengths of repeats, for DRY.
    pub(crate) repeats: Vec<u32>,
}

impl Workspace {
    pub fn new() -> Self {
        Workspace::default()
    }
}

/// Candidates for one token.
#[derive(Debug)]
pub(crate) struct Candidates<'a> {
    raw: &'a [f32],
    space: &'a mut Workspace,
    is_edited: bool,
    is_list: bool,
    /// Temperature by which the logits are still to be divided; above 0.
    temperature: f64,
    /// Digest of the row while the list holds only the row's most probable tokens.
    digest: Option<&'a Digest<'a>>,
    /// Whether a mask dropped tokens of the digest, so that its sums are not those of the set.
    is_masked: bool,
    /// Whether a step needed more of the row than the digest holds. The set has no meaning then.
    lacks_tokens: Cell<bool>,
}

impl<'a> Candidates<'a> {
    /// Starts with every token of the row. NaN is an error.
    pub(crate) fn new(raw: &'a [f32], space: &'a mut Workspace) -> Result<Self, Error> {
        row_blocks::scan(raw, &mut space.maxima)?;
        space.list.clear();
        Ok(Candidates {
            raw,
            space,
            is_edited: false,
            is_list: false,
            temperature: 1.0,
            digest: None,
            is_masked: false,
            lacks_tokens: Cell::new(false),
        })
    }

    /// Starts with a row of which only the digest is known.
    pub(crate) fn of_digest(digest: &'a Digest<'a>, space: &'a mut Workspace) -> Self {
        space.list.clear();
        space.list.extend(digest.top.iter().map(|&(id, logit)| Candidate { id, logit }));
        Candidates {
            raw: &[],
            space,
            is_edited: false,
            is_list: true,
            temperature: 1.0,
            digest: Some(digest),
            is_masked: false,
            lacks_tokens: Cell::new(false),
        }
    }

    /// Whether a step needed more of the row than the digest holds.
    pub(crate) fn lacks_tokens(&self) -> bool {
        self.lacks_tokens.get()
    }

    /// Tokens of which one wins the race over the whole row; only while the row is known by its digest.
    pub(crate) fn finalists(&self) -> Option<&'a [(u32, f32)]> {
        self.digest.map(|digest| digest.finalists)
    }

    pub(crate) fn temperature(&self) -> f64 {
        self.temperature
    }

    fn inverse_temperature(&self) -> f32 {
        (1.0 / self.temperature) as f32
    }

    /// Returns the logits and the largest of each block, while the set is a row.
    pub(crate) fn row(&self) -> Option<(&[f32], &[f32])> {
        (!self.is_list).then(|| (self.logits(), self.space.maxima.as_slice()))
    }

    /// Returns the list; empty while the set is a row.
    pub(crate) fn list(&self) -> &[Candidate] {
        &self.space.list
    }

    pub(crate) fn repeats(&mut self) -> &mut Vec<u32> {
        &mut self.space.repeats
    }

    fn logits(&self) -> &[f32] {
        if self.is_edited { &self.space.edited } else { self.raw }
    }

    /// Returns the highest logit, before division by the temperature; -inf for an empty set.
    pub(crate) fn largest(&self) -> f32 {
        if self.is_list {
            self.space.list.iter().fold(f32::NEG_INFINITY, |best, candidate| best.max(candidate.logit))
        } else {
            row_blocks::largest(&self.space.maxima)
        }
    }

    /// Returns the most probable candidate, ties to the lowest id; `None` for an empty set.
    pub(crate) fn best(&self) -> Option<Candidate> {
        if self.is_list {
            return self.space.list.iter().copied().min_by(by_rank);
        }
        let largest = self.largest();
        if largest == f32::NEG_INFINITY {
            return None;
        }
        let block = self.space.maxima.iter().position(|&highest| highest == largest)?;
        let offset = self.block(block).iter().position(|&logit| logit == largest)?;
        Some(Candidate { id: (block * BLOCK + offset) as u32, logit: largest })
    }

    fn block(&self, block: usize) -> &[f32] {
        let logits = self.logits();
        &logits[block * BLOCK..logits.len().min((block + 1) * BLOCK)]
    }

    pub(crate) fn count(&self) -> usize {
        if self.is_list { self.space.list.len() } else { row_blocks::moments(self.logits(), 0.0).0 }
    }

    /// Returns the probabilities among the current candidates.
    pub(crate) fn probabilities(&self) -> Probabilities {
        let (largest, inverse) = (self.largest(), self.inverse_temperature());
        let total = match largest {
            f32::INFINITY => self.from(f32::INFINITY).len() as f64,
            f32::NEG_INFINITY => 0.0,
            _ => self.mass().total,
        };
        Probabilities { largest, inverse, total }
    }

    /// Returns the totals over the set. Its largest logit must be finite.
    pub(crate) fn mass(&self) -> Mass {
        let (largest, inverse) = (self.largest(), self.inverse_temperature());
        match (self.row(), self.digest) {
            (Some((logits, maxima)), _) => row_blocks::mass(logits, maxima, largest, inverse),
            (None, Some(digest)) => {
                self.lacks_tokens.set(self.lacks_tokens.get() || self.is_masked);
                Mass { total: digest.total(self.temperature), handicap: f64::NAN }
            }
            (None, None) => list_mass(&self.space.list, largest, inverse),
        }
    }

    /// Returns a function from a logit to its weight e^-h in units.
    pub(crate) fn weigher(&self) -> impl Fn(f32) -> u64 + use<> {
        let (largest, inverse) = (self.largest(), self.inverse_temperature());
        move |logit| units(exp_of_nonpositive((logit - largest) * inverse))
    }

    /// Returns the weight, in units, of the candidates at or above `cut`.
    pub(crate) fn weight_from(&self, cut: f32) -> u64 {
        let weigh = self.weigher();
        let mut sum = 0;
        self.visit_from(cut, |candidate| sum += weigh(candidate.logit));
        sum
    }

    /// Returns the candidates at or above `cut`: by ascending id for a row, else in the order of the list.
    pub(crate) fn from(&self, cut: f32) -> Vec<Candidate> {
        let mut found = Vec::new();
        self.visit_from(cut, |candidate| found.push(candidate));
        found
    }

    fn visit_from(&self, cut: f32, mut visit: impl FnMut(Candidate)) {
        if self.is_list {
            self.space.list.iter().filter(|candidate| candidate.logit >= cut).copied().for_each(visit);
            return;
        }
        for (block, &highest) in self.space.maxima.iter().enumerate() {
            if highest < cut {
                continue;
            }
            let start = (block * BLOCK) as u32;
            for (id, &logit) in (start..).zip(self.block(block)) {
                if logit >= cut && logit > f32::NEG_INFINITY {
                    visit(Candidate { id, logit });
                }
            }
        }
    }

    /// Reorders the list, for tests that nothing depends on its order.
    #[cfg(test)]
    pub(crate) fn shuffle(&mut self, seed: u64) {
        self.space.list.sort_by_key(|candidate| crate::philox::token_word(seed, 0, candidate.id));
    }

    /// Returns the least logit whose handicap h is at most `reach`.
    pub(crate) fn cut_at(&self, reach: f64) -> f32 {
        let cut = f64::from(self.largest()) - reach * self.temperature;
        let rounded = cut as f32;
        if f64::from(rounded) < cut { rounded.next_up() } else { rounded }
    }
}

/// Returns the mass of a list.
fn list_mass(list: &[Candidate], largest: f32, inverse_temperature: f32) -> Mass {
    let (mut total, mut handicap) = (0u64, 0u64);
    for candidate in list {
        let x = (candidate.logit - largest) * inverse_temperature;
        let weight = exp_of_nonpositive(x);
        total += units(weight);
        handicap += units(weight * -x.max(LEAST_EXPONENT));
    }
    Mass::of_units(total, handicap)
}

/// Returns the least sum of weights, in units, that reaches the share `p` of a mass.
pub(crate) fn units_of_share(mass: &Mass, p: f32) -> u64 {
    libm::ceil(f64::from(p) * mass.total * UNITS) as u64
}
