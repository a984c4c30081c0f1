//! A generation: prompts go to the engine, pieces of text come back, for readers that block and for async tasks.
//!
//! Dropping a [`Generation`] cancels its requests: the engine frees their KV blocks before its next step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pellucid_engine::{Control, Error, Event, Request, RequestStats, SpeculationStats, fallible};

use crate::event_channel::{ChannelEvent, EventReceiver, Monitor, PromptEvent, Reads, channel};
use crate::prompt_replies::PromptReplies;
use crate::{Delta, Finish, GuardError, JudgedPrompt, LoadedModel, ReplySplitter, Summary, Turn, Verdict};

/// One or more prompts that are submitted together.
#[derive(Debug, Clone, Default)]
pub struct GenerationRequest {
    /// The prompts, all or none of which the engine accepts.
    pub prompts: Vec<PromptRequest>,
    /// Each reply ends before the first of these texts that it completes.
    pub stop: Vec<String>,
    /// Whether to report how far the prompts are prefilled.
    pub reports_progress: bool,
}

/// One prompt of a generation.
#[derive(Debug, Clone)]
pub struct PromptRequest {
    /// The request to the engine.
    pub request: Request,
    /// Text to return before each reply.
    pub echo: Option<String>,
    /// Whether only the echo is wanted; the engine generates at least one token, which is then not shown.
    pub drops_output: bool,
    /// Whether to report the ids of the reply's tokens.
    pub reports_ids: bool,
    /// Whether the reply continues the prompt's text, so that a space at its beginning is text.
    pub continues_text: bool,
    /// Separates thoughts and calls from the text; `None` shows the reply as it is.
    pub splitter: Option<ReplySplitter>,
    /// Messages of the prompt, for guards that judge conversations; none if it is a text.
    pub turns: Vec<Turn>,
    /// The header `traceparent` of the request, which guards pass on to their services.
    pub traceparent: Option<Arc<str>>,
    /// Says that the guards of the model have passed the prompt; see [`LoadedModel::judge`].
    pub judged: Option<JudgedPrompt>,
}

impl PromptRequest {
    /// Returns a prompt whose reply is a text of its own, as in a chat.
    pub fn chat(request: Request) -> PromptRequest {
        PromptRequest {
            request,
            echo: None,
            drops_output: false,
            reports_ids: false,
            continues_text: false,
            splitter: None,
            turns: Vec::new(),
            traceparent: None,
            judged: None,
        }
    }

    /// Returns a prompt whose reply continues its text.
    pub fn text(request: Request) -> PromptRequest {
        PromptRequest { continues_text: true, ..PromptRequest::chat(request) }
    }
}

impl GenerationRequest {
    /// Returns a generation of one prompt without stop strings.
    pub fn new(prompt: PromptRequest) -> GenerationRequest {
        GenerationRequest { prompts: vec![prompt], ..GenerationRequest::default() }
    }
}

/// One thing that a generation reports.
#[derive(Debug, Clone)]
pub enum GenerationEvent {
    /// The next piece of a choice.
    Delta(Delta),
    /// `computed` of the `total` tokens of a prompt are prefilled.
    PromptProgress {
        /// Number of the prompt.
        prompt: usize,
        /// Tokens prefilled or found in the prefix cache.
        computed: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// The oldest control message that was not acknowledged yet has taken effect.
    ControlApplied {
        /// Number of the prompt.
        prompt: usize,
        /// Tokens that all choices of the prompt had by then.
        output_tokens: usize,
    },
}

/// Replies under way. Iterating over it blocks; [`Generation::next_event`] is for async tasks. Both end after the last
/// piece, or after the error that ended the generation.
#[derive(Debug)]
pub struct Generation {
    receiver: EventReceiver,
    prompts: Vec<PromptReplies>,
    /// Events to return before the engine's next one is read.
    ready: VecDeque<GenerationEvent>,
    submitted: Instant,
    has_failed: bool,
}

impl Generation {
    /// Submits all prompts, or none. Never waits for the engine: a full queue is an error. If the model has guards,
    /// they must have judged the prompts; see [`LoadedModel::judge`].
    pub fn submit(model: &LoadedModel, request: GenerationRequest) -> Result<Generation, Error> {
        if !model.guards.is_empty() && request.prompts.iter().any(|prompt| prompt.judged.is_none()) {
            return Err(Error::Internal("no guard has judged the prompt".into()));
        }
        let submitted = Instant::now();
        let mut prompts: Vec<PromptReplies> = fallible::with_capacity(request.prompts.len())?;
        let (sinks, receiver) = channel(request.prompts.len(), request.reports_progress);
        let mut num_choices = 0;
        for prompt in &request.prompts {
            let replies = PromptReplies::new(prompt, num_choices, &request.stop, (model, &receiver), submitted)?;
            num_choices += replies.choices.len();
            prompts.push(replies);
        }
        let mut requests = fallible::with_capacity(prompts.len())?;
        for (mut prompt, sink) in request.prompts.into_iter().zip(sinks) {
            // Whether a reply is blocked is known after it is generated, so none of them enters the prefix cache.
            prompt.request.caches_reply &= model.guards.is_empty();
            requests.push((prompt.request, Box::new(sink) as _));
        }
        model.engine.submit_all(requests)?;
        let mut ready = VecDeque::new();
        for prompt in &mut prompts {
            ready.extend(prompt.opening()?.into_iter().map(GenerationEvent::Delta));
        }
        Ok(Generation { receiver, prompts, ready, submitted, has_failed: false })
    }

