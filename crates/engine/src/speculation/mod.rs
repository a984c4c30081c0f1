//! Speculation: cheap drafters propose the next tokens of a sequence, and the model checks them all in one step.
//!
//! The model samples its own token at each drafted position, with the same keyed draw as without a draft, and a drafted
//! token is accepted if it is that token. Because no row of a step depends on another, a reply is the same, token for
//! token, with any drafter or none; drafts decide only how fast it comes.

mod acceptance;
mod cursor;
mod draft_length;
mod draft_model;
mod drafter;
mod drafters;
mod mtp;
mod ngram;
mod ngram_table;
mod prediction;
mod scored_draft;
mod sequence_drafts;
mod stats;
mod suffix;

pub use acceptance::Acceptance;
pub use draft_length::{Candidate, DraftLengths, Limits, choose};
pub use draft_model::{ChainedDraft, DraftModel, DraftModelOptions, WantedDraft};
pub use drafter::{DraftContext, Drafter, DrafterKind};
pub(crate) use drafters::Drafters;
pub(crate) use mtp::{MtpDraft, MtpDrafter};
pub use ngram::NgramDrafter;
pub use prediction::PredictionDrafter;
pub use scored_draft::{Level, NUM_LEVELS, ScoredDraft};
pub(crate) use sequence_drafts::SequenceDrafts;
pub use stats::{DraftCounts, Proposal, SpeculationStats};
pub use suffix::{SuffixLimits, SuffixStore};

/// Maximum tokens of a draft.
pub const MAX_DRAFT_LEN: usize = 15;

/// Which drafters an engine has besides a draft model, and how far they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculationOptions {
    /// Propose what followed the same n-gram earlier in the prompt or the output.
    pub ngram: bool,
    /// Propose what followed the longest suffix in the tenant's recent output.
    pub suffix: bool,
    /// Maximum tokens of a draft, up to [`MAX_DRAFT_LEN`].
    pub max_draft_len: usize,
    /// Propose what the layer that the model has for this ([`pellucid_model::DecoderConfig::predictor`]) predicts.
    /// Without such a layer, nothing is proposed.
    pub mtp: bool,
    /// Draft this many tokens in every step, whatever it costs; for tests and benchmarks. `None` chooses the length
    /// that promises the most tokens per second.
    pub fixed_draft_len: Option<usize>,
}

impl SpeculationOptions {
    /// No drafter.
    pub const OFF: SpeculationOptions = SpeculationOptions {
        ngram: false,
        suffix: false,
        mtp: false,
        max_draft_len: MAX_DRAFT_LEN,
        fixed_draft_len: None,
    };

    /// Returns the maximum length of a draft.
    pub(crate) fn max_len(&self) -> usize {
        self.fixed_draft_len.unwrap_or(self.max_draft_len).min(MAX_DRAFT_LEN)
    }
}
