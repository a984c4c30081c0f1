//! Sampling parameters and logits. Accepted parameters give a token of the vocabulary that the rules allow, a
//! distribution of finite numbers, and the same token with a trace as without.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_sampling::{Error, Input, OPTIONS, OptionKind, Sampler, SamplingParams, StepKind, Value, Workspace};

/// Numbers from the input; zeros after its end.
struct Bytes<'d>(&'d [u8]);

impl Bytes<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let len = N.min(self.0.len());
        array[..len].copy_from_slice(&self.0[..len]);
        self.0 = &self.0[len..];
        array
    }

    fn byte(&mut self) -> usize {
        usize::from(self.array::<1>()[0])
    }

    /// A number in the usual ranges, or any bits.
    fn number(&mut self) -> f32 {
        match self.byte() {
            0 => f32::from_bits(u32::from_le_bytes(self.array())),
            scale => (self.byte() as f32 - 64.0) / scale as f32,
        }
    }

    fn count(&mut self) -> u32 {
        match self.byte() {
            255 => u32::from_le_bytes(self.array()),
            byte => byte as u32,
        }
    }

    fn ids(&mut self) -> Vec<u32> {
        (0..self.byte() % 9).map(|_| self.count()).collect()
    }

    fn value(&mut self, kind: OptionKind) -> Value {
        match kind {
            OptionKind::Number { .. } => Value::Number(self.number()),
            OptionKind::Count { .. } => Value::Count(self.count()),
            OptionKind::Seed => Value::Seed(u64::from_le_bytes(self.array())),
            OptionKind::TokenBias { .. } => {
                Value::TokenBias((0..self.byte() % 9).map(|_| (self.count(), self.number())).collect())
            }
            OptionKind::Tokens { .. } => Value::Tokens(self.ids()),
            OptionKind::Texts { .. } => Value::Sequences((0..self.byte() % 5).map(|_| self.ids()).collect()),
            OptionKind::Steps => {
                let kinds: Vec<StepKind> = StepKind::movable().collect();
                let mut steps: Vec<StepKind> = Vec::new();
                for _ in 0..self.byte() % 20 {
                    let kind = kinds[self.byte() % kinds.len()];
                    // An order that names every step is a permutation: usual orders have no step twice.
                    if !steps.contains(&kind) {
                        steps.push(kind);
                    }
                }
                Value::Steps(steps)
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let vocab_size = 1 + bytes.byte() % 80;
    let mut params = SamplingParams::default();
    for _ in 0..bytes.byte() % 12 {
        let option = &OPTIONS[bytes.byte() % OPTIONS.len()];
        let value = bytes.value(option.kind());
        option.set(&mut params, value);
    }
    params.logprobs = Some(bytes.byte() as u32 % 22).filter(|&top| top != 21);
    params.end_ids = bytes.ids();
    let Ok(sampler) = Sampler::new(&params, vocab_size) else { return };
    let prompt: Vec<u32> = bytes.ids().into_iter().map(|id| id % vocab_size as u32).collect();
    let mut history = sampler.history(&prompt);
    let (mut state, mut space) = (sampler.state(), Workspace::new());
    let logits: Vec<f32> = (0..vocab_size).map(|_| bytes.number()).collect();
    let mask = (bytes.byte() % 4 == 1).then(|| (0..vocab_size.div_ceil(32)).map(|_| bytes.count()).collect::<Vec<_>>());
    for position in prompt.len() as u32..prompt.len() as u32 + 4 {
        let input = Input { logits: &logits, history: &history, position, mask: mask.as_deref() };
        let mut traced_state = state;
        let traced = sampler.trace(&input, &mut traced_state, &mut space);
        let choice = match sampler.sample(&input, &mut state, &mut space) {
            Ok(choice) => choice,
            Err(error) => {
                assert_eq!(traced.err(), Some(error.clone()));
                let has_reason = match error {
                    Error::NotANumber { token } => !logits[token as usize].is_finite(),
                    Error::NothingLeft => true,
                    _ => false,
                };
                assert!(has_reason, "{error}");
                return;
            }
        };
        let (same, trace) = traced.expect("a trace of a token that was sampled");
        assert_eq!(format!("{same:?} {traced_state:?}"), format!("{choice:?} {state:?}"));
        let token = choice.token;
        assert!((token as usize) < vocab_size, "{token}");
        assert!(!params.banned_tokens.contains(&token), "{token} is banned");
        assert!(params.allowed_tokens.as_ref().is_none_or(|allowed| allowed.contains(&token)), "{token}");
        assert!(mask.as_ref().is_none_or(|mask| mask[token as usize / 32] >> (token % 32) & 1 == 1), "{token}");
        assert!(state.mu.is_finite(), "{state:?}");
        let is_probability = |p: f64| (0.0..=1.0 + 1e-9).contains(&p);
        let candidates = || trace.steps.iter().flat_map(|step| &step.candidates);
        assert!(candidates().all(|c| is_probability(c.before) && is_probability(c.after)), "{trace:?}");
        let winner = trace.draw.winner;
        assert!(winner.id == token && is_probability(winner.probability) && winner.probability > 0.0, "{trace:?}");
        if let Some(logprobs) = &choice.logprobs {
            assert!(!logprobs.chosen.is_nan() && logprobs.chosen <= 1e-4, "{logprobs:?}");
            assert!(logprobs.top.iter().all(|&(id, p)| (id as usize) < vocab_size && p <= 1e-4), "{logprobs:?}");
        }
        history.push(token);
    }
});
