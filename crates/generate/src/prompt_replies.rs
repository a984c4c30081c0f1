//! The replies to one prompt: takes the engine's events and returns the pieces of text that they release.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pellucid_engine::{
    Beam, DraftCounts, Error, Event, FinishReason, RequestStats, SpeculationStats, TokenEvent, fallible,
};
use pellucid_sampling::Logprobs;
use pellucid_tokenizer::{TextStream, Tokenizer};

use crate::choice_text::TextRules;
use crate::event_channel::EventReceiver;
use crate::generation::PromptRequest;
use crate::guard::{GuardedChoice, JudgedPrompt, Piece};
use crate::summary::Timing;
use crate::{
    ChoiceText, Delta, Finish, GuardError, LoadedModel, PartKind, ReplyMiss, ReplyProbe, ReplyToken, ReplyTrace,
    Verdict,
};

#[derive(Debug)]
pub(crate) struct PromptReplies {
    pub(crate) choices: Vec<ChoiceText>,
    /// Number of the first choice, counted over all prompts of the generation.
    first_choice: usize,
    /// Guards of each choice; empty without guards.
    guarded: Vec<GuardedChoice>,
    pub(crate) num_prompt: usize,
    /// Tokens of a prompt that is scored, for its echo.
    scored: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    /// Text of the prompt that is still to be returned.
    echo: Option<String>,
    /// The prompt's log probabilities are returned with the echo.
    is_scored: bool,
    drops_output: bool,
    /// `best_of` or beam search generates more than it returns.
    ranks_replies: bool,
    end_ids: Vec<u32>,
    /// `min_tokens` of each control message that the engine has not acknowledged, if the message changes it.
    pub(crate) pending_controls: VecDeque<Option<usize>>,
    pub(crate) cached_tokens: usize,
    pub(crate) timing: Timing,
    /// Why the prompt was not found whole in the prefix cache.
    pub(crate) miss: Option<Arc<ReplyMiss>>,
    /// Time that the guards took for the prompt; `None` without guards.
    judging_time: Option<Duration>,
    /// Result of the request's probe.
    pub(crate) probe: Option<Arc<ReplyProbe>>,
    /// Drafted tokens at the positions of the reply so far.
    proposed: SpeculationStats,
    /// The engine's own numbers, when the request is done.
    pub(crate) stats: Option<RequestStats>,
}

impl PromptReplies {
    pub(crate) fn new(
        prompt: &PromptRequest,
        first_choice: usize,
        stop: &[String],
        (model, receiver): (&LoadedModel, &EventReceiver),
        submitted: Instant,
    ) -> Result<PromptReplies, Error> {
        let (request, tokenizer) = (&prompt.request, &model.tokenizer);
        let stream = if prompt.continues_text {
            TextStream::after(tokenizer.clone(), true, &request.prompt)
        } else {
            TextStream::new(tokenizer.clone(), true)
        };
        let rules = TextRules {
            stop,
            min_tokens: request.sampling.min_tokens as usize,
            reports_logprobs: request.sampling.logprobs.is_some(),
            reports_ids: prompt.reports_ids,
            splitter: prompt.splitter.as_ref(),
        };
        let num_choices = request.beams.map_or(request.num_choices, |beams| beams.num_returned);
        let choices = first_choice..first_choice + num_choices;
        let judged = prompt.judged.as_ref().filter(|_| !model.guards.is_empty());
        Ok(PromptReplies {
            judging_time: judged.map(JudgedPrompt::time),
            guarded: match judged {
                None => Vec::new(),
                Some(judged) => {
                    let guard = |i| GuardedChoice::new(&model.guards, judged.text(), &receiver.verdicts(i));
                    choices.clone().map(guard).collect()
                }
            },
            first_choice,
            choices: choices.map(|choice| ChoiceText::new(choice, stream.clone(), rules)).collect(),
            num_prompt: request.prompt.len(),
            scored: fallible::copy_of(if request.score_prompt { &request.prompt } else { &[] })?,
            tokenizer: tokenizer.clone(),
            echo: prompt.echo.as_deref().map(fallible::string_of).transpose()?,
            is_scored: request.score_prompt,
            drops_output: prompt.drops_output,
            ranks_replies: request.beams.is_some() || request.best_of > request.num_choices,
            end_ids: request.sampling.end_ids.clone(),
            pending_controls: VecDeque::new(),
            cached_tokens: 0,
            timing: Timing::new(submitted, num_choices, judged.is_some()),
            miss: None,
            probe: None,
            proposed: SpeculationStats::default(),
            stats: None,
        })
    }

    /// Returns the echo of the prompt if it can be sent before the first event. An echo with log probabilities waits
    /// until they are computed.
    pub(crate) fn opening(&mut self) -> Result<Vec<Delta>, Error> {
        // The first token has no log probability, so a prompt of one token has none to wait for.
        let echo = if self.is_scored && self.num_prompt > 1 { Vec::new() } else { self.echo(Vec::new())? };
        Ok(self.guard(echo))
    }

