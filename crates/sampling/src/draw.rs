//! The draw: an exponential race, which is the Gumbel-max trick in another scale.
//!
//! Every candidate i gets the time E_i / p_i with E_i = -ln(u_i), where u_i is keyed by seed, position and token
//! (`philox.rs`), and the shortest time wins. The winner is distributed exactly as p. The race needs no sort and no
//! sum, and does not depend on the order of the candidates.
//!
//! Times are compared as logarithms, ln(-ln u) + h with the handicap h = (largest - logit) / T, which neither overflow
//! nor underflow; the sum of all weights is the same for all candidates and left out. If two times are equal to the
//! last bit, the larger random word wins, then the lower id.
//!
//! Most candidates need no random number: a candidate that would lose even with the best possible one is skipped. The
//! others get their numbers in batches, and a logarithm is computed only for a number that could win with the highest
//! logit of the batch. Both rules skip only candidates that cannot win, so the winner is that of the full race.
//!
//! The random numbers cost most: 4 to 5 ns each with 128-bit vectors. In the benchmark's realistic row, about 36 % of
//! the vocabulary needs one at temperature 1, and 5 % at 0.8. In a flat row every token needs one; only wider vectors
//! would help there.

use crate::candidates::{Candidate, Candidates};
use crate::exponential::exp_of_nonpositive;
use crate::philox::{LANES, TokenWords, token_word, unit};
use crate::row_blocks::{BLOCK, largest, num_between};

/// Lower bound of ln(-ln u): the largest u is 1 - 2^-25, which gives -17.32868.
const FASTEST_START: f64 = -17.3287;
/// Distance below the highest logit that the first round covers, in nats.
const NEAR: f64 = 5.0;

/// A candidate with its random word and its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Runner {
    pub(crate) id: u32,
    pub(crate) logit: f32,
    pub(crate) word: u32,
    /// Logarithm of the time, ln(E / e^-h).
    pub(crate) log_time: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) winner: Runner,
    /// Present only if it was requested.
    pub(crate) second: Option<Runner>,
}

/// Returns the candidate with the shortest time, of a set whose logits are finite; `None` if the set is empty.
/// `with_second` also finds the second shortest.
pub(crate) fn race(set: &Candidates<'_>, seed: u64, position: u32, with_second: bool) -> Option<Outcome> {
    let best = set.best()?;
    let mut race = Race::new(best, set.temperature(), seed, position, with_second);
    match (set.row(), set.finalists()) {
        (Some((logits, maxima)), _) => race.run_row(logits, maxima),
        (None, Some(finalists)) => finalists.iter().for_each(|&(id, logit)| race.run_one(id, logit)),
        (None, None) if set.list().len() > 1 => race.run_list(set.list()),
        (None, None) => {}
    }
    Some(Outcome { winner: race.winner, second: race.second.filter(|_| with_second) })
}

struct Race {
    words: TokenWords,
    largest: f64,
    temperature: f64,
    winner: Runner,
    with_second: bool,
    second: Option<Runner>,
}

impl Race {
    /// Runs the most probable candidate first, so that the others have a time to beat.
    fn new(best: Candidate, temperature: f64, seed: u64, position: u32, with_second: bool) -> Self {
        let word = token_word(seed, position, best.id);
        Race {
            words: TokenWords::new(seed, position),
            largest: f64::from(best.logit),
            temperature,
            winner: Runner { id: best.id, logit: best.logit, word, log_time: start(word) },
            with_second,
            second: None,
        }
    }

    /// Runs the candidates near the top first, of which one nearly always wins, then the many below them with that time
    /// to beat.
    fn run_row(&mut self, logits: &[f32], maxima: &[f32]) {
        let near = (self.largest - NEAR * self.temperature) as f32;
        self.run_between(logits, maxima, near, f32::INFINITY);
        self.run_between(logits, maxima, f32::NEG_INFINITY, near);
    }

    /// Runs the candidates above `low` and at or below `high`.
    fn run_between(&mut self, logits: &[f32], maxima: &[f32], low: f32, high: f32) {
        let logit = |_, id: u32| logits[id as usize];
        let (blocks, rest) = logits.as_chunks::<BLOCK>();
        let mut cut = self.cut().max(low);
        let mut queue = Queue::default();
        for ((start, block), &highest) in (0u32..).step_by(BLOCK).zip(blocks).zip(maxima) {
            if highest <= cut {
                continue;
            }
            let num_entering = num_between(block, cut, high);
            if num_entering == BLOCK {
                let ids = std::array::from_fn(|i| start + i as u32);
                self.run_batch(&ids, BLOCK, highest, logit);
                cut = self.cut().max(low);
            } else if num_entering > 0 {
                queue.add(start, block, cut, high);
                queue.highest = queue.highest.max(highest.min(high));
                if queue.waiting >= BLOCK {
                    self.run_batch(queue.batch(), BLOCK, queue.highest, logit);
                    queue.next(highest.min(high));
                    cut = self.cut().max(low);
                }
            }
        }
        queue.add((blocks.len() * BLOCK) as u32, rest, cut, high);
        while queue.waiting > 0 {
            self.run_batch(queue.batch(), queue.waiting.min(BLOCK), self.largest as f32, logit);
            queue.next(f32::INFINITY);
        }
    }

    fn run_list(&mut self, list: &[Candidate]) {
        let mut cut = self.cut();
        let (mut ids, mut logits, mut waiting) = ([0; BLOCK], [f32::NEG_INFINITY; BLOCK], 0);
        for candidate in list {
            (ids[waiting], logits[waiting]) = (candidate.id, candidate.logit);
            waiting += usize::from(candidate.logit > cut);
            if waiting == BLOCK {
                self.run_batch(&ids, BLOCK, largest(&logits), |index, _| logits[index]);
                cut = self.cut();
                waiting = 0;
            }
        }
        self.run_batch(&ids, waiting, self.largest as f32, |index, _| logits[index]);
    }

