//! The drafters of an engine.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{
    Acceptance, DraftContext, DraftLengths, DraftModel, Drafter, DrafterKind, Level, MtpDrafter, ScoredDraft,
    SequenceDrafts, SpeculationOptions, SuffixStore,
};
use crate::{Scope, TenantId};

/// Maximum tenants whose acceptance rates are kept.
const MAX_TENANTS: usize = 1024;

/// The drafters of an engine, and what is known about all sequences together.
pub(crate) struct Drafters {
    pub(crate) options: SpeculationOptions,
    pub(crate) model: Option<DraftModel>,
    pub(crate) mtp: MtpDrafter,
    /// When the chain of draft steps was launched whose tokens only the device knows.
    pub(crate) chain_launched: Option<Instant>,
    pub(crate) lengths: DraftLengths,
    /// Drafted tokens that were accepted in the step that is committed.
    pub(crate) num_accepted: usize,
    custom: Vec<Box<dyn Drafter>>,
    suffix: SuffixStore,
    /// Acceptance rates of each tenant, from which new sequences start.
    acceptance: BTreeMap<TenantId, Acceptance>,
    last_id: u64,
    /// Sequences that drafters keep something for.
    known: BTreeSet<u64>,
    trusts_drafts: bool,
}

impl Default for Drafters {
    fn default() -> Self {
        Drafters {
            options: SpeculationOptions::OFF,
            model: None,
            mtp: MtpDrafter::default(),
            chain_launched: None,
            lengths: DraftLengths::default(),
            num_accepted: 0,
            custom: Vec::new(),
            suffix: SuffixStore::default(),
            acceptance: BTreeMap::new(),
            last_id: 0,
            known: BTreeSet::new(),
            trusts_drafts: false,
        }
    }
}

impl Drafters {
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

    /// Whether there is no drafter for a request without a prediction.
    pub(crate) fn is_empty(&self) -> bool {
        let SpeculationOptions { ngram, suffix, mtp, .. } = self.options;
        !ngram && !suffix && !mtp && self.model.is_none() && self.custom.is_empty()
    }

    /// Looks up proposals for a sequence, unless that was done for the same tokens before. They stay with the sequence
    /// until it has a further token. `prediction` is the output that the client expects.
    pub(crate) fn look_up(
        &mut self,
        context: DraftContext<'_>,
        prediction: &[u32],
        drafts: &mut SequenceDrafts,
        vocab_size: usize,
    ) {
        if !drafts.begin(context.tokens.len()) {
            return;
        }
        if drafts.id == 0 {
            self.last_id += 1;
            drafts.id = self.last_id;
        }
        let shared = self.acceptance.get(&context.scope.tenant);
        drafts.acceptance.get_or_insert_with(|| match shared {
            Some(shared) => Acceptance::of_sequence(shared),
            None => Acceptance::of_sequence(&Acceptance::shared()),
        });
        let context = DraftContext { sequence: drafts.id, ..context };
        let SpeculationOptions { ngram, suffix, .. } = self.options;
        let max_len = self.options.max_len();
        drafts.look_up(&context, prediction, ngram, max_len);
        if suffix {
            drafts.add(self.suffix.propose(context.scope, context.tokens, max_len));
        }
        for drafter in &mut self.custom {
            self.known.insert(drafts.id);
            let mut tokens = Vec::new();
            drafter.propose(&context, max_len, &mut tokens);
            let mut draft = ScoredDraft::new(DrafterKind::Custom);
            let valid = tokens.iter().take_while(|&&token| (token as usize) < vocab_size);
            valid.take(max_len).for_each(|&token| draft.push(token, Level::LOWEST));
            drafts.add(draft);
        }
    }

    /// Learns from the tokens that the model chose for a sequence.
    pub(crate) fn observe(&mut self, tenant: TenantId, drafts: &mut SequenceDrafts, chosen: &[u32]) {
        if self.acceptance.len() >= MAX_TENANTS && !self.acceptance.contains_key(&tenant) {
            self.acceptance.clear();
        }
        let shared = self.acceptance.entry(tenant).or_insert_with(Acceptance::shared);
        drafts.observe(chosen, shared);
    }

    /// Keeps the output of a sequence that has ended, for later sequences of its scope.
    pub(crate) fn keep_output(&mut self, scope: Scope, output: &[u32]) {
        if self.options.suffix {
            self.suffix.add(scope, output);
        }
    }

    /// Learns from a step that took `seconds` without drafting.
    pub(crate) fn finish_step(&mut self, seconds: f64) {
        self.lengths.finish_step(seconds, std::mem::take(&mut self.num_accepted));
    }

    /// Records that a draft model knows a sequence.
    pub(crate) fn know(&mut self, sequence: u64) {
        self.known.insert(sequence);
    }

    /// Forgets the sequences that are not `live`.
    pub(crate) fn retain(&mut self, live: &BTreeSet<u64>) {
        let Drafters { custom, known, model, .. } = self;
        known.retain(|id| {
            let stays = live.contains(id);
            if !stays {
                custom.iter_mut().for_each(|drafter| drafter.forget(*id));
                model.iter_mut().for_each(|model| model.forget(*id));
            }
            stays
        });
    }
}
