//! An event sink that collects everything that an engine sends for a request.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pellucid_engine::{Beam, Control, Error, Event, EventSink, FinishReason, Probe, RequestStats, TokenEvent};

/// Everything that the engine sent for a request.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Token ids of each choice.
    pub tokens: Vec<Vec<u32>>,
    /// Bits of the sampled tokens' log probabilities, for each choice, if the request asked for log probabilities.
    pub logprob_bits: Vec<Vec<u32>>,
    pub finish: Vec<Option<FinishReason>>,
    /// The tokens of each choice with everything that was sent with them, and last the token that ended the choice.
    pub events: Vec<Vec<TokenEvent>>,
    /// Number of output tokens when each control message was applied.
    pub controls_applied: Vec<usize>,
    pub prompt_logprobs: Vec<f32>,
    pub beams: Vec<Beam>,
    pub probe: Option<Probe>,
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
        self.events.resize(len, Vec::new());
    }
}

/// Both ends of a sink: one clone goes to the engine, the other reads the outcome.
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

    /// Closes the sink, like a client that disconnects.
    pub fn close(&self) {
        self.is_open.store(false, Ordering::Relaxed);
    }
}

impl EventCollector {
    /// Queues a control message for the next step.
    pub fn send_control(&self, control: Control) {
        self.controls.lock().expect("no panic while it is held").push_back(control);
    }

    /// Sets whether the sink accepts events, to imitate a slow reader.
    pub fn set_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Ordering::Relaxed);
    }
}

impl EventSink for EventCollector {
    fn send(&mut self, event: Event) {
        let mut outcome = self.outcome.lock().expect("no panic while it is held");
        assert!(!outcome.is_over(), "an event after the last one: {event:?}");
        match event {
            Event::Started { .. } | Event::PromptProgress { .. } => {}
            Event::Probed(probe) => outcome.probe = Some(*probe),
            Event::ControlApplied { output_tokens } => outcome.controls_applied.push(output_tokens),
            Event::PromptLogprobs(logprobs) => {
                outcome.prompt_logprobs = logprobs.iter().map(|one| one.chosen).collect()
            }
            Event::Token(token) => {
                outcome.choice(token.choice);
                outcome.tokens[token.choice].push(token.id);
                if let Some(logprobs) = &token.logprobs {
                    outcome.logprob_bits[token.choice].push(logprobs.chosen.to_bits());
                }
                outcome.events[token.choice].push(token);
            }
            Event::ChoiceEnd { choice, reason, token } => {
                outcome.choice(choice);
                outcome.events[choice].extend(token);
                outcome.finish[choice] = Some(reason);
            }
            Event::Beams { beams, reason } => {
                outcome.beams = beams;
                outcome.finish = vec![Some(reason)];
            }
            Event::Done(stats) => outcome.stats = Some(*stats),
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
