//! The set of tokens that are still in play, in one of two forms.
//!
//! At first it is the whole row of logits with the largest of each block (`row_blocks.rs`). The first step that drops most of it turns it
//! into a list. Logits are copied only when a step changes one. Temperature is a number beside the logits, not a pass over them: it
//! changes no order, and the steps that need probabilities divide as they go.
//!
//! The order of the list has no meaning: weights are summed as whole numbers, so no order of adding can change a sum.

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

/// Lists up to this length are sorted outright.
const SHORT: usize = 64;

/// From the most probable down; ties go to the lower id.
pub(crate) fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Memory for one choice at a time, as large as the vocabulary, reused from token to token. One a thread is enough.
#[derive(Debug, Clone, Default)]
pub struct Workspace {
    edited: Vec<f32>,
    maxima: Vec<f32>,
    list: Vec<Candidate>,
    /// Blocks whose largest logit has to be found again, and which of them are noted already.
    stale: Vec<usize>,
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

/// The candidates of one choice.
#[derive(Debug)]
pub(crate) struct Candidates<'a> {
    raw: &'a [f32],
    space: &'a mut Workspace,
    is_edited: bool,
    is_list: bool,
    /// By which the logits are yet to be divided; above 0.
    temperature: f64,
    /// Present while the list is but the head of a row that is known in brief.
    brief: Option<&'a Digest<'a>>,
    /// A step needed more of the row than the brief tells: what is left means nothing.
    is_short: bool,
}

impl<'a> Candidates<'a> {
    /// Every token of the row. NaN is an error.
    pub(crate) fn new(raw: &'a [f32], space: &'a mut Workspace) -> Result<Self, Error> {
        row_blocks::scan(raw, &mut space.maxima)?;
        space.list.clear();
        Ok(Candidates { raw, space, is_edited: false, is_list: false, temperature: 1.0, brief: None, is_short: false })
    }

    /// A row of which only the digest is known.
    pub(crate) fn in_brief(digest: &'a Digest<'a>, space: &'a mut Workspace) -> Self {
        space.list.clear();
        space.list.extend(digest.top.iter().map(|&(id, logit)| Candidate { id, logit }));
        Candidates {
            raw: &[],
            space,
            is_edited: false,
            is_list: true,
            temperature: 1.0,
            brief: Some(digest),
            is_short: false,
        }
    }

    pub(crate) fn is_short(&self) -> bool {
        self.is_short
    }

    /// From here on the list is the whole set, unless it `lacks` somebody.
    fn leave_brief(&mut self, lacks: bool) {
        self.is_short |= lacks && self.brief.is_some_and(|digest| !digest.has_all);
        self.brief = None;
    }