    /// Returns what watches this generation from other threads, and can cancel it.
    pub fn monitor(&self) -> Monitor {
        self.receiver.monitor()
    }

    /// Number of choices over all prompts.
    pub fn num_choices(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.choices.len()).sum()
    }

    /// Waits for the next event in an async task; `None` after the last.
    pub async fn next_event(&mut self) -> Option<Result<GenerationEvent, Error>> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// Returns the next event if there is one; otherwise the task is woken when there is.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<GenerationEvent, Error>>> {
        self.advance(|receiver, reads| receiver.poll(reads, context))
    }

    /// Blocks until there is an event, but no longer than `timeout`: `Pending` means that the time has passed.
    pub fn next_within(&mut self, timeout: Duration) -> Poll<Option<Result<GenerationEvent, Error>>> {
        // A timeout too long for the clock is none.
        let deadline = Instant::now().checked_add(timeout);
        self.advance(|receiver, reads| receiver.wait(reads, deadline))
    }

    /// Blocks until all replies are complete and returns them, one [`Delta`] for each choice.
    pub fn into_replies(mut self) -> Result<(Vec<Delta>, Summary), Error> {
        let mut replies: Vec<Delta> = (0..self.num_choices()).map(Delta::new).collect();
        for event in &mut self {
            if let GenerationEvent::Delta(delta) = event? {
                replies[delta.choice].append(delta)?;
            }
        }
        Ok((replies, self.summary()))
    }

    /// Sends a control message to the request of a prompt. New sampling parameters also change from which token on stop
    /// strings take effect, when the engine has applied them. They must have passed
    /// [`pellucid_engine::EngineHandle::check_sampling`].
    pub fn control(&mut self, prompt: usize, control: Control) {
        let pending = &mut self.prompts[prompt].pending_controls;
        match &control {
            Control::Update(params) => pending.push_back(Some(params.min_tokens as usize)),
            // The end of a choice is not acknowledged.
            Control::End { .. } => {}
            _ => pending.push_back(None),
        }
        self.receiver.control(prompt, control);
    }

    /// Returns the text that is held back, for a reader that shows what there is and then drops the generation. Text
    /// that a guard has not passed is not returned.
    pub fn flush(&mut self) -> Vec<Delta> {
        self.prompts.iter_mut().flat_map(PromptReplies::flush).filter(|delta| !delta.is_empty()).collect()
    }

    /// Whether all replies are complete and every event was read.
    pub fn is_over(&self) -> bool {
        self.ready.is_empty() && (self.has_failed || self.is_complete())
    }

    /// Tokens generated so far, those that are held back included.
    pub fn num_output_tokens(&self) -> usize {
        self.prompts.iter().map(PromptReplies::num_output).sum()
    }

    /// Returns the engine's own numbers for a prompt; `None` until its request is done.
    pub fn stats(&self, prompt: usize) -> Option<RequestStats> {
        self.prompts[prompt].stats
    }

    /// Returns counts and times so far.
    pub fn summary(&self) -> Summary {
        let total_time = self.submitted.elapsed();
        let longest = |time: &dyn Fn(&PromptReplies) -> Option<Duration>| self.prompts.iter().filter_map(time).max();
        let mut speculation = SpeculationStats::default();
        self.prompts.iter().for_each(|prompt| speculation += prompt.speculation());
        let finishes: Vec<Option<Finish>> =
            self.prompts.iter().flat_map(|prompt| &prompt.choices).map(|choice| choice.finish().cloned()).collect();
        // The layers of a token that a guard blocked would show it.
        let is_blocked = finishes.iter().any(|finish| matches!(finish, Some(Finish::ContentFilter { .. })));
        Summary {
            prompt_tokens: self.prompts.iter().map(|prompt| prompt.num_prompt).sum(),
            completion_tokens: self.num_output_tokens(),
            thought_tokens: self.prompts.iter().map(PromptReplies::num_thought_tokens).sum(),
            cached_tokens: self.prompts.iter().map(|prompt| prompt.cached_tokens).sum(),
            preemptions: self.prompts.iter().filter_map(|prompt| Some(prompt.stats?.preemptions)).sum(),
            speculation,
            queue_time: longest(&|prompt| prompt.timing.queue_time(prompt.stats.as_ref())).unwrap_or(total_time),
            time_to_first_token: longest(&|prompt| prompt.timing.time_to_first_token(prompt.stats.as_ref())),
            prefill_time: longest(&|prompt| {
                let stats = prompt.stats.as_ref();
                let first = prompt.timing.time_to_first_token(stats)?;
                Some(first.saturating_sub(prompt.timing.queue_time(stats).unwrap_or_default()))
            }),
            gaps: (self.prompts.iter())
                .map(|prompt| Some(prompt.stats?.gaps))
                .reduce(|all, gaps| {
                    let mut sum = all?;
                    sum += gaps?;
                    Some(sum)
                })
                .flatten(),
            misses: self.prompts.iter().filter_map(|prompt| prompt.miss.clone()).collect(),
            decode_time: longest(&|prompt| prompt.timing.decode_time(prompt.stats.as_ref())).unwrap_or_default(),
            time_per_output_token: longest(&|prompt| {
                prompt.timing.time_per_output_token(prompt.stats.as_ref(), prompt.longest_choice())
            }),
            sampling_time: longest(&|prompt| Some(prompt.stats?.sampling_time)),
            guard_time: longest(&PromptReplies::guard_time),
            total_time,
            probe: self.prompts.iter().find_map(|prompt| prompt.probe.clone()).filter(|_| !is_blocked),
            finishes,
        }
    }

    fn is_complete(&self) -> bool {
        self.prompts.iter().all(PromptReplies::is_over)
    }

    /// Reads events with `read` until one produces something to return.
    fn advance(
        &mut self,
        mut read: impl FnMut(&EventReceiver, Reads) -> Poll<Option<ChannelEvent>>,
    ) -> Poll<Option<Result<GenerationEvent, Error>>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if self.is_over() {
                return Poll::Ready(None);
            }
            let is_congested = self.prompts.iter().any(PromptReplies::is_congested);
            let reads = if is_congested { Reads::Verdicts } else { Reads::All };
            let taken = match read(&self.receiver, reads) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => Err(Error::Stopped),
                Poll::Ready(Some(ChannelEvent::Engine(PromptEvent { event: Event::Failed(error), .. }))) => Err(error),
                Poll::Ready(Some(ChannelEvent::Engine(event))) => self.take(event),
                Poll::Ready(Some(ChannelEvent::Verdict { choice, guard, verdict })) => {
                    self.take_verdict(choice, guard, verdict)
                }
            };
            let Err(error) = taken else { continue };
            self.has_failed = true;
            return Poll::Ready(Some(Err(error)));
        }
    }

    fn take(&mut self, PromptEvent { prompt, event, sent }: PromptEvent) -> Result<(), Error> {
        match event {
            Event::PromptProgress { computed, total } => {
                fallible::push_back(&mut self.ready, GenerationEvent::PromptProgress { prompt, computed, total })?;
            }
            Event::ControlApplied { output_tokens } => {
                let PromptReplies { pending_controls, choices, .. } = &mut self.prompts[prompt];
                if let Some(min_tokens) = pending_controls.pop_front().flatten() {
                    choices.iter_mut().for_each(|choice| choice.set_min_tokens(min_tokens));
                }
                fallible::push_back(&mut self.ready, GenerationEvent::ControlApplied { prompt, output_tokens })?;
            }
            event => {
                let may_go_on = matches!(event, Event::Token(_));
                let deltas = self.prompts[prompt].take(event, sent)?;
                self.add(prompt, deltas, may_go_on)?;
            }
        }
        Ok(())
    }

    fn take_verdict(&mut self, choice: usize, guard: usize, verdict: Result<Verdict, GuardError>) -> Result<(), Error> {
        let found = self.prompts.iter().position(|prompt| prompt.has_choice(choice));
        let prompt = found.ok_or_else(|| Error::Internal("a verdict on an unknown choice".into()))?;
        let deltas = self.prompts[prompt].take_verdict(choice, guard, verdict);
        self.add(prompt, deltas, true)
    }

    /// Adds pieces to return. `may_go_on` says that the engine may still generate for a choice that ends here.
    fn add(&mut self, prompt: usize, deltas: Vec<Delta>, may_go_on: bool) -> Result<(), Error> {
        for delta in deltas {
            let is_stopped = matches!(delta.finish, Some(Finish::StopString(_) | Finish::ContentFilter { .. }));
            // A generation that is complete is dropped, which ends the rest of its requests.
            if is_stopped && may_go_on && !self.is_complete() {
                let choice = self.prompts[prompt].local(delta.choice);
                self.receiver.control(prompt, Control::End { choice });
            }
            if !delta.is_empty() {
                fallible::push_back(&mut self.ready, GenerationEvent::Delta(delta))?;
            }
        }
        Ok(())
    }
}

impl Iterator for Generation {
    type Item = Result<GenerationEvent, Error>;

    /// Blocks until there is an event.
    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(|receiver, reads| receiver.wait(reads, None)) {
            Poll::Ready(event) => event,
            // Without a timeout the receiver never gives up.
            Poll::Pending => None,
        }
    }
}
