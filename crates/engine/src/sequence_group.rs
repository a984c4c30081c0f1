//! A request while it is served: its sequences, its reserved blocks, its statistics.

use std::time::Instant;

use pellucid_model::DecoderConfig;
use pellucid_sampling::Logprobs;

use crate::beam::BeamSearch;
use crate::buffered_sink::BufferedSink;
use crate::kv_cache::{KvCache, Reservation, TenantId};
use crate::queue::Place;
use crate::sequence::Sequence;
use crate::{Event, EventSink, FinishReason, Request, RequestStats, TokenEvent};

/// Number of a request, in the order of arrival.
pub(crate) type GroupId = u64;

/// The sequences that are generated for one request: one for each choice or beam. Owned by the engine's loop.
pub(crate) struct SequenceGroup {
    pub(crate) request: Request,
    pub(crate) sink: BufferedSink,
    /// One sequence until the prompt is computed; then one for each choice or beam.
    pub(crate) sequences: Vec<Sequence>,
    /// Blocks that its sequences may still take; present while it runs.
    pub(crate) reservation: Option<Reservation>,
    pub(crate) search: Option<BeamSearch>,
    /// Choices that a control message ended before the prompt was computed.
    pub(crate) unwanted: Vec<usize>,
    /// Log probabilities of the prompt's tokens, as far as they are computed; only if the prompt is scored.
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    pub(crate) is_paused: bool,
    /// Its place in the queue, until it starts for the first time.
    pub(crate) place: Option<Place>,
    pub(crate) arrived: Instant,
    pub(crate) started: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    /// When a step last gave it tokens.
    pub(crate) last_token: Option<Instant>,
    /// Sequences in the step that is being committed.
    pub(crate) batch_size: usize,
    pub(crate) stats: RequestStats,
}

impl SequenceGroup {
    pub(crate) fn new(
        request: Request,
        config: &DecoderConfig,
        first: Sequence,
        sink: Box<dyn EventSink>,
        place: Place,
        arrived: Instant,
    ) -> SequenceGroup {
        let search = request.beams.map(|params| {
            let max_tokens = request.max_positions(config) - request.prompt.len();
            BeamSearch::new(params, &request.sampling.end_ids, max_tokens)
        });
        let stats = RequestStats { prompt_tokens: request.prompt.len(), ..RequestStats::default() };
        SequenceGroup {
            request,
            sink: BufferedSink::new(sink),
            sequences: vec![first],
            reservation: None,
            search,
            unwanted: Vec::new(),
            prompt_logprobs: Vec::new(),
            is_paused: false,
            place: Some(place),
            arrived,
            started: None,
            first_token: None,
            last_token: None,
            batch_size: 0,
            stats,
        }
    }

    pub(crate) fn tenant(&self) -> TenantId {
        self.request.scope.tenant
    }

    /// Returns the number of sequences that it runs now, or will run once its prompt is computed.
    pub(crate) fn num_slots(&self) -> usize {
        let has_output = self.sequences.iter().any(|sequence| sequence.tokens.len() > self.request.prompt.len());
        if has_output {
            self.sequences.iter().filter(|sequence| sequence.finish.is_none()).count()
        } else {
            self.request.width()
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.finish.is_some())
    }

    /// Whether the next rows of a sequence belong to a prompt that is scored.
    pub(crate) fn scores_next(&self, sequence: &Sequence) -> bool {
        self.request.score_prompt && sequence.num_computed < self.request.prompt.len()
    }

    /// Whether the next step may compute for it.
    pub(crate) fn takes_steps(&self) -> bool {
        !self.is_paused && self.sink.is_ready()
    }

    /// Whether tokens are held back until the end, because `best_of` has not decided yet which choices to return.
    pub(crate) fn holds_back(&self) -> bool {
        self.request.best_of > self.request.num_choices
    }

    /// Gives all blocks back. The tokens stay, so that they can be computed again, to the same bits.
    pub(crate) fn release(&mut self, cache: &mut KvCache) {
        for sequence in &mut self.sequences {
            sequence.num_computed = 0;
            sequence.look_ahead.discard();
            sequence.release(cache);
        }
        if let Some(reservation) = self.reservation.take() {
            cache.cancel(reservation);
        }
    }

    /// Queues the last events: the results of `best_of` or beam search, and the statistics.
    pub(crate) fn complete(&mut self, now: Instant) {
        if let Some(search) = self.search.take() {
            let reason = self.sequences[0].finish.unwrap_or(FinishReason::End);
            self.sink.hold(Event::Beams { beams: search.results(), reason });
        } else if self.holds_back() {
            self.hold_best();
        }
        self.stats.total_time = now - self.arrived;
        self.stats.decode_time = self.first_token.map_or_else(Default::default, |first| now - first);
        self.sink.hold(Event::Done(Box::new(self.stats)));
    }

    /// Queues the tokens of the `num_choices` best choices. Replies that the loop guard ended come last: the tokens of
    /// a loop are so probable that it would win.
    fn hold_best(&mut self) {
        self.sequences.sort_by(|a, b| {
            let by_logprob = b.mean_logprob().total_cmp(&a.mean_logprob());
            a.is_loop().cmp(&b.is_loop()).then(by_logprob).then(a.choice.cmp(&b.choice))
        });
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
