//! The tokens of a sequence so far, with the counts of those in the penalty window.
//!
//! The engine pushes each token that it commits. Penalties read the counts, DRY reads the ids.

use std::collections::{BTreeMap, TryReserveError};

/// Number of times that a token is in the penalty window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    pub prompt: u32,
    pub output: u32,
}

/// Prompt and output of one sequence.
#[derive(Debug, Clone)]
pub struct History {
    ids: Vec<u32>,
    prompt_len: usize,
    /// Number of last tokens that are counted.
    window: usize,
    /// Counts of the tokens in the window, and of no others. Ordered by id, so that penalties go through the logits
    /// forward.
    counts: BTreeMap<u32, Count>,
}

impl History {
    /// Starts a sequence with its prompt and no output. `window` is the number of last tokens to count; `None` counts
    /// all.
    pub fn new(prompt: &[u32], window: Option<u32>) -> Self {
        History::over(prompt.to_vec(), window)
    }

    /// Starts a sequence as [`History::new`] does; fails if there is no memory for it and `num_spare` more tokens.
    pub fn try_new(prompt: &[u32], num_spare: usize, window: Option<u32>) -> Result<Self, TryReserveError> {
        let mut ids = Vec::new();
        ids.try_reserve(prompt.len() + num_spare)?;
        ids.extend_from_slice(prompt);
        Ok(History::over(ids, window))
    }

    fn over(prompt: Vec<u32>, window: Option<u32>) -> Self {
        let window = window.map_or(usize::MAX, |window| window as usize);
        let num_prompt = prompt.len();
        let mut history = History { ids: prompt, prompt_len: num_prompt, window, counts: BTreeMap::new() };
        for index in num_prompt.saturating_sub(window)..num_prompt {
            history.enter(index);
        }
        history
    }

    /// Returns prompt and output, oldest first.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub fn output(&self) -> &[u32] {
        &self.ids[self.prompt_len..]
    }

    /// Returns the distinct tokens of the window with their counts, by ascending id.
    pub fn counts(&self) -> impl Iterator<Item = (u32, Count)> + '_ {
        self.counts.iter().map(|(&token, &count)| (token, count))
    }

    /// Makes room for one more token, so that [`History::push`] does not allocate memory for the list.
    pub fn try_reserve(&mut self) -> Result<(), TryReserveError> {
        self.ids.try_reserve(1)
    }

    pub fn push(&mut self, token: u32) {
        self.ids.push(token);
        self.enter(self.ids.len() - 1);
        if self.ids.len() > self.window {
            self.leave(self.ids.len() - 1 - self.window);
        }
    }

    /// Removes the last tokens, so that `len` tokens are left. Undoes [`History::push`]; the prompt stays.
    pub fn truncate(&mut self, len: usize) {
        while self.ids.len() > len.max(self.prompt_len) {
            let last = self.ids.len() - 1;
            if self.ids.len() > self.window {
                self.enter(last - self.window);
            }
            self.leave(last);
            self.ids.pop();
        }
    }

    fn enter(&mut self, index: usize) {
        let count = self.counts.entry(self.ids[index]).or_default();
        *(if index < self.prompt_len { &mut count.prompt } else { &mut count.output }) += 1;
    }

    fn leave(&mut self, index: usize) {
        if let Some(count) = self.counts.get_mut(&self.ids[index]) {
            *(if index < self.prompt_len { &mut count.prompt } else { &mut count.output }) -= 1;
            if *count == Count::default() {
                self.counts.remove(&self.ids[index]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the tokens of the window from scratch.
    fn recount(history: &History, window: usize) -> Vec<(u32, Count)> {
        let mut counts: BTreeMap<u32, Count> = BTreeMap::new();
        for index in history.ids.len().saturating_sub(window)..history.ids.len() {
            let count = counts.entry(history.ids[index]).or_default();
            if index < history.prompt_len {
                count.prompt += 1;
            } else {
                count.output += 1;
            }
        }
        counts.into_iter().collect()
    }

    #[test]
    fn counts_follow_pushes() {
        for window in [None, Some(1), Some(3), Some(8), Some(100)] {
            let mut history = History::new(&[5, 5, 1, 2, 9], window);
            let size = window.map_or(usize::MAX, |window| window as usize);
            for step in 0u32..60 {
                history.push(step * step % 7);
                assert_eq!(history.counts().collect::<Vec<_>>(), recount(&history, size), "{window:?}, step {step}");
            }
        }
    }

    #[test]
    fn truncate_undoes_pushes() {
        for window in [None, Some(0), Some(1), Some(3), Some(8), Some(100)] {
            let mut history = History::new(&[5, 5, 1, 2, 9], window);
            (0u32..10).for_each(|step| history.push(step * step % 7));
            let (ids, counts) = (history.ids.clone(), history.counts.clone());
            for num_more in 0..30 {
                (0..num_more).for_each(|step| history.push(step * 3 % 5));
                history.truncate(ids.len());
                assert_eq!((&history.ids, &history.counts), (&ids, &counts), "{window:?}, {num_more} tokens");
            }
            history.truncate(0);
            assert_eq!(history.ids, [5, 5, 1, 2, 9], "the prompt stays");
        }
    }
}