    /// Takes an event that produces text or counts; others produce nothing. Text is returned when the guards have
    /// passed it. `sent` is when the engine sent the event.
    pub(crate) fn take(&mut self, event: Event, sent: Instant) -> Result<Vec<Delta>, Error> {
        let deltas = self.decode(event, sent)?;
        Ok(self.guard(deltas))
    }

    /// Returns the text of every choice that is held back, as far as the guards have passed it.
    pub(crate) fn flush(&mut self) -> Vec<Delta> {
        let flushed = self.choices.iter_mut().map(ChoiceText::flush).collect();
        self.guard(flushed)
    }

    /// Returns the pieces that the guards have passed. A choice that they block ends.
    fn guard(&mut self, deltas: Vec<Delta>) -> Vec<Delta> {
        if self.guarded.is_empty() {
            return deltas;
        }
        let mut passed = Vec::new();
        for delta in deltas.into_iter().filter(|delta| !delta.is_empty()) {
            let choice = self.local(delta.choice);
            let text = &self.choices[choice];
            let (num_tokens, num_thought_tokens) = (text.num_tokens(), text.num_thought_tokens());
            let pieces = self.guarded[choice].push(Piece { delta, num_tokens, num_thought_tokens });
            passed.extend(self.show(choice, pieces));
        }
        passed
    }

    /// Returns pieces that the guards have passed, and ends the choice if they block it.
    fn show(&mut self, choice: usize, pieces: Vec<Piece>) -> Vec<Delta> {
        let show = |piece: Piece| {
            if let Some(finish @ Finish::ContentFilter { .. }) = &piece.delta.finish {
                self.choices[choice].block(finish.clone(), piece.num_tokens, piece.num_thought_tokens);
                self.timing.cut(choice, piece.num_tokens);
            }
            piece.delta
        };
        pieces.into_iter().map(show).collect()
    }

    /// Takes the verdict of guard number `guard` on a choice, counted over all prompts.
    pub(crate) fn take_verdict(
        &mut self,
        choice: usize,
        guard: usize,
        verdict: Result<Verdict, GuardError>,
    ) -> Vec<Delta> {
        let choice = self.local(choice);
        let pieces = self.guarded[choice].take_verdict(guard, verdict);
        self.show(choice, pieces)
    }

    /// Whether a choice, counted over all prompts, belongs to this prompt.
    pub(crate) fn has_choice(&self, choice: usize) -> bool {
        (self.first_choice..self.first_choice + self.choices.len()).contains(&choice)
    }

    /// Number of a choice among those of this prompt.
    pub(crate) fn local(&self, choice: usize) -> usize {
        choice - self.first_choice
    }

    /// Time that the guards took so far, for the prompt and for all choices; `None` without guards.
    pub(crate) fn guard_time(&self) -> Option<Duration> {
        Some(self.judging_time? + self.guarded.iter().map(GuardedChoice::time).sum::<Duration>())
    }

    /// Whether so much waits for verdicts that no more events of the engine may be read.
    pub(crate) fn is_congested(&self) -> bool {
        self.guarded.iter().any(GuardedChoice::is_congested)
    }

    fn decode(&mut self, event: Event, sent: Instant) -> Result<Vec<Delta>, Error> {
        Ok(match event {
            Event::Started { cached_tokens, miss } => {
                self.cached_tokens = cached_tokens;
                let tokenizer = self.tokenizer.clone();
                self.miss = miss.map(|miss| Arc::new(ReplyMiss { miss: *miss, tokenizer }));
                self.timing.start(sent);
                Vec::new()
            }
            Event::Probed(probe) => {
                let tokenizer = self.tokenizer.clone();
                self.probe = Some(Arc::new(ReplyProbe { probe: *probe, tokenizer }));
                Vec::new()
            }
            Event::PromptLogprobs(scores) => self.echo(scores)?,
            Event::Token(token) => {
                // Tokens that were computed behind the end of their choice are not part of it.
                if self.choices[token.choice].finish().is_none() {
                    self.timing.token(token.choice, sent)?;
                }
                if self.drops_output {
                    return Ok(Vec::new());
                }
                self.count_proposal(&token);
                vec![self.choices[token.choice].push(token)]
            }
            Event::ChoiceEnd { choice, reason, token } => {
                token.iter().for_each(|token| self.count_proposal(token));
                let mut delta = self.choices[choice].end(Finish::new(reason, token.as_ref()));
                // The token that ended the choice is not part of the reply; its trace is reported.
                if delta.finish.is_some() {
                    delta.traces.extend(token.and_then(ReplyTrace::of));
                }
                vec![delta]
            }
            Event::Beams { beams, reason } => self.take_beams(&beams, reason)?,
            Event::Done(stats) => {
                self.stats = Some(*stats);
                Vec::new()
            }
            Event::PromptProgress { .. } | Event::ControlApplied { .. } | Event::Failed(_) => Vec::new(),
        })
    }

