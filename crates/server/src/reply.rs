//! A reply in the making: what was asked, the events that answer it, and the numbers at the end. Knows no HTTP: whole replies, streams
//! and WebSockets take its pieces and wrap them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pellucid_engine::{Beam, Control, Event, FinishReason, Request, RequestStats, TokenEvent};
use pellucid_sampling::{Logprobs, MAX_LOGPROBS, SamplingParams};
use pellucid_tokenizer::{TextStream, Tokenizer};

use crate::choice::{ChoiceText, Delta, Ending, ShownToken};
use crate::error::ApiError;
use crate::generation::Generation;
use crate::openai::common::Streaming;
use crate::openai::sampling::SamplingFields;

/// Which shape a reply has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Chat,
    Completions,
}

/// A request that was read and checked.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) dialect: Dialect,
    pub(crate) prompts: Vec<PromptSpec>,
    /// What the client said of the draw; the requests hold what that means.
    pub(crate) sampling: SamplingFields,
    /// Replies to each prompt.
    pub(crate) num_choices: usize,
    pub(crate) stops: Vec<String>,
    /// Report log probabilities, and so many beside the token's own.
    pub(crate) logprobs: Option<u32>,
    pub(crate) streaming: Option<Streaming>,
    pub(crate) user: Option<String>,
}

/// One of its prompts.
#[derive(Debug)]
pub(crate) struct PromptSpec {
    pub(crate) request: Request,
    /// Text to give back before the reply.
    pub(crate) echo: Option<String>,
    /// The prompt is all that is wanted.
    pub(crate) drops_output: bool,
    /// The reply goes on in the prompt's own text, where a leading space is text.
    pub(crate) continues_text: bool,
}

impl Spec {
    pub(crate) fn num_prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.request.prompt.len()).sum()
    }

    /// Log probabilities that each token of the output reports. A trace shows up to twenty candidates.
    pub(crate) fn logprobs_a_token(&self) -> usize {
        let is_traced = self.prompts.iter().any(|prompt| prompt.request.trace);
        let traced = if is_traced { MAX_LOGPROBS as usize } else { 0 };
        self.logprobs.map_or(0, |count| count as usize + 1) + traced
    }
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Reply {
    parts: Vec<Part>,
    /// What the client said of the draw, and what that means.
    pub(crate) sampling: SamplingFields,
    pub(crate) params: SamplingParams,
    /// It is searched for, not drawn.
    pub(crate) is_search: bool,
    submitted: Instant,
}

/// The replies to one prompt.
#[derive(Debug)]
struct Part {
    choices: Vec<ChoiceText>,
    prompt: Vec<u32>,
    echo: Option<String>,
    /// The prompt's log probabilities go with the echo.
    is_scored: bool,
    drops_output: bool,
    /// More is made than is returned.
    holds_back: bool,
    end_ids: Vec<u32>,
    cached_tokens: usize,
    begun: Option<Instant>,
    first_token: Option<Instant>,
    stats: Option<RequestStats>,
}

/// The numbers of a reply.
#[derive(Debug, Clone, Default)]
pub(crate) struct Summary {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) preemptions: usize,
    pub(crate) queue_time: Duration,
    /// `None` when there was no token.
    pub(crate) time_to_first_token: Option<Duration>,
    pub(crate) decode_time: Duration,
    /// Tokens after the first of each choice, which that time was spent on.
    pub(crate) time_per_output_token: Option<Duration>,
    pub(crate) total_time: Duration,
    /// By choice; absent where it has not ended.
    pub(crate) endings: Vec<Option<Ending>>,
}

impl Reply {
    /// The reply to come, and the requests to submit for it.
    pub(crate) fn new(spec: Spec, tokenizer: &Arc<Tokenizer>) -> (Reply, Vec<Request>) {
        let mut requests = Vec::with_capacity(spec.prompts.len());
        let mut parts = Vec::with_capacity(spec.prompts.len());
        let mut index = 0;
        for prompt in spec.prompts {
            let request = prompt.request;
            let stream = if prompt.continues_text {
                TextStream::after(tokenizer.clone(), true, &request.prompt)
            } else {
                TextStream::new(tokenizer.clone(), true)
            };
            let min_tokens = request.sampling.min_tokens as usize;
            let choice =
                |index| ChoiceText::new(index, stream.clone(), &spec.stops, min_tokens, spec.logprobs.is_some());
            parts.push(Part {
                choices: (index..index + spec.num_choices).map(choice).collect(),
                is_scored: request.score_prompt,
                prompt: request.prompt.clone(),
                echo: prompt.echo,
                drops_output: prompt.drops_output,
                holds_back: request.beams.is_some() || request.best_of > request.num_choices,
                end_ids: request.sampling.end_ids.clone(),
                cached_tokens: 0,
                begun: None,
                first_token: None,
                stats: None,
            });
            index += spec.num_choices;
            requests.push(request);
        }
        let params = requests.first().map(|request| request.sampling.clone()).unwrap_or_default();
        let is_search = requests.iter().any(|request| request.beams.is_some());
        (Reply { parts, sampling: spec.sampling, params, is_search, submitted: Instant::now() }, requests)
    }

