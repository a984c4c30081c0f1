//! The draft of one sequence, from the plan of a step to its commit.

use super::{DraftCounts, DrafterKind, Proposal};

/// The draft of a sequence in the step that is planned.
#[derive(Debug, Default)]
pub(crate) struct SequenceDrafts {
    /// Identifies the sequence for drafters, once one was asked; 0 until then.
    pub(crate) id: u64,
    /// The last token of the sequence and the drafted tokens after it: the rows of the step that is planned. Empty
    /// without a draft.
    rows: Vec<u32>,
    drafter: Option<DrafterKind>,
}

impl SequenceDrafts {
    /// Sets the draft of the step that is planned; `last` is the last token of the sequence.
    pub(crate) fn plan(&mut self, last: u32, draft: &[u32], drafter: DrafterKind) {
        self.rows.clear();
        self.rows.push(last);
        self.rows.extend_from_slice(draft);
        self.drafter = Some(drafter);
    }

    /// Returns the tokens of the planned step: the last of the sequence, and the drafted ones.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Returns the number of drafted tokens.
    pub(crate) fn len(&self) -> usize {
        self.rows.len().saturating_sub(1)
    }

    /// Returns what was proposed for the token that row `row` of the step gives.
    pub(crate) fn proposal(&self, row: usize) -> Option<Proposal> {
        Some(Proposal { drafter: self.drafter?, token: *self.rows.get(row + 1)? })
    }

    /// Returns who drafted and how much, of which the model chose `accepted` tokens; `None` without a draft.
    pub(crate) fn counts(&self, accepted: usize) -> Option<(DrafterKind, DraftCounts)> {
        let counts = DraftCounts { drafted: self.len() as u64, accepted: accepted as u64 };
        Some((self.drafter?, counts))
    }
}
