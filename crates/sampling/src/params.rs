//! What a request may ask of the choice of a token: every parameter, with the value at which it does nothing.
//!
//! Built by the server and the CLI from what the user wrote; checked once (`check.rs`), then turned into a chain by
//! [`Sampler::new`](crate::Sampler::new).

use crate::StepKind;

/// How to choose each token.
///
/// `Default` is the model's own distribution: every parameter at its neutral value, temperature 1. Greedy choice is temperature 0.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Keys the random numbers: the same seed, the same reply.
    pub seed: u64,

    /// Logits are divided by it. Neutral 1; 0 takes the highest logit and nothing after it matters.
    pub temperature: f32,
    /// The temperature moves with the entropy, between `temperature - range` (not below 0) and `temperature + range`. Neutral 0.
    pub dynamic_temperature_range: f32,
    /// Bends that movement: the share of the highest possible entropy is raised to it. 1 is a straight line; no effect at range 0.
    pub dynamic_temperature_exponent: f32,

    /// Keeps logits within this many standard deviations of the highest. Neutral 0.
    pub top_n_sigma: f32,
    /// Keeps the k highest. Neutral 0.
    pub top_k: u32,
    /// Keeps the most typical tokens up to this probability. Neutral 1.
    pub typical_p: f32,
    /// Keeps the most probable tokens up to this probability. Neutral 1.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the most probable. Neutral 0.
    pub min_p: f32,
    /// How often the top choices are excluded. Neutral 0.
    pub xtc_probability: f32,
    /// How probable a token must be to count as a top choice; no effect at probability 0.
    pub xtc_threshold: f32,

    /// Divides positive and multiplies negative logits of tokens of the prompt and the output. Neutral 1.
    pub repetition_penalty: f32,
    /// Subtracted once for each time that a token is in the output. Neutral 0.
    pub frequency_penalty: f32,
    /// Subtracted when a token is in the output at all. Neutral 0.
    pub presence_penalty: f32,
    /// The three penalties look at this many last tokens. Neutral `None`: all of them.
    pub penalty_window: Option<u32>,
    /// Against repeated phrases. Neutral: its multiplier 0.
    pub dry: Dry,

    /// Holds the surprise of the text at a target, in place of the truncating steps. Neutral `None`.
    pub mirostat: Option<Mirostat>,

    /// Added to the logits of these tokens. Neutral empty.
    pub logit_bias: Vec<(u32, f32)>,
    /// Never chosen. Neutral empty.
    pub banned_tokens: Vec<u32>,
    /// Only these are chosen. Neutral `None`.
    pub allowed_tokens: Option<Vec<u32>>,
    /// Tokens with which the model says that it is done.
    pub end_ids: Vec<u32>,
    /// Tokens at which the caller wants to stop. Neutral empty.
    pub stop_ids: Vec<u32>,
    /// No token of `end_ids` or `stop_ids` is chosen before the output has this many. Neutral 0.
    pub min_tokens: u32,

    /// The order of the steps that can be moved, see [`StepKind`]. Neutral `None`: the default order.
    pub samplers: Option<Vec<StepKind>>,
    /// How many of the most probable tokens to report beside the chosen one, by the model's own probabilities. Neutral `None`.
    pub logprobs: Option<u32>,
}

/// What DRY's author suggests as breakers: the ends of lines and the marks that set off speakers and quotations. Texts, since what tokens
/// they are is the tokenizer's to say.
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// DRY, "don't repeat yourself": a token that would continue a repeat of what came before is penalised, the more the longer the repeat.
#[derive(Debug, Clone, PartialEq)]
pub struct Dry {
    /// The penalty at the allowed length, in logits. Neutral 0.
    pub multiplier: f32,
    /// Multiplies the penalty for each token that the repeat is longer.
    pub base: f32,
    /// Repeats shorter than this, in tokens, are free.
    pub allowed_length: u32,
    /// Looks at this many last tokens of prompt and output; `None` is all.
    pub range: Option<u32>,
    /// A repeat does not reach back over any of these token sequences (the end of a line, the marks of a chat's turns).
    pub breakers: Vec<Vec<u32>>,
}

/// Mirostat 2 (Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", 2021).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mirostat {
    /// The surprise to hold, in bits a token. 5 is the usual choice.
    pub tau: f32,
    /// How fast to correct. 0.1 is the usual choice.
    pub eta: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            seed: 0,
            temperature: 1.0,
            dynamic_temperature_range: 0.0,
            dynamic_temperature_exponent: 1.0,
            top_n_sigma: 0.0,
            top_k: 0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: None,
            dry: Dry::default(),
            mirostat: None,
            logit_bias: Vec::new(),
            banned_tokens: Vec::new(),
            allowed_tokens: None,
            end_ids: Vec::new(),
            stop_ids: Vec::new(),
            min_tokens: 0,
            samplers: None,
            logprobs: None,
        }
    }
}

impl Default for Dry {
    /// Off; the rest as its author suggests, for a caller who sets the multiplier alone.
    fn default() -> Self {
        Dry { multiplier: 0.0, base: 1.75, allowed_length: 2, range: None, breakers: Vec::new() }
    }
}

impl Default for Mirostat {
    fn default() -> Self {
        Mirostat { tau: 5.0, eta: 0.1 }
    }
}
