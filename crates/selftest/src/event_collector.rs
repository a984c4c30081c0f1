//! A sink that keeps what an engine said to a request.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pellucid_engine::{Beam, Control, Error, Event, EventSink, FinishReason, RequestStats};

/// Everything that a request has heard.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// By choice.
    pub tokens: Vec<Vec<u32>>,
    /// The chosen tokens' log probabilities as bits, by choice, where they were asked for.
    pub logprob_bits: Vec<Vec<u32>>,
    pub finish: Vec<Option<FinishReason>>,
    /// Tokens that there were when each wish took effect.
    pub controls_applied: Vec<usize>,
    pub prompt_logprobs: Vec<f32>,
    pub beams: Vec<Beam>,
    pub stats: Option<RequestStats>,
    pub error: Option<Error>,
}

impl Outcome {
    pub fn is_over(&self) -> bool {
        self.stats.is_some() || self.error.is_some()
    }

    fn choice(&mut self, choice: usize) {
        let len = self.tokens.len().max(choice + 1);
        self.tokens.resize(len, Vec::new());
        self.logprob_bits.resize(len, Vec::new());
        self.finish.resize(len, None);
    }
}

/// Both ends of a sink: clone it, hand one to the engine, look at the other.
#[derive(Debug, Clone)]
pub struct EventCollector {
    outcome: Arc<Mutex<Outcome>>,
    controls: Arc<Mutex<VecDeque<Control>>>,
    is_open: Arc<AtomicBool>,
    is_ready: Arc<AtomicBool>,
}

impl Default for EventCollector {
    fn default() -> Self {
        let yes = || Arc::new(AtomicBool::new(true));
        EventCollector { outcome: Arc::default(), controls: Arc::default(), is_open: yes(), is_ready: yes() }
    }
}

impl EventCollector {
    pub fn outcome(&self) -> Outcome {
        self.outcome.lock().expect("no panic while it is held").clone()
    }

    pub fn is_over(&self) -> bool {
        self.outcome.lock().expect("no panic while it is held").is_over()
    }

    /// Goes away, like a client that hangs up.
    pub fn close(&self) {
        self.is_open.store(false, Ordering::Relaxed);
    }
}

impl EventCollector {
    /// Asks for something, before the next step.
    pub fn send_control(&self, control: Control) {
        self.controls.lock().expect("no panic while it is held").push_back(control);
    }

    /// Takes what comes, or is slow for a while.
    pub fn set_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Ordering::Relaxed);
    }
}

impl EventSink for EventCollector {
    fn send(&mut self, event: Event) {
        let mut outcome = self.outcome.lock().expect("no panic while it is held");
        assert!(!outcome.is_over(), "an event after the last: {event:?}");
        match event {
            Event::Started { .. } | Event::PromptProgress { .. } => {}
            Event::ControlApplied { output_tokens } => outcome.controls_applied.push(output_tokens),
            Event::PromptLogprobs(logprobs) => {
                outcome.prompt_logprobs = logprobs.iter().map(|one| one.chosen).collect()
            }
            Event::Token(token) => {
                outcome.choice(token.choice);
                outcome.tokens[token.choice].push(token.id);
                if let Some(logprobs) = token.logprobs {
                    outcome.logprob_bits[token.choice].push(logprobs.chosen.to_bits());
                }
            }
            Event::ChoiceEnd { choice, reason, .. } => {
                outcome.choice(choice);
                outcome.finish[choice] = Some(reason);
            }
            Event::Beams { beams, reason } => {
                outcome.beams = beams;
                outcome.finish = vec![Some(reason)];
            }
            Event::Done(stats) => outcome.stats = Some(stats),
            Event::Failed(error) => outcome.error = Some(error),
        }
    }

    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    fn control(&mut self) -> Option<Control> {
        self.controls.lock().expect("no panic while it is held").pop_front()
    }
}
