//! The pieces of one choice behind its guards: each is held back until every guard has passed it.
//!
//! Guards form a line: pieces that one guard passes go to the next. When a guard blocks, the pieces before the blocked
//! ones still have to pass the guards behind it, and a last piece without content ends the choice. Pieces are passed or
//! blocked as a whole, so text, log probabilities and traces of a token stay together.
//!
//! A guard with a scanner judges each piece at once. Others judge segments of [`SEGMENT_CHARACTERS`] on a thread of
//! their own; where segments end depends on the text alone, so a reply ends at the same piece however long verdicts
//! take.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reply_text::{ReplyText, num_characters};
use super::{
    GuardError, Guards, OnGuardError, Passage, PromptText, ReplyScanner, Scan, TokenVerdict, Verdict, VerdictKind,
};
use crate::event_channel::VerdictSender;
use crate::{Delta, Finish};

/// Characters of a reply after which a guard without a scanner judges it again. The last segment may be shorter.
pub const SEGMENT_CHARACTERS: usize = 240;
/// Pieces that may wait for a verdict before no more events of the engine are read.
const MAX_WAITING_PIECES: usize = 1024;

/// A piece with the number of tokens that the choice had when it was made.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) delta: Delta,
    pub(crate) num_tokens: usize,
    pub(crate) num_thought_tokens: usize,
}

/// The guards of one choice; see the head of the file.
#[derive(Debug)]
pub(crate) struct GuardedChoice {
    stages: Vec<Stage>,
    /// Whether the last piece was returned. Guards before the one that blocked may still hold pieces, which nobody
    /// will read.
    has_ended: bool,
}

impl GuardedChoice {
    /// Returns the guards of a choice whose prompt they have passed; verdicts arrive through `verdicts`.
    pub(crate) fn new(guards: &Guards, prompt: &Arc<PromptText>, verdicts: &VerdictSender) -> GuardedChoice {
        let stage = |number| Stage::new(guards, number, prompt, verdicts);
        GuardedChoice { stages: (0..guards.len()).map(stage).collect(), has_ended: false }
    }

    /// Adds the next piece and returns those that every guard has passed. The last one has a finish:
    /// [`Finish::ContentFilter`] if the choice is blocked.
    pub(crate) fn push(&mut self, piece: Piece) -> Vec<Piece> {
        self.pass_on(0, vec![piece])
    }

    /// Takes the verdict of guard number `stage` on the segment that it judged.
    pub(crate) fn take_verdict(&mut self, stage: usize, verdict: Result<Verdict, GuardError>) -> Vec<Piece> {
        let passed = self.stages[stage].take_verdict(verdict);
        self.pass_on(stage + 1, passed)
    }

    /// Whether pieces are held back.
    pub(crate) fn holds_pieces(&self) -> bool {
        !self.has_ended && self.stages.iter().any(|stage| !stage.held.is_empty())
    }

    /// Whether so much waits for a verdict that the engine has to wait as well.
    pub(crate) fn is_congested(&self) -> bool {
        !self.has_ended && self.stages.iter().any(|stage| stage.is_waiting() && stage.held.len() >= MAX_WAITING_PIECES)
    }

    /// Time that its guards took so far: scanning, and waiting for the verdicts of guards that judge segments.
    pub(crate) fn time(&self) -> Duration {
        self.stages.iter().map(|stage| stage.time).sum()
    }

    fn pass_on(&mut self, first: usize, mut pieces: Vec<Piece>) -> Vec<Piece> {
        for stage in &mut self.stages[first..] {
            pieces = pieces.into_iter().flat_map(|piece| stage.push(piece)).collect();
        }
        self.has_ended |= pieces.iter().any(|piece| piece.delta.finish.is_some());
        pieces
    }
}

/// One guard of a choice.
#[derive(Debug)]
struct Stage {
    guards: Guards,
    /// Number of the guard in the list.
    number: usize,
    judge: Judge,
    held: VecDeque<Piece>,
    /// Number of the first piece that is held.
    first_held: usize,
    is_over: bool,
    /// Time that the guard took so far.
    time: Duration,
}

