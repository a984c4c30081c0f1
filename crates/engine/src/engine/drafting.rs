//! Lengthens the chunks of a step by what drafters propose. A draft uses only rows and blocks of KV memory that nobody
//! else needs: it never delays another sequence's row, and never causes a preemption.

use super::{Engine, PlannedChunk};
use crate::speculation::Draft;
use crate::{DraftContext, Drafter, SpeculationOptions};

impl Engine {
    /// Sets which drafters propose tokens. Without this there are none.
    pub fn set_speculation(&mut self, options: SpeculationOptions) {
        self.speculation.options = options;
    }

    /// Adds a drafter of the program's own.
    pub fn add_drafter(&mut self, drafter: Box<dyn Drafter>) {
        self.speculation.add(drafter);
    }

    /// Accepts every drafted token unchecked, so that replies change. A proof that replies do not change must fail with
    /// it.
    #[doc(hidden)]
    pub fn trust_drafts(&mut self) {
        self.speculation.trust_drafts();
    }

    /// Adds drafts to the chunks of sequences that decode.
    pub(super) fn add_drafts(&mut self, chunks: &mut [PlannedChunk]) {
        if !self.speculation.has_drafters() {
            return;
        }
        let mut rows_left = self.options.step_tokens - chunks.iter().map(PlannedChunk::num_tokens).sum::<usize>();
        for chunk in chunks.iter_mut().filter(|chunk| chunk.is_decode) {
            let draft = self.propose(chunk, rows_left);
            let Some(drafter) = draft.drafter else { continue };
            self.grow_for_draft(chunk, draft.tokens.len());
            let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
            let sequence = &mut group.sequences[chunk.sequence];
            let last = *sequence.tokens.last().expect("a sequence that decodes has tokens");
            sequence.drafts.plan(last, &draft.tokens, drafter);
            chunk.positions.end += draft.tokens.len();
            chunk.wanted = 0..chunk.num_tokens();
            rows_left -= draft.tokens.len();
        }
    }

    /// Returns what is proposed for a chunk's sequence, as far as there are rows and blocks for it.
    fn propose(&mut self, chunk: &PlannedChunk, rows_left: usize) -> Draft {
        let config = self.model.config();
        let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
        if !group.request.speculate || group.search.is_some() {
            return Draft::default();
        }
        let tokens_left = group.request.max_positions(config) - group.sequences[chunk.sequence].tokens.len();
        let tenant = group.tenant();
        let sequence = &mut group.sequences[chunk.sequence];
        // Blocks that the sequence has or that are reserved for it.
        let num_blocks = sequence.table.as_ref().map_or(0, |table| table.blocks().len())
            + group.reservation.as_ref().map_or(0, crate::kv_cache::Reservation::num_blocks);
        let room = (num_blocks * self.options.block_len).saturating_sub(chunk.positions.end);
        // The row after the last drafted token gives a token as well.
        let max_len = self.speculation.options.max_len().min(tokens_left.saturating_sub(1)).min(rows_left).min(room);
        if max_len == 0 {
            return Draft::default();
        }
        let prompt_len = group.request.prompt.len();
        let context = DraftContext { tenant, sequence: 0, tokens: &sequence.tokens, prompt_len };
        self.speculation.propose(context, &mut sequence.drafts, config.vocab_size, max_len)
    }

    /// Takes the blocks for the drafted positions, of which [`Engine::propose`] left enough.
    fn grow_for_draft(&mut self, chunk: &PlannedChunk, draft_len: usize) {
        let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
        let reservation = group.reservation.as_mut().expect("a running request has a reservation");
        let table = group.sequences[chunk.sequence].table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, chunk.positions.end + draft_len).expect("these blocks are reserved");
    }

    /// Lets drafters forget the sequences that have ended.
    pub(super) fn forget_drafts(&mut self) {
        if !self.speculation.has_drafters() {
            return;
        }
        let waiting = self.waiting.values().flatten().map(|(_, group)| group);
        let groups = self.running.values().chain(waiting);
        let live: Vec<u64> = groups.flat_map(|group| &group.sequences).map(|sequence| sequence.drafts.id).collect();
        self.speculation.retain(|id| live.contains(&id));
    }
}
