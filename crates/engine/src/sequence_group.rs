//! A request while it is served: its sequences, its blocks, its numbers. Owned by the loop.

use std::time::Instant;

use pellucid_model::DecoderConfig;
use pellucid_sampling::{Logprobs, Sampler};

use crate::beam::BeamSearch;
use crate::buffered_sink::BufferedSink;
use crate::kv_cache::{KvCache, Reservation, TenantId};
use crate::sequence::Sequence;
use crate::{Event, EventSink, FinishReason, Request, RequestStats, TokenEvent};

/// Requests are numbered in the order of their arrival.
pub(crate) type GroupId = u64;

pub(crate) struct SequenceGroup {
    pub(crate) request: Request,
    pub(crate) sink: BufferedSink,
    pub(crate) sequences: Vec<Sequence>,
    /// What its sequences may still take; present while it runs.
    pub(crate) reservation: Option<Reservation>,
    pub(crate) search: Option<BeamSearch>,
    /// Choices that were ended before the prompt was computed.
    pub(crate) unwanted: Vec<usize>,
    /// Of the prompt's tokens, as they become known.
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    pub(crate) is_paused: bool,
    pub(crate) arrived: Instant,
    pub(crate) started: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) stats: RequestStats,
}

impl SequenceGroup {
    pub(crate) fn new(
        request: Request,
        config: &DecoderConfig,
        sampler: Sampler,
        sink: Box<dyn EventSink>,
        now: Instant,
    ) -> SequenceGroup {
        let search = request.beams.map(|params| {
            let max_tokens = request.max_positions(config) - request.prompt.len();
            BeamSearch::new(params, &request.sampling.end_ids, max_tokens)
        });
        let stats = RequestStats { prompt_tokens: request.prompt.len(), ..RequestStats::default() };
        let first = Sequence::new(0, &request.prompt, sampler);
        SequenceGroup {
            request,
            sink: BufferedSink::new(sink),
            sequences: vec![first],
            reservation: None,
            search,
            unwanted: Vec::new(),
            prompt_logprobs: Vec::new(),
            is_paused: false,
            arrived: now,
            started: None,
            first_token: None,
            stats,
        }
    }

    pub(crate) fn tenant(&self) -> TenantId {
        self.request.scope.tenant
    }

    /// Sequences that it runs now, or will run once its prompt is computed.
    pub(crate) fn num_slots(&self) -> usize {
        let has_begun = self.sequences.iter().any(|sequence| sequence.tokens.len() > self.request.prompt.len());
        if has_begun {
            self.sequences.iter().filter(|sequence| sequence.finish.is_none()).count()
        } else {
            self.request.width()
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.finish.is_some())
    }

    /// Whether the next rows of a sequence are of a prompt that is to be scored.
    pub(crate) fn scores_next(&self, sequence: &Sequence) -> bool {
        self.request.score_prompt && sequence.num_computed < self.request.prompt.len()
    }

    /// Whether it is to be computed in the next step.
    pub(crate) fn takes_steps(&self) -> bool {
        !self.is_paused && self.sink.is_ready()
    }

    /// Tokens are held back while it is not known which choices will be returned.
    pub(crate) fn holds_back(&self) -> bool {
        self.request.best_of > self.request.num_choices
    }

    /// Gives every block back and forgets what was computed; the tokens stay, so that it can be computed again to the same bits.
    pub(crate) fn release(&mut self, cache: &mut KvCache) {
        for sequence in &mut self.sequences {
            sequence.num_computed = 0;
            sequence.is_ahead = false;
            if let Some(table) = sequence.table.take() {
                cache.release(table);
            }
        }
        if let Some(reservation) = self.reservation.take() {
            cache.cancel(reservation);
        }
    }

    /// Holds what is still to be said and the numbers, to be delivered last.
    pub(crate) fn complete(&mut self, now: Instant) {
        if let Some(search) = self.search.take() {
            let reason = self.sequences[0].finish.unwrap_or(FinishReason::End);
            self.sink.hold(Event::Beams { beams: search.results(), reason });
        } else if self.holds_back() {
            self.hold_best();
        }
        self.stats.total_time = now - self.arrived;
        self.stats.decode_time = self.first_token.map_or_else(Default::default, |first| now - first);
        self.sink.hold(Event::Done(self.stats));
    }

    fn hold_best(&mut self) {
        self.sequences.sort_by(|a, b| b.mean_logprob().total_cmp(&a.mean_logprob()).then(a.choice.cmp(&b.choice)));
        for (choice, sequence) in self.sequences.iter_mut().take(self.request.num_choices).enumerate() {
            for token in sequence.held.drain(..) {
                self.sink.hold(Event::Token(TokenEvent { choice, ..token }));
            }
            if let Some(reason) = sequence.finish {
                self.sink.hold(Event::ChoiceEnd { choice, reason, token: None });
            }
        }
    }
}
