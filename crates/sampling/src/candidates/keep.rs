//! Dropping candidates: the operations of the steps that truncate.

use std::cmp::Ordering;

use super::{Candidate, Candidates, Workspace, by_rank};
use crate::row_blocks::BLOCK;

/// Maximum length of a list that is sorted instead of partitioned.
const SHORT: usize = 64;

impl Candidates<'_> {
    /// Keeps the logits at or above `cut`.
    pub(crate) fn keep_from(&mut self, cut: f32) {
        self.leave_digest(self.space.list.iter().all(|candidate| candidate.logit >= cut));
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
            // Fewer than k blocks reach above the cut, so few logits are above it. Of those equal to it, the first k
            // are enough.
            let mut num_at_cut = 0;
            self.make_list(
                |logit| {
                    num_at_cut += usize::from(logit == cut);
                    logit > cut || (logit == cut && num_at_cut <= k && cut > f32::NEG_INFINITY)
                },
                cut,
            );
        }
        self.leave_digest(self.space.list.len() < k);
        let list = &mut self.space.list;
        if list.len() > k && k > 0 {
            list.select_nth_unstable_by(k - 1, by_rank);
            list.truncate(k);
        }
    }

    /// Keeps one candidate.
    pub(crate) fn keep_only(&mut self, candidate: Candidate) {
        self.leave_digest(false);
        self.space.list.clear();
        self.space.list.push(candidate);
        self.is_list = true;
    }

    /// Keeps the shortest prefix of the list, in the given order, whose weight reaches `target`; all candidates if none
    /// does.
    ///
    /// Partitions like quickselect: a part of the list that lies wholly inside or outside the prefix is summed but not
    /// sorted.
    pub(crate) fn keep_until(&mut self, target: u64, order: impl Fn(&Candidate, &Candidate) -> Ordering) {
        let weigh = self.weigher();
        let weight = |part: &[Candidate]| part.iter().map(|candidate| weigh(candidate.logit)).sum::<u64>();
        let list = &mut self.space.list;
        // The prefix ends between `known` and `end`; the first `known` candidates weigh `sum`.
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
                self.leave_digest(false);
                return;
            }
        }
        list.truncate(end.max(1));
        self.leave_digest(sum < target);
    }

    /// Returns the `n` most probable candidates by rank, without changing the set.
    pub(crate) fn highest(&mut self, n: usize) -> Vec<Candidate> {
        let (was_list, digest, kept) = (self.is_list, self.digest, self.space.list.clone());
        self.keep_highest(n);
        (self.is_list, self.digest) = (was_list, digest);
        let mut highest = std::mem::replace(&mut self.space.list, kept);
        highest.sort_unstable_by(by_rank);
        highest
    }

    /// Turns a row into the list of logits that `keep` accepts. It must accept none below `cut`.
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

    /// Returns the k-th largest block maximum, or -inf with fewer than k blocks. At least k logits are at or above it,
    /// and the logits above it lie in fewer than k blocks.
    fn kth_largest_maximum(&mut self, k: usize) -> f32 {
        let Workspace { maxima, selection, .. } = &mut *self.space;
        if k == 0 || k > maxima.len() {
            return f32::NEG_INFINITY;
        }
        selection.clear();
        selection.extend_from_slice(maxima);
        *selection.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    }

    /// Makes the list the whole set. `needs_more` says that tokens below those of the digest may belong to it.
    fn leave_digest(&mut self, needs_more: bool) {
        if needs_more && self.digest.is_some_and(|digest| !digest.has_all) {
            self.lacks_tokens.set(true);
        }
        self.digest = None;
    }
}