#[derive(Debug)]
enum Judge {
    Scanner(Box<dyn ReplyScanner>),
    Segments(Segments),
}

/// The text of a choice for a guard that judges it segment by segment.
#[derive(Debug)]
struct Segments {
    prompt: Arc<PromptText>,
    verdicts: VerdictSender,
    /// Text up to the end of the last segment that the guard was given.
    reply: ReplyText,
    /// Held pieces of that segment.
    num_given: usize,
    /// Time at which the guard was given a segment on which its verdict is outstanding.
    given: Option<Instant>,
}

impl Stage {
    fn new(guards: &Guards, number: usize, prompt: &Arc<PromptText>, verdicts: &VerdictSender) -> Stage {
        let judge = match guards.guard(number).scanner() {
            Some(scanner) => Judge::Scanner(scanner),
            None => Judge::Segments(Segments {
                prompt: prompt.clone(),
                verdicts: verdicts.clone(),
                reply: ReplyText::default(),
                num_given: 0,
                given: None,
            }),
        };
        let (held, time) = (VecDeque::new(), Duration::ZERO);
        Stage { guards: guards.clone(), number, judge, held, first_held: 0, is_over: false, time }
    }

    fn is_waiting(&self) -> bool {
        matches!(&self.judge, Judge::Segments(segments) if segments.given.is_some())
    }

    fn push(&mut self, piece: Piece) -> Vec<Piece> {
        if self.is_over {
            return Vec::new();
        }
        let number = self.first_held + self.held.len();
        self.held.push_back(piece);
        let Judge::Scanner(scanner) = &mut self.judge else { return self.give_segment() };
        let started = Instant::now();
        let scan = scan(&mut **scanner, number, self.first_held, &self.held[self.held.len() - 1].delta);
        self.time += started.elapsed();
        match scan {
            Scan::Passed(end) => self.pass(end),
            Scan::Blocked { from, rule } => self.block(from, rule, VerdictKind::ReplyBlocked),
        }
    }

    /// Gives the guard the next segment, if there is a whole one and no verdict is outstanding. Returns the pieces that
    /// need no verdict.
    fn give_segment(&mut self) -> Vec<Piece> {
        let Judge::Segments(segments) = &mut self.judge else { return Vec::new() };
        if segments.given.is_some() {
            return Vec::new();
        }
        let (mut num_new, mut is_whole) = (0, false);
        segments.num_given = 0;
        for piece in &self.held {
            num_new += num_characters(&piece.delta);
            segments.num_given += 1;
            is_whole = num_new >= SEGMENT_CHARACTERS || piece.delta.finish.is_some();
            if is_whole {
                break;
            }
        }
        if !is_whole {
            return Vec::new();
        }
        if num_new == 0 {
            // All text was judged before.
            let end = self.first_held + segments.num_given;
            return self.pass(end);
        }
        let given = self.held.iter().take(segments.num_given);
        let added = given.into_iter().try_for_each(|piece| segments.reply.add(&piece.delta));
        if let Err(error) = added {
            return self.fail(&GuardError(error.to_string()));
        }
        segments.given = Some(Instant::now());
        let (prompt, reply) = (segments.prompt.clone(), segments.reply.clone());
        self.guards.judge_reply_apart(self.number, prompt, reply, segments.verdicts.pending(self.number));
        Vec::new()
    }

    fn take_verdict(&mut self, verdict: Result<Verdict, GuardError>) -> Vec<Piece> {
        let Judge::Segments(segments) = &mut self.judge else { return Vec::new() };
        self.time += segments.given.take().map(|given| given.elapsed()).unwrap_or_default();
        if self.is_over {
            return Vec::new();
        }
        match verdict {
            Ok(Verdict::Pass) => self.pass_segment(VerdictKind::ReplyPassed),
            Ok(Verdict::Block(rule)) => self.block(self.first_held, rule, VerdictKind::ReplyBlocked),
            Err(error) => self.fail(&error),
        }
    }