    /// Those who may win a race of a row that is known in brief.
    pub(crate) fn finalists(&self) -> Option<&'a [(u32, f32)]> {
        self.brief.map(|digest| digest.finalists)
    }

    pub(crate) fn temperature(&self) -> f64 {
        self.temperature
    }

    fn inverse_temperature(&self) -> f32 {
        (1.0 / self.temperature) as f32
    }

    /// The whole row, where no list has been made of it.
    pub(crate) fn row(&self) -> Option<(&[f32], &[f32])> {
        (!self.is_list).then(|| (self.logits(), self.space.maxima.as_slice()))
    }

    /// The list, empty where there is none yet.
    pub(crate) fn list(&self) -> &[Candidate] {
        &self.space.list
    }

    pub(crate) fn repeats(&mut self) -> &mut Vec<u32> {
        &mut self.space.repeats
    }

    fn logits(&self) -> &[f32] {
        if self.is_edited { &self.space.edited } else { self.raw }
    }

    /// The highest logit, before division by the temperature; -inf when nothing is left.
    pub(crate) fn largest(&self) -> f32 {
        if self.is_list {
            self.space.list.iter().fold(f32::NEG_INFINITY, |best, candidate| best.max(candidate.logit))
        } else {
            row_blocks::largest(&self.space.maxima)
        }
    }

    /// The most probable candidate; ties go to the lowest id. `None` when nothing is left.
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

    /// Probabilities over the set as it is now.
    pub(crate) fn probabilities(&self) -> Probabilities {
        let (largest, inverse) = (self.largest(), self.inverse_temperature());
        let total = match largest {
            f32::INFINITY => self.from(f32::INFINITY).len() as f64,
            f32::NEG_INFINITY => 0.0,
            _ => self.mass().total,
        };
        Probabilities { largest, inverse, total }
    }

    /// Totals over the set, whose largest logit is finite.
    pub(crate) fn mass(&self) -> Mass {
        let (largest, inverse) = (self.largest(), self.inverse_temperature());
        match (self.row(), self.brief) {
            (Some((logits, maxima)), _) => row_blocks::mass(logits, maxima, largest, inverse),
            (None, Some(digest)) => Mass { total: digest.total(self.temperature), handicap: f64::NAN },
            (None, None) => list_mass(&self.space.list, largest, inverse),
        }
    }

    /// A function from a logit to its weight e^-h in units.
    pub(crate) fn weigher(&self) -> impl Fn(f32) -> u64 + use<> {
        let (largest, inverse) = (self.largest(), self.inverse_temperature());
        move |logit| units(exp_of_nonpositive((logit - largest) * inverse))
    }

    /// The weight of those at or above `cut`, in units.
    pub(crate) fn weight_from(&self, cut: f32) -> u64 {
        let weigh = self.weigher();
        let mut sum = 0;
        self.visit_from(cut, |candidate| sum += weigh(candidate.logit));
        sum
    }

    /// Those at or above `cut`, by ascending id or in the order of the list.
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

    /// Divides by a temperature above 0.
    pub(crate) fn divide(&mut self, temperature: f64) {
        self.temperature *= temperature;
    }

    /// Changes the logits of some tokens, each listed once. Tokens out of play stay so; a change to -inf takes a token out.
    pub(crate) fn edit<T: Copy>(&mut self, edits: impl Iterator<Item = (u32, T)>, change: impl Fn(f32, T) -> f32) {
        let mut edits = edits.peekable();
        if edits.peek().is_none() {
            return;
        }
        self.apply_temperature();
        if self.is_list {
            let mut edits: Vec<(u32, T)> = edits.collect();
            edits.sort_unstable_by_key(|edit| edit.0);
            for candidate in &mut self.space.list {
                if let Ok(index) = edits.binary_search_by_key(&candidate.id, |edit| edit.0) {
                    candidate.logit = change(candidate.logit, edits[index].1);
                }
            }
            self.space.list.retain(|candidate| candidate.logit > f32::NEG_INFINITY);
            return;
        }
        self.copy_row();
        let Workspace { edited, stale, is_stale, maxima, .. } = &mut *self.space;
        is_stale.clear();
        is_stale.resize(maxima.len(), false);
        for (id, by) in edits {
            // A history may hold ids that the model has no logit for.
            let Some(logit) = edited.get_mut(id as usize) else { continue };
            if *logit > f32::NEG_INFINITY {
                *logit = change(*logit, by);
                let block = id as usize / BLOCK;
                if !is_stale[block] {
                    is_stale[block] = true;
                    stale.push(block);
                }
            }
        }
        for block in stale.drain(..) {
            let end = edited.len().min((block + 1) * BLOCK);
            maxima[block] = row_blocks::largest(&edited[block * BLOCK..end]);
        }
    }

    /// Takes out every token whose bit is 0: token t is bit t % 32 of word t / 32. Only while the set is a row.
    pub(crate) fn mask(&mut self, words: &[u32]) {
        self.copy_row();
        let Workspace { edited, maxima, .. } = &mut *self.space;
        for ((block, words), highest) in edited.chunks_mut(BLOCK).zip(words.chunks(BLOCK / 32)).zip(maxima) {
            if words.iter().all(|&word| word == u32::MAX) {
                continue;
            }
            for (logits, &word) in block.chunks_mut(32).zip(words) {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    *logit = if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                }
            }
            *highest = row_blocks::largest(block);
        }
    }

    /// Takes some tokens out, given by ascending id.
    pub(crate) fn remove(&mut self, ids: &[u32]) {
        if self.is_list {
            self.space.list.retain(|candidate| ids.binary_search(&candidate.id).is_err());
        } else {
            let temperature = std::mem::replace(&mut self.temperature, 1.0);
            self.edit(ids.iter().map(|&id| (id, ())), |_, ()| f32::NEG_INFINITY);
            self.temperature = temperature;
        }
    }

    /// Keeps the logits at or above `cut`.
    pub(crate) fn keep_from(&mut self, cut: f32) {
        self.leave_brief(self.space.list.iter().all(|candidate| candidate.logit >= cut));
        if self.is_list {
            self.space.list.retain(|candidate| candidate.logit >= cut);
        } else {
            self.make_list(|logit| logit >= cut && logit > f32::NEG_INFINITY, cut);
        }
    }

    /// Keeps the k highest, ties to the lower ids.
    pub(crate) fn keep_highest(&mut self, k: usize) {
        if !self.is_list {
            let cut = self.kth_largest_maximum(k);
            // Fewer than k blocks reach above the cut, so there are few above it; of those at it, the first k are enough.
            let mut num_at_cut = 0;
            self.make_list(
                |logit| {
                    num_at_cut += usize::from(logit == cut);
                    logit > cut || (logit == cut && num_at_cut <= k && cut > f32::NEG_INFINITY)
                },
                cut,
            );
        }
        self.leave_brief(self.space.list.len() < k);
        let list = &mut self.space.list;
        if list.len() > k && k > 0 {
            list.select_nth_unstable_by(k - 1, by_rank);
            list.truncate(k);
        }
    }

    /// Keeps one candidate.
    pub(crate) fn keep_only(&mut self, candidate: Candidate) {
        self.leave_brief(false);
        self.space.list.clear();
        self.space.list.push(candidate);
        self.is_list = true;
    }

    /// Keeps the shortest beginning of the list, in the given order, whose weight reaches `target`; everyone if none does.
    ///
    /// The order is found only where it matters: a stretch that is wholly in or wholly out is weighed but never sorted.
    pub(crate) fn keep_until(&mut self, target: u64, order: impl Fn(&Candidate, &Candidate) -> Ordering) {
        let weigh = self.weigher();
        let weight = |stretch: &[Candidate]| stretch.iter().map(|candidate| weigh(candidate.logit)).sum::<u64>();
        let list = &mut self.space.list;
        // Of the list in order, the first `known` are before the end that is sought, with the weight `sum`; `end` is after it.
        let (mut known, mut sum, mut end) = (0, 0, list.len());
        let mut guess = SHORT;
        while end - known > SHORT {
            let middle = (known + end) / 2;
            let split = middle.min(known + guess);
            list[known..end].select_nth_unstable_by(split - known, &order);
            let below = weight(&list[known..split]);
            if sum + below >= target {
                end = split;
            } else {
                (known, sum) = (split, sum + below);
                guess *= 16;
            }
        }
        list[known..end].sort_unstable_by(&order);
        for index in known..end {
            sum += weigh(list[index].logit);
            if sum >= target {
                list.truncate(index + 1);
                self.leave_brief(false);
                return;
            }
        }
        list.truncate(end.max(1));
        self.leave_brief(sum < target);
    }

    /// The `n` most probable, ranked, with the set left as it is.
    pub(crate) fn highest(&mut self, n: usize) -> Vec<Candidate> {
        let (was_list, brief, kept) = (self.is_list, self.brief, self.space.list.clone());
        self.keep_highest(n);
        (self.is_list, self.brief) = (was_list, brief);
        let mut highest = std::mem::replace(&mut self.space.list, kept);
        highest.sort_unstable_by(by_rank);
        highest
    }

    /// Another order of the list, for tests of what must not depend on it.
    #[cfg(test)]
    pub(crate) fn shuffle(&mut self, seed: u64) {
        self.space.list.sort_by_key(|candidate| crate::philox::token_word(seed, 0, candidate.id));
    }

    /// Where the model itself rules all but some tokens out with +inf, those win alone and alike. Nothing left is an error.
    pub(crate) fn settle_infinities(&mut self) -> Result<(), Error> {
        let largest = self.largest();
        if largest == f32::NEG_INFINITY {
            return Err(Error::NothingLeft);
        }
        if largest == f32::INFINITY {
            self.keep_from(f32::INFINITY);
            for candidate in &mut self.space.list {
                candidate.logit = 0.0;
            }
        }
        Ok(())
    }

    /// The least logit whose handicap is at most `reach`.
    pub(crate) fn cut_at(&self, reach: f64) -> f32 {
        let cut = f64::from(self.largest()) - reach * self.temperature;
        let rounded = cut as f32;
        if f64::from(rounded) < cut { rounded.next_up() } else { rounded }
    }

    /// Makes a list of those whom `keep` keeps; no logit below `cut` is one of them.
    fn make_list(&mut self, mut keep: impl FnMut(f32) -> bool, cut: f32) {
        let mut list = std::mem::take(&mut self.space.list);
        list.clear();
        for (block, &highest) in self.space.maxima.iter().enumerate() {
            if highest < cut {
                continue;
            }
            let start = (block * BLOCK) as u32;
            for (id, &logit) in (start..).zip(self.block(block)) {
                if keep(logit) {
                    list.push(Candidate { id, logit });
                }
            }
        }
        self.space.list = list;
        self.is_list = true;
    }

    /// At least k logits are at or above it, and those above it lie in fewer than k blocks; -inf when there are not k blocks.
    fn kth_largest_maximum(&mut self, k: usize) -> f32 {
        let Workspace { maxima, selection, .. } = &mut *self.space;
        if k == 0 || k > maxima.len() {
            return f32::NEG_INFINITY;
        }
        selection.clear();
        selection.extend_from_slice(maxima);
        *selection.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    }

    /// Penalties that stand after the temperature act on divided logits.
    fn apply_temperature(&mut self) {
        if self.temperature == 1.0 {
            return;
        }
        let temperature = std::mem::replace(&mut self.temperature, 1.0);
        let divide = |logit: f32| {
            let divided = (f64::from(logit) / temperature) as f32;
            if logit > f32::NEG_INFINITY { divided.clamp(f32::MIN, f32::MAX) } else { logit }
        };
        if self.is_list {
            self.space.list.iter_mut().for_each(|candidate| candidate.logit = divide(candidate.logit));
        } else {
            self.copy_row();
            self.space.edited.iter_mut().for_each(|logit| *logit = divide(*logit));
            self.space.maxima.iter_mut().for_each(|highest| *highest = divide(*highest));
        }
    }

    fn copy_row(&mut self) {
        if !self.is_edited {
            self.space.edited.clear();
            self.space.edited.extend_from_slice(self.raw);
            self.is_edited = true;
        }
    }
}

/// The mass of a list, whatever its order.
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

/// The least sum of weights, in units, that reaches the share `p` of a mass.
pub(crate) fn units_of_share(mass: &Mass, p: f32) -> u64 {
    libm::ceil(f64::from(p) * mass.total * UNITS) as u64
}
