//! The guards of a loaded model: the list, the rule for guards that fail, and the count of verdicts.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pellucid_tokenizer::Tokenizer;

use super::threads::{GuardThreads, Promise, promise};
use super::{Guard, GuardError, PromptText, ReplyText, Verdict};
use crate::PromptRequest;
use crate::event_channel::PendingVerdict;

/// Fate of a text that a guard could not judge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnGuardError {
    /// The text is blocked.
    #[default]
    Closed,
    /// The text passes.
    Open,
}

/// The guards of a model, in the order in which they judge. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct Guards {
    entries: Arc<[Entry]>,
    on_error: OnGuardError,
    threads: Arc<GuardThreads>,
}

#[derive(Debug)]
struct Entry {
    guard: Arc<dyn Guard>,
    counts: [AtomicU64; VerdictKind::ALL.len()],
}

/// Kinds of verdicts, each counted for each guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerdictKind {
    /// A prompt passed.
    PromptPassed,
    /// A prompt was blocked.
    PromptBlocked,
    /// A prompt could not be judged.
    PromptFailed,
    /// A whole reply passed.
    ReplyPassed,
    /// A reply was blocked.
    ReplyBlocked,
    /// A reply could not be judged.
    ReplyFailed,
}

impl VerdictKind {
    /// All kinds.
    pub const ALL: [VerdictKind; 6] = [
        VerdictKind::PromptPassed,
        VerdictKind::PromptBlocked,
        VerdictKind::PromptFailed,
        VerdictKind::ReplyPassed,
        VerdictKind::ReplyBlocked,
        VerdictKind::ReplyFailed,
    ];

    /// `prompt` or `reply`.
    pub fn subject(self) -> &'static str {
        match self {
            VerdictKind::PromptPassed | VerdictKind::PromptBlocked | VerdictKind::PromptFailed => "prompt",
            VerdictKind::ReplyPassed | VerdictKind::ReplyBlocked | VerdictKind::ReplyFailed => "reply",
        }
    }

    /// `passed`, `blocked` or `failed`.
    pub fn verdict(self) -> &'static str {
        match self {
            VerdictKind::PromptPassed | VerdictKind::ReplyPassed => "passed",
            VerdictKind::PromptBlocked | VerdictKind::ReplyBlocked => "blocked",
            VerdictKind::PromptFailed | VerdictKind::ReplyFailed => "failed",
        }
    }
}

/// The verdict of one guard on a token that was shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenVerdict {
    /// Name of the guard.
    pub guard: &'static str,
    /// [`VerdictKind::ReplyPassed`], or [`VerdictKind::ReplyFailed`] if guards that fail let text pass.
    pub kind: VerdictKind,
}

/// Number of verdicts of one kind by one guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuardCount {
    /// Name of the guard.
    pub guard: &'static str,
    /// Kind of the verdicts.
    pub kind: VerdictKind,
    /// Their number since the guards were made.
    pub count: u64,
}

/// A prompt was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A guard blocked the prompt.
    #[error("the prompt was blocked by the guard {guard} ({rule})")]
    Blocked {
        /// Name of the guard.
        guard: &'static str,
        /// The rule that blocked it, for the operator.
        rule: String,
    },
    /// A guard could not judge the prompt, and guards that fail block.
    #[error("the guard {guard} could not judge the prompt: {reason}")]
    Failed {
        /// Name of the guard.
        guard: &'static str,
        /// Why, for the operator.
        reason: String,
    },
    /// There is not enough memory to judge the prompt.
    #[error("there is not enough memory to judge this prompt now; try again later")]
    OutOfMemory,
}

/// A prompt that every guard has passed. Only [`Guards`] makes one.
#[derive(Debug, Clone)]
pub struct JudgedPrompt {
    /// Text of the prompt, for guards that judge replies together with it; empty if there are none.
    pub(super) text: Arc<PromptText>,
    /// Time that the guards took.
    time: Duration,
}

impl JudgedPrompt {
    /// Returns the text of the prompt for the guards of its replies.
    pub(crate) fn text(&self) -> &Arc<PromptText> {
        &self.text
    }

    /// Time that the guards took to judge it.
    pub(crate) fn time(&self) -> Duration {
        self.time
    }

    /// Bytes that it holds.
    pub fn held_bytes(&self) -> usize {
        self.text.text.len() + self.text.turns.iter().map(|turn| turn.text.len()).sum::<usize>()
    }
}