    /// Returns the time that a candidate has to beat.
    fn bound(&self) -> f64 {
        if self.with_second {
            self.second.map_or(f64::INFINITY, |second| second.log_time)
        } else {
            self.winner.log_time
        }
    }

    /// Returns the logit above which a candidate can win. Rounded down, so that no winner is skipped; -inf never wins.
    fn cut(&self) -> f32 {
        ((self.largest - (self.bound() - FASTEST_START) * self.temperature) as f32).next_down()
    }

    /// Runs the first `size` of `ids`. None of their logits may be above `highest`.
    #[inline(always)]
    fn run_batch(&mut self, ids: &[u32; BLOCK], size: usize, highest: f32, logit: impl Fn(usize, u32) -> f32) {
        let mut words = [0; BLOCK];
        self.words.fill(&ids[..size.next_multiple_of(LANES)], &mut words);
        let least = self.least_word(highest);
        if words.iter().map(|&word| u32::from(word >= least)).sum::<u32>() == 0 {
            return;
        }
        for (index, (&id, word)) in ids.iter().zip(words).take(size).enumerate() {
            if word >= least {
                self.time(id, logit(index, id), word);
            }
        }
    }

    /// Returns the least word with which a candidate with a logit up to `highest` can win.
    ///
    /// To win, -ln u must be below E = e^(bound - h); then u is above e^-E, which is at least 1 - E.
    fn least_word(&self, highest: f32) -> u32 {
        let exponent = self.bound() - (self.largest - f64::from(highest)) / self.temperature;
        if exponent >= 0.0 {
            return 0;
        }
        // A little more than E, for its rounding and because one u stands for 256 words.
        let most = f64::from(exp_of_nonpositive(exponent as f32)) * 1.0001 + 1e-6;
        ((1.0 - most) * 4_294_967_296.0) as u32
    }

    fn run_one(&mut self, id: u32, logit: f32) {
        self.time(id, logit, self.words.of(id));
    }

    fn time(&mut self, id: u32, logit: f32, word: u32) {
        let handicap = (self.largest - f64::from(logit)) / self.temperature;
        let runner = Runner { id, logit, word, log_time: start(word) + handicap };
        // The most probable candidate ran first; it occurs again among the others.
        if id == self.winner.id || self.second.is_some_and(|second| second.id == id) {
            return;
        }
        if runner.beats(&self.winner) {
            self.second = Some(self.winner);
            self.winner = runner;
        } else if self.second.is_none_or(|second| runner.beats(&second)) {
            self.second = Some(runner);
        }
    }
}

/// Candidates of a row that wait for their random number: at most two batches.
struct Queue {
    ids: [u32; 2 * BLOCK],
    waiting: usize,
    /// Upper bound of the waiting candidates' logits.
    highest: f32,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { ids: [0; 2 * BLOCK], waiting: 0, highest: f32::NEG_INFINITY }
    }
}

impl Queue {
    /// Adds the tokens of a block with logits above `cut` and at or below `high`; `start` is the first token of the
    /// block.
    #[inline(always)]
    fn add(&mut self, start: u32, block: &[f32], cut: f32, high: f32) {
        let mut waiting = self.waiting;
        for (id, &logit) in (start..).zip(block) {
            // No branch, because a mixed block would mispredict it every other time.
            self.ids[waiting % (2 * BLOCK)] = id;
            waiting += usize::from(logit > cut) & usize::from(logit <= high);
        }
        self.waiting = waiting;
    }

    fn batch(&self) -> &[u32; BLOCK] {
        self.ids.first_chunk().unwrap_or(&[0; BLOCK])
    }

    /// Moves the second batch up. All its candidates come from the last block, whose highest logit is `highest`.
    fn next(&mut self, highest: f32) {
        self.ids.copy_within(BLOCK.., 0);
        self.waiting -= self.waiting.min(BLOCK);
        self.highest = highest;
    }
}

impl Runner {
    fn beats(&self, other: &Runner) -> bool {
        self.log_time.total_cmp(&other.log_time).then(other.word.cmp(&self.word)).then(self.id.cmp(&other.id)).is_lt()
    }
}

/// Returns the logarithm of a candidate's time in f32. A device computes this to find the candidates that may win.
pub(crate) fn approximate_time(word: u32, handicap: f32) -> f32 {
    let number = word >> 8;
    // Each form is exact to one rounding where it is used; near 1 that is ln(1 + x) with x = u - 1.
    let negative_log = if number < 1 << 23 {
        -libm::logf((number as f32 + 0.5) * 5.960_464_5e-8)
    } else {
        -libm::log1pf((number as f32 - 16_777_216.0 + 0.5) * 5.960_464_5e-8)
    };
    libm::logf(negative_log) + handicap
}

/// Returns ln(-ln u).
fn start(word: u32) -> f64 {
    libm::log(-libm::log(unit(word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_times_go_to_the_larger_word_and_then_to_the_lower_id() {
        let runner = |id, word, log_time| Runner { id, logit: 0.0, word, log_time };
        assert!(runner(9, 1, -1.0).beats(&runner(2, 7, -0.5)));
        assert!(runner(9, 7, -1.0).beats(&runner(2, 1, -1.0)));
        assert!(runner(2, 7, -1.0).beats(&runner(9, 7, -1.0)));
        assert!(!runner(2, 7, -1.0).beats(&runner(2, 7, -1.0)));
    }

    #[test]
    fn no_start_is_faster_than_the_fastest() {
        assert!(start(u32::MAX) > FASTEST_START && start(u32::MAX) < FASTEST_START + 1e-3);
    }
}