    /// The draw goes on with other parameters.
    pub(crate) fn update(&mut self, sampling: SamplingFields, params: SamplingParams) {
        for choice in self.parts.iter_mut().flat_map(|part| &mut part.choices) {
            choice.set_min_tokens(params.min_tokens as usize);
        }
        (self.sampling, self.params) = (sampling, params);
    }

    pub(crate) fn num_choices(&self) -> usize {
        self.parts.iter().map(|part| part.choices.len()).sum()
    }

    /// What can be shown before the first event.
    pub(crate) fn opening(&mut self, tokenizer: &Tokenizer) -> Vec<Delta> {
        // A prompt of one token has nothing to be scored.
        let waiting = self.parts.iter_mut().filter(|part| !part.is_scored || part.prompt.len() == 1);
        waiting.flat_map(|part| part.echo(tokenizer, &[])).collect()
    }

    /// Takes an event and gives what it lets be shown. A failure ends the whole reply.
    pub(crate) fn take(
        &mut self,
        part: usize,
        event: Event,
        generation: &Generation,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Delta>, ApiError> {
        let this = &mut self.parts[part];
        let mut stopped = None;
        let deltas = match event {
            Event::Started { cached_tokens } => {
                this.cached_tokens = cached_tokens;
                this.begun = Some(Instant::now());
                Vec::new()
            }
            Event::PromptProgress { .. } | Event::ControlApplied { .. } => Vec::new(),
            Event::PromptLogprobs(scores) => this.echo(tokenizer, &scores),
            Event::Token(token) => {
                this.first_token.get_or_insert_with(Instant::now);
                if this.drops_output {
                    return Ok(Vec::new());
                }
                let choice = token.choice;
                let delta = this.choices[choice].push(token);
                stopped = delta.ending.as_ref().map(|_| choice);
                vec![delta]
            }
            Event::ChoiceEnd { choice, reason, token } => {
                let mut delta = this.choices[choice].end(ending(reason, token.as_ref()));
                // The token that ended it is no part of the reply, and how it was chosen is.
                if delta.ending.is_some() {
                    delta.traces.extend(token.and_then(|token| token.trace).map(|trace| *trace));
                }
                vec![delta]
            }
            Event::Beams { beams, reason } => this.take_beams(&beams, reason),
            Event::Done(stats) => {
                this.stats = Some(stats);
                Vec::new()
            }
            Event::Failed(error) => return Err(error.into()),
        };
        // A reply that is over is dropped as a whole, which ends what is left of it.
        if let Some(choice) = stopped.filter(|_| !self.is_over()) {
            generation.control(part, Control::End { choice });
        }
        Ok(deltas.into_iter().filter(|delta| !delta.is_empty()).collect())
    }

    /// Whether nothing more will be shown. A choice that was stopped by its text does not wait for the engine to agree.
    pub(crate) fn is_over(&self) -> bool {
        self.parts.iter().all(Part::is_over)
    }

    /// Tokens that were shown or held back so far.
    pub(crate) fn num_output_tokens(&self) -> usize {
        self.parts.iter().map(Part::num_output).sum()
    }

    pub(crate) fn summary(&self) -> Summary {
        let now = Instant::now();
        let longest = |time: &dyn Fn(&Part) -> Option<Duration>| self.parts.iter().filter_map(time).max();
        let submitted = self.submitted;
        Summary {
            prompt_tokens: self.parts.iter().map(|part| part.prompt.len()).sum(),
            completion_tokens: self.num_output_tokens(),
            cached_tokens: self.parts.iter().map(|part| part.cached_tokens).sum(),
            preemptions: self.parts.iter().filter_map(|part| Some(part.stats?.preemptions)).sum(),
            queue_time: longest(&|part| part.queue_time(submitted)).unwrap_or(now - submitted),
            time_to_first_token: longest(&|part| part.time_to_first_token(submitted)),
            decode_time: longest(&|part| part.decode_time(now)).unwrap_or_default(),
            time_per_output_token: longest(&|part| part.time_per_output_token(now)),
            total_time: now - submitted,
            endings: self.parts.iter().flat_map(|part| &part.choices).map(|choice| choice.ending.clone()).collect(),
        }
    }
}

impl Part {
    fn is_over(&self) -> bool {
        let has_stopped = |choice: &ChoiceText| matches!(choice.ending, Some(Ending::StopText(_)));
        // What was held back comes with its numbers, which count more than is shown.
        self.stats.is_some() || !self.holds_back && self.choices.iter().all(has_stopped)
    }

