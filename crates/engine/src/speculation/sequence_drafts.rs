//! The proposals for one sequence and the draft that is checked, from the plan of a step to its commit.

use pellucid_tensor::TokenSource;

use super::{
    Acceptance, ChainedDraft, DraftContext, DraftCounts, DrafterKind, Level, NgramDrafter, PredictionDrafter, Proposal,
    ScoredDraft,
};

/// The proposals for a sequence, and how often those before them were right.
#[derive(Debug, Default)]
pub(crate) struct SequenceDrafts {
    /// Identifies the sequence for drafters, once one was asked; 0 until then.
    pub(crate) id: u64,
    /// Rates at which the drafters are right for this sequence, once one was asked.
    pub(crate) acceptance: Option<Acceptance>,
    ngram: Option<NgramDrafter>,
    prediction: Option<PredictionDrafter>,
    /// Number of tokens that the sequence had when proposals were looked up; 0 if they are not of use any more.
    looked_up_at: usize,
    /// Proposals of lookups and of a draft model for the same position.
    proposed: Vec<ScoredDraft>,
    /// The last token of the sequence and the drafted tokens after it: the rows of the step that is planned.
    rows: Vec<u32>,
    drafter: Option<DrafterKind>,
    /// The drafted tokens, while only the device knows them. `rows` has only the last token of the sequence by then.
    chained: Option<ChainedDraft>,
}

impl SequenceDrafts {
    /// Begins to look up proposals for a sequence of `num_tokens` tokens. Returns false if that was done before.
    pub(crate) fn begin(&mut self, num_tokens: usize) -> bool {
        let is_new = self.looked_up_at != num_tokens;
        if is_new {
            self.looked_up_at = num_tokens;
            self.proposed.clear();
        }
        is_new
    }

    /// Looks up what the sequence itself and the client's prediction propose.
    pub(crate) fn look_up(&mut self, context: &DraftContext<'_>, prediction: &[u32], ngram: bool, max_len: usize) {
        if self.prediction.is_none() && !prediction.is_empty() {
            // Without memory for it, nothing is proposed.
            self.prediction = PredictionDrafter::new(prediction).ok();
        }
        if let Some(drafter) = &mut self.prediction {
            let draft = drafter.propose(&context.tokens[context.prompt_len..], max_len);
            self.add(draft);
        }
        if ngram {
            let draft = self.ngram.get_or_insert_default().propose(context.tokens, max_len);
            self.add(draft);
        }
    }

    /// Adds a proposal.
    pub(crate) fn add(&mut self, draft: ScoredDraft) {
        // Without memory for it, there is one proposal less.
        if !draft.is_empty() && self.proposed.try_reserve(1).is_ok() {
            self.proposed.push(draft);
        }
    }

    /// Adds the proposal of a model, so that it is observed.
    pub(crate) fn add_drafted(&mut self, drafter: DrafterKind, tokens: &[u32]) {
        let mut draft = ScoredDraft::new(drafter);
        tokens.iter().for_each(|&token| draft.push(token, Level::LOWEST));
        self.add(draft);
    }

    /// Returns the proposal of which most tokens are expected to be right.
    pub(crate) fn best(&self) -> Option<&ScoredDraft> {
        let acceptance = self.acceptance.as_ref()?;
        let order = |a: &&ScoredDraft, b: &&ScoredDraft| acceptance.expected(a).total_cmp(&acceptance.expected(b));
        self.proposed.iter().max_by(order)
    }

    /// Sets the draft of the step that is planned; `last` is the last token of the sequence.
    pub(crate) fn plan(&mut self, last: u32, draft: &[u32], drafter: DrafterKind) {
        self.plan_forced(last, draft);
        self.drafter = Some(drafter);
    }

    /// Sets the tokens that a grammar forces as the draft of the step that is planned. No drafter proposed them.
    pub(crate) fn plan_forced(&mut self, last: u32, forced: &[u32]) {
        self.rows.clear();
        self.rows.push(last);
        self.rows.extend_from_slice(forced);
        self.drafter = None;
        self.chained = None;
    }

    /// Sets a draft that only the device knows; `last` is the last token of the sequence.
    pub(crate) fn plan_chained(&mut self, last: u32, draft: ChainedDraft) {
        self.plan(last, &[], DrafterKind::DraftModel);
        self.chained = Some(draft);
    }

    /// Returns the row of a draft that only the device knows.
    pub(crate) fn chained_row(&self) -> Option<usize> {
        self.chained.map(|draft| draft.row)
    }

    /// Sets the tokens of a draft that only the device knew.
    pub(crate) fn set_chained(&mut self, tokens: &[u32]) {
        self.chained = None;
        self.rows.extend_from_slice(tokens);
        self.add_drafted(DrafterKind::DraftModel, tokens);
    }

    /// Returns the sources of the tokens of the planned step, if only the device knows some of them.
    pub(crate) fn sources(&self) -> Vec<TokenSource> {
        let kept = |draft: ChainedDraft| {
            (0..draft.len).map(move |slot| TokenSource::Kept { slot: slot as u32, row: draft.row as u32 })
        };
        let known = self.rows.iter().map(|&token| TokenSource::Token(token));
        self.chained.map_or_else(Vec::new, |draft| known.chain(kept(draft)).collect())
    }

    /// Returns the tokens of the planned step: the last of the sequence, and the drafted ones.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Returns the drafted token in the place of the token that row `row` of the step gives.
    pub(crate) fn next(&self, row: usize) -> Option<u32> {
        self.rows.get(row + 1).copied()
    }

    /// Returns the proposal for the token that row `row` of the step gives; `None` if no drafter made it.
    pub(crate) fn proposal(&self, row: usize) -> Option<Proposal> {
        Some(Proposal { drafter: self.drafter?, token: self.next(row)? })
    }

    /// Returns the counts of the planned draft, of which the model chose `accepted` tokens; `None` without a draft.
    pub(crate) fn counts(&self, accepted: usize) -> Option<(DrafterKind, DraftCounts)> {
        let drafted = self.rows.len().saturating_sub(1) as u64;
        Some((self.drafter?, DraftCounts { drafted, accepted: accepted as u64 }))
    }

    /// Compares all proposals with the tokens that the model chose, for the estimates of the sequence and for `shared`
    /// ones.
    pub(crate) fn observe(&mut self, chosen: &[u32], shared: &mut Acceptance) {
        let SequenceDrafts { acceptance, proposed, looked_up_at, .. } = self;
        for draft in proposed.drain(..) {
            shared.observe(&draft, chosen);
            acceptance.iter_mut().for_each(|acceptance| {
                acceptance.observe(&draft, chosen);
            });
        }
        *looked_up_at = 0;
    }
}
