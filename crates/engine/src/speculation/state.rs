//! The drafters of an engine.

use std::collections::BTreeSet;

use super::{DraftContext, Drafter, DrafterKind, SequenceDrafts, SpeculationOptions};

/// The drafters of an engine, and the settings that hold for all sequences.
pub(crate) struct Speculation {
    pub(crate) options: SpeculationOptions,
    custom: Vec<Box<dyn Drafter>>,
    last_id: u64,
    /// Sequences that the custom drafters were asked about.
    known: BTreeSet<u64>,
    trusts_drafts: bool,
}

/// A proposal for one sequence.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) drafter: Option<DrafterKind>,
    pub(crate) tokens: Vec<u32>,
}

impl Default for Speculation {
    fn default() -> Self {
        Speculation {
            options: SpeculationOptions::OFF,
            custom: Vec::new(),
            last_id: 0,
            known: BTreeSet::new(),
            trusts_drafts: false,
        }
    }
}

impl Speculation {
    pub(crate) fn add(&mut self, drafter: Box<dyn Drafter>) {
        self.custom.push(drafter);
    }

    pub(crate) fn trust_drafts(&mut self) {
        self.trusts_drafts = true;
    }

    /// Whether drafted tokens are accepted unchecked, which only the control of a test wants.
    pub(crate) fn trusts_drafts(&self) -> bool {
        self.trusts_drafts
    }

    pub(crate) fn has_drafters(&self) -> bool {
        !self.custom.is_empty()
    }

    /// Returns the longest proposal for a sequence.
    pub(crate) fn propose(
        &mut self,
        context: DraftContext<'_>,
        drafts: &mut SequenceDrafts,
        vocab_size: usize,
        max_len: usize,
    ) -> Draft {
        if drafts.id == 0 {
            self.last_id += 1;
            drafts.id = self.last_id;
        }
        let context = DraftContext { sequence: drafts.id, ..context };
        let mut best = Draft::default();
        for drafter in &mut self.custom {
            self.known.insert(drafts.id);
            let mut tokens = Vec::new();
            drafter.propose(&context, max_len, &mut tokens);
            tokens.truncate(max_len);
            if let Some(end) = tokens.iter().position(|&token| token as usize >= vocab_size) {
                tokens.truncate(end);
            }
            if tokens.len() > best.tokens.len() {
                best = Draft { drafter: Some(DrafterKind::Custom), tokens };
            }
        }
        best
    }

    /// Forgets the sequences for which `is_live` is false.
    pub(crate) fn retain(&mut self, is_live: impl Fn(u64) -> bool) {
        let Speculation { custom, known, .. } = self;
        known.retain(|&id| {
            let stays = is_live(id);
            if !stays {
                custom.iter_mut().for_each(|drafter| drafter.forget(id));
            }
            stays
        });
    }
}