impl Guards {
    /// Returns guards that judge in this order.
    pub fn new(guards: Vec<Arc<dyn Guard>>, on_error: OnGuardError) -> Guards {
        let entry = |guard| Entry { guard, counts: Default::default() };
        Guards { entries: guards.into_iter().map(entry).collect(), on_error, threads: Arc::default() }
    }

    /// Whether there are no guards.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of guards.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of verdicts by guard and kind.
    pub fn counts(&self) -> Vec<GuardCount> {
        let of = |entry: &Entry| {
            let (guard, counts) = (entry.guard.name(), &entry.counts);
            let count = |kind: VerdictKind| counts[kind as usize].load(Ordering::Relaxed);
            VerdictKind::ALL.map(|kind| GuardCount { guard, kind, count: count(kind) })
        };
        self.entries.iter().flat_map(of).collect()
    }

    /// Lets every guard judge a prompt. May take long.
    pub fn judge_prompt(&self, prompt: PromptText) -> Result<JudgedPrompt, Refusal> {
        let started = Instant::now();
        for (number, entry) in self.entries.iter().enumerate() {
            let guard = entry.guard.name();
            match entry.guard.judge_prompt(&prompt) {
                Ok(Verdict::Pass) => self.count(number, VerdictKind::PromptPassed),
                Ok(Verdict::Block(rule)) => {
                    self.count(number, VerdictKind::PromptBlocked);
                    return Err(Refusal::Blocked { guard, rule });
                }
                Err(GuardError(reason)) => {
                    self.count(number, VerdictKind::PromptFailed);
                    if self.on_error == OnGuardError::Closed {
                        return Err(Refusal::Failed { guard, reason });
                    }
                }
            }
        }
        let is_needed = self.entries.iter().any(|entry| entry.guard.scanner().is_none());
        let text = Arc::new(if is_needed { prompt } else { prompt.without_text() });
        Ok(JudgedPrompt { text, time: started.elapsed() })
    }

    /// Judges the prompts that were not judged yet.
    pub(crate) fn judge_all(&self, prompts: &mut [PromptRequest], tokenizer: &Tokenizer) -> Result<(), Refusal> {
        for prompt in prompts.iter_mut().filter(|prompt| prompt.judged.is_none()) {
            let text = PromptText::new(&prompt.request, std::mem::take(&mut prompt.turns), tokenizer);
            let mut text = text.map_err(|_| Refusal::OutOfMemory)?;
            text.traceparent = prompt.traceparent.take();
            prompt.judged = Some(self.judge_prompt(text)?);
        }
        Ok(())
    }

    /// Judges prompts on a thread of the guards.
    pub(crate) fn judge_apart(&self, mut prompts: Vec<PromptRequest>, tokenizer: &Arc<Tokenizer>) -> Judging {
        let (fulfil, promise) = promise();
        let (guards, tokenizer) = (self.clone(), tokenizer.clone());
        self.threads.run(move || {
            let judged = guards.judge_all(&mut prompts, &tokenizer);
            fulfil.set(judged.map(|()| prompts));
        });
        Judging { promise }
    }

    /// Judges a reply so far on a thread of the guards.
    pub(super) fn judge_reply_apart(
        &self,
        number: usize,
        prompt: Arc<PromptText>,
        reply: ReplyText,
        pending: PendingVerdict,
    ) {
        let guards = self.clone();
        self.threads.run(move || {
            if pending.is_wanted() {
                pending.set(guards.guard(number).judge_reply(&prompt, &reply));
            }
        });
    }

    pub(super) fn on_error(&self) -> OnGuardError {
        self.on_error
    }

    pub(super) fn guard(&self, number: usize) -> &dyn Guard {
        &*self.entries[number].guard
    }

    pub(super) fn count(&self, number: usize, kind: VerdictKind) {
        self.entries[number].counts[kind as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Prompts that are being judged. Resolves to the prompts if every guard passes them.
#[derive(Debug)]
pub struct Judging {
    promise: Promise<Result<Vec<PromptRequest>, Refusal>>,
}

impl Future for Judging {
    type Output = Result<Vec<PromptRequest>, Refusal>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = || Refusal::Failed { guard: "guard", reason: "its thread ended without a verdict".into() };
        Pin::new(&mut self.promise).poll(context).map(|judged| judged.unwrap_or_else(|| Err(ended())))
    }
}