    fn num_output(&self) -> usize {
        if self.drops_output {
            return 0;
        }
        let shown = self.choices.iter().map(|choice| choice.num_tokens).sum();
        // What `best_of` or a search made and did not return was made all the same. What the engine made after a stop in the text, before it
        // heard of it, was not asked for.
        self.stats.filter(|_| self.holds_back).map_or(shown, |stats| stats.output_tokens.max(shown))
    }

    // The engine's own times where it has told them; until then, when its events were taken.

    fn queue_time(&self, submitted: Instant) -> Option<Duration> {
        self.stats.map(|stats| stats.queue_time).or(self.begun.map(|begun| begun - submitted))
    }

    /// `None` when there was no token.
    fn time_to_first_token(&self, submitted: Instant) -> Option<Duration> {
        let taken = self.first_token? - submitted;
        Some(self.stats.map_or(taken, |stats| stats.time_to_first_token))
    }

    fn decode_time(&self, now: Instant) -> Option<Duration> {
        let taken = now - self.first_token?;
        Some(self.stats.map_or(taken, |stats| stats.decode_time))
    }

    fn time_per_output_token(&self, now: Instant) -> Option<Duration> {
        if let Some(stats) = self.stats {
            return stats.time_per_output_token();
        }
        let longest = self.choices.iter().map(|choice| choice.num_tokens).max()?;
        (now - self.first_token?).checked_div(u32::try_from(longest).ok()?.checked_sub(1)?)
    }

    /// The prompt's own text and tokens, once for each choice.
    fn echo(&mut self, tokenizer: &Tokenizer, scores: &[Logprobs]) -> Vec<Delta> {
        let Some(text) = self.echo.take() else { return Vec::new() };
        let mut tokens = Vec::new();
        if self.is_scored {
            let mut stream = tokenizer.stream(true);
            let mut offset = 0;
            for (i, &id) in self.prompt.iter().enumerate() {
                let logprobs = i.checked_sub(1).and_then(|before| scores.get(before)).cloned();
                tokens.push(ShownToken { id, logprobs, offset });
                offset += stream.push(id).chars().count();
            }
        }
        self.choices.iter_mut().map(|choice| choice.echo(&text, tokens.clone())).collect()
    }

    /// Beams that do not end in an end token go no further for this reason, nor do those that a search cut short has not come to.
    fn take_beams(&mut self, beams: &[Beam], reason: FinishReason) -> Vec<Delta> {
        let mut deltas = Vec::new();
        let nothing = Beam { ids: Vec::new(), score: 0.0 };
        for (choice, beam) in self.choices.iter_mut().zip(beams.iter().chain(std::iter::repeat(&nothing))) {
            // The search counts the end token among a beam's own.
            let (last, has_ended) = match beam.ids.last() {
                Some(last) => (Some(*last), self.end_ids.contains(last)),
                None => (None, false),
            };
            let shown = &beam.ids[..beam.ids.len() - usize::from(has_ended)];
            for &id in shown {
                deltas.push(choice.push(TokenEvent { choice: 0, id, logprobs: None, trace: None }));
            }
            deltas.push(choice.end(if has_ended { Ending::End(last) } else { ending(reason, None) }));
        }
        deltas
    }
}

fn ending(reason: FinishReason, token: Option<&TokenEvent>) -> Ending {
    let id = token.map(|token| token.id);
    match reason {
        FinishReason::End => Ending::End(id),
        FinishReason::Stop => Ending::StopToken(id),
        FinishReason::MaxTokens => Ending::MaxTokens,
        FinishReason::Context => Ending::Context,
        FinishReason::Deadline => Ending::Deadline,
    }
}