    /// Releases the segment that was judged, and gives the guard the next one.
    fn pass_segment(&mut self, kind: VerdictKind) -> Vec<Piece> {
        let Judge::Segments(segments) = &self.judge else { return Vec::new() };
        let end = self.first_held + segments.num_given;
        let mut passed = self.pass_as(end, kind);
        passed.extend(self.give_segment());
        passed
    }

    /// Blocks or passes a segment that could not be judged.
    fn fail(&mut self, error: &GuardError) -> Vec<Piece> {
        if self.guards.on_error() == OnGuardError::Open {
            self.guards.count(self.number, VerdictKind::ReplyFailed);
            return self.pass_segment(VerdictKind::ReplyFailed);
        }
        self.block(self.first_held, format!("the guard failed: {error}"), VerdictKind::ReplyFailed)
    }

    /// Releases the held pieces before number `end`, which the guard has passed.
    fn pass(&mut self, end: usize) -> Vec<Piece> {
        self.pass_as(end, VerdictKind::ReplyPassed)
    }

    /// Releases the held pieces before number `end`; their traces show the verdict.
    fn pass_as(&mut self, end: usize, kind: VerdictKind) -> Vec<Piece> {
        let num_passed = end.saturating_sub(self.first_held).min(self.held.len());
        self.first_held += num_passed;
        let mut passed: Vec<Piece> = self.held.drain(..num_passed).collect();
        let verdict = TokenVerdict { guard: self.guards.guard(self.number).name(), kind };
        for trace in passed.iter_mut().flat_map(|piece| &mut piece.delta.traces) {
            trace.verdicts.push(verdict);
        }
        if passed.last().is_some_and(|piece| piece.delta.finish.is_some()) {
            self.is_over = true;
            self.held.clear();
            self.guards.count(self.number, VerdictKind::ReplyPassed);
        }
        passed
    }

    /// Releases the held pieces before number `from`, and ends the choice after them.
    fn block(&mut self, from: usize, rule: String, kind: VerdictKind) -> Vec<Piece> {
        self.guards.count(self.number, kind);
        // The tokens up to the decision count: those of the segment, or of the piece that completed a match.
        let last = match &self.judge {
            Judge::Scanner(_) => self.held.back(),
            Judge::Segments(segments) => self.held.get(segments.num_given.saturating_sub(1)),
        };
        let (choice, num_tokens, num_thought_tokens) =
            last.map_or((0, 0, 0), |last| (last.delta.choice, last.num_tokens, last.num_thought_tokens));
        let finish = Finish::ContentFilter { guard: self.guards.guard(self.number).name(), rule };
        let mut passed = self.pass(from);
        self.is_over = true;
        self.held.clear();
        let delta = Delta { finish: Some(finish), ..Delta::new(choice) };
        passed.push(Piece { delta, num_tokens, num_thought_tokens });
        passed
    }
}

/// Lets a scanner see piece `number`.
fn scan(scanner: &mut dyn ReplyScanner, number: usize, first_held: usize, delta: &Delta) -> Scan {
    let mut scan = Scan::Passed(if number == first_held { number + 1 } else { first_held });
    for (passage, text) in texts(delta) {
        scan = scanner.push(number, passage, text);
        if matches!(scan, Scan::Blocked { .. }) {
            return scan;
        }
    }
    if delta.finish.is_none() {
        return scan;
    }
    match scanner.finish() {
        Scan::Passed(_) => Scan::Passed(number + 1),
        blocked => blocked,
    }
}

/// Returns the texts of a piece in their order.
fn texts(delta: &Delta) -> impl Iterator<Item = (Passage, &str)> {
    let thoughts = (Passage::Thoughts, delta.thoughts.as_str());
    let calls = delta.calls.iter().flat_map(|call| {
        let (passage, space) = (Passage::Call(call.index), call.name.as_ref().map(|_| " "));
        let texts = [call.name.as_deref(), space, Some(call.arguments.as_str())];
        texts.into_iter().flatten().map(move |text| (passage, text))
    });
    [thoughts, (Passage::Answer, delta.text.as_str())].into_iter().chain(calls).filter(|(_, text)| !text.is_empty())
}
