//! The trait of drafters: a drafter sees the tokens of one sequence and proposes those that may follow.

use crate::Scope;

/// A kind of drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DrafterKind {
    /// A smaller model with the same vocabulary.
    DraftModel,
    /// N-grams of the prompt and the output.
    Ngram,
    /// The tenant's recent output.
    Suffix,
    /// The output that the client predicted.
    Prediction,
    /// A layer of the model that predicts further tokens.
    Mtp,
    /// A drafter of the program that embeds the engine.
    Custom,
}

impl DrafterKind {
    /// All kinds, in the order of their index.
    pub const ALL: [DrafterKind; 6] = [
        DrafterKind::DraftModel,
        DrafterKind::Ngram,
        DrafterKind::Suffix,
        DrafterKind::Prediction,
        DrafterKind::Mtp,
        DrafterKind::Custom,
    ];

    /// Name in replies, metrics and flags.
    pub fn name(self) -> &'static str {
        match self {
            DrafterKind::DraftModel => "draft",
            DrafterKind::Ngram => "ngram",
            DrafterKind::Suffix => "suffix",
            DrafterKind::Prediction => "prediction",
            DrafterKind::Mtp => "mtp",
            DrafterKind::Custom => "custom",
        }
    }

    /// Index in [`DrafterKind::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The sequence that a drafter continues.
#[derive(Debug, Clone, Copy)]
pub struct DraftContext<'a> {
    /// Tenant and salt of the request. A drafter that keeps text must keep it apart for each scope.
    pub scope: Scope,
    /// Identifies the sequence while it exists.
    pub sequence: u64,
    /// Prompt and output.
    pub tokens: &'a [u32],
    /// Number of tokens of the prompt.
    pub prompt_len: usize,
}

/// Proposes tokens. Called on the engine's thread, so it must be quick. What it proposes is checked by the model: a
/// wrong proposal costs time and changes nothing else. Ids outside the vocabulary end a proposal.
pub trait Drafter: Send {
    /// Appends up to `max_len` tokens to `draft` that may follow the sequence.
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>);

    /// Forgets a sequence that has ended.
    fn forget(&mut self, sequence: u64) {
        let _ = sequence;
    }
}