    /// Whether nothing more will be shown. A choice that ended at a stop string or at a guard does not wait for the
    /// engine.
    pub(crate) fn is_over(&self) -> bool {
        if self.guarded.iter().any(GuardedChoice::holds_pieces) {
            return false;
        }
        let has_stopped =
            |choice: &ChoiceText| matches!(choice.finish(), Some(Finish::StopString(_) | Finish::ContentFilter { .. }));
        // Ranked replies wait for the engine's numbers, which count more tokens than are shown.
        self.stats.is_some() || !self.ranks_replies && self.choices.iter().all(has_stopped)
    }

    /// Generated tokens so far.
    pub(crate) fn num_output(&self) -> usize {
        if self.drops_output {
            return 0;
        }
        let shown = self.choices.iter().map(ChoiceText::num_tokens).sum();
        // Ranked replies that were not returned count. Tokens that the engine computed behind a stop string, before it
        // was told of it, do not.
        self.stats.filter(|_| self.ranks_replies).map_or(shown, |stats| stats.output_tokens.max(shown))
    }

    /// Generated tokens of thoughts so far, in the choices that are returned.
    pub(crate) fn num_thought_tokens(&self) -> usize {
        self.choices.iter().map(ChoiceText::num_thought_tokens).sum()
    }

    /// Returns the counts of drafted tokens: the engine's own when the request is done. A reply that a stop string ends
    /// does not wait for those; its counts hold what was proposed for the tokens that it has.
    pub(crate) fn speculation(&self) -> SpeculationStats {
        self.stats.map_or(self.proposed, |stats| stats.speculation)
    }

    /// Counts what was proposed for a token, unless its choice has ended.
    fn count_proposal(&mut self, token: &TokenEvent) {
        if let (Some(proposal), None) = (token.proposal, self.choices[token.choice].finish()) {
            let accepted = u64::from(proposal.token == token.id);
            self.proposed.add(proposal.drafter, DraftCounts { drafted: 1, accepted });
        }
    }

    pub(crate) fn longest_choice(&self) -> usize {
        self.choices.iter().map(ChoiceText::num_tokens).max().unwrap_or(0)
    }

    /// Returns the prompt's text and tokens, once for each choice.
    fn echo(&mut self, scores: Vec<Logprobs>) -> Result<Vec<Delta>, Error> {
        let Some(text) = self.echo.take() else { return Ok(Vec::new()) };
        let mut tokens = fallible::with_capacity(self.scored.len())?;
        if self.is_scored {
            // The first token has no log probability.
            let mut scores = std::iter::once(None).chain(scores.into_iter().map(Some));
            let mut stream = self.tokenizer.stream(true);
            let mut offset = 0;
            for &id in &self.scored {
                let logprobs = scores.next().flatten();
                tokens.push(ReplyToken {
                    id,
                    logprobs,
                    offset,
                    at_start: stream.is_at_start(),
                    part: PartKind::Answer,
                });
                offset += stream.push(id).chars().count();
            }
        }
        // The last choice takes the tokens: those of a long prompt take much memory.
        let last = self.choices.len().saturating_sub(1);
        let echo = |(i, choice): (usize, &mut ChoiceText)| {
            let tokens = if i == last { std::mem::take(&mut tokens) } else { fallible::copy_of(&tokens)? };
            Ok(choice.echo(fallible::string_of(&text)?, tokens))
        };
        self.choices.iter_mut().enumerate().map(echo).collect()
    }

    /// `reason` applies to beams that do not end in an end token, and to choices for which a search that was cut short
    /// has no beam.
    fn take_beams(&mut self, beams: &[Beam], reason: FinishReason) -> Result<Vec<Delta>, Error> {
        let mut deltas = Vec::new();
        let mut beams = beams.iter();
        for choice in &mut self.choices {
            let beam = beams.next();
            let ids = beam.map_or(&[][..], |beam| &beam.ids);
            // The search counts the end token among a beam's ids.
            let end = ids.last().copied().filter(|last| self.end_ids.contains(last));
            for &id in &ids[..ids.len() - usize::from(end.is_some())] {
                let (logprobs, trace, proposal) = (None, None, None);
                let delta = choice.push(TokenEvent { choice: 0, id, logprobs, trace, proposal, batch_size: 0 });
                if !delta.is_empty() {
                    fallible::push(&mut deltas, delta)?;
                }
            }
            let finish = if end.is_some() { Finish::EndToken(end) } else { Finish::new(reason, None) };
            fallible::push(&mut deltas, Delta { score: beam.map(|beam| beam.score), ..choice.end(finish) })?;
        }
        Ok(deltas)
    }
}
