//! Changing logits: the operations of the steps that edit, exclude or divide.

use super::{Candidates, Workspace};
use crate::Error;
use crate::row_blocks::{self, BLOCK};

/// Whether a mask allows a token: token t is bit t % 32 of word t / 32.
pub(crate) fn allows(words: &[u32], token: u32) -> bool {
    words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

impl Candidates<'_> {
    /// Divides by a temperature above 0.
    pub(crate) fn divide(&mut self, temperature: f64) {
        self.temperature *= temperature;
    }

    /// Changes the logits of some tokens, each listed once. A change to -inf drops the token; dropped tokens stay
    /// dropped.
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

    /// Drops every token whose bit is 0: token t is bit t % 32 of word t / 32. Only while the set is a row, or known by
    /// its digest.
    pub(crate) fn mask(&mut self, words: &[u32]) {
        if let Some(digest) = self.digest {
            // The most probable tokens of those that stay.
            self.space.list.retain(|candidate| allows(words, candidate.id));
            self.is_masked = true;
            self.digest = Some(digest).filter(|digest| !digest.has_all);
            return;
        }
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

    /// Drops tokens, given by ascending id.
    pub(crate) fn remove(&mut self, ids: &[u32]) {
        if self.is_list {
            self.space.list.retain(|candidate| ids.binary_search(&candidate.id).is_err());
        } else {
            let temperature = std::mem::replace(&mut self.temperature, 1.0);
            self.edit(ids.iter().map(|&id| (id, ())), |_, ()| f32::NEG_INFINITY);
            self.temperature = temperature;
        }
    }

    /// Keeps only the tokens with logit +inf, if there are any, and makes them equally probable. An empty set is an
    /// error.
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

    /// Divides the logits, because edits after the temperature step act on divided logits.
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
