//! The table of sampling options. An entry holds what the option does, the field of [`SamplingParams`], its type, its
//! neutral value, and the rest of its description: placeholder and range, other names, the option that it needs.
//!
//! The doc comment of an entry is also the text of `--help`, of the OpenAPI schema and of `docs/sampling.md`, so it is
//! one sentence or two, and it does not repeat the range or the neutral value.

use super::define::{define_params, hyphenated};
use super::spec::{SamplingOption, Spec};
use super::value::Field;
use crate::StepKind;
use crate::steps::mirostat::DEFAULT_ETA;

/// Maximum temperature. At 100, odds of a million to one become 1.15 to one: far above any use.
pub const MAX_TEMPERATURE: f32 = 100.0;
/// Maximum log probabilities to report. More would let a client reconstruct the model's last layer (Carlini et al.,
/// "Stealing part of a production language model", 2024).
pub const MAX_LOGPROBS: u32 = 20;
/// Maximum entries of `logit_bias`, `stop_ids` and `end_ids`: far above any use, and small beside a row of logits.
pub const MAX_LISTED_TOKENS: usize = 4096;
/// Maximum entries of `dry_sequence_breakers`.
pub const MAX_DRY_BREAKERS: usize = 256;
/// Maximum tokens of one sequence breaker.
pub const MAX_DRY_BREAKER_LEN: usize = 64;
/// Maximum bytes of the text of one sequence breaker.
pub const MAX_DRY_BREAKER_BYTES: usize = 64;
/// Maximum vocabulary size: above every vocabulary in use, and low enough that sums over it cannot overflow.
pub const MAX_VOCAB_SIZE: usize = 1 << 22;

/// Sequence breakers that DRY's author suggests: line ends and the marks that set off speakers and quotations.
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

define_params! {
    options {
        /// Key of the random numbers: the same seed gives the same reply. Reply i to one prompt uses the seed plus i.
        seed: u64 = 0, Spec::seed("N").sampled_only();

        /// Divides the logits: 0 takes the most probable token, 1 keeps the model's own distribution, more flattens it.
        // OpenAI's API ends at 2.
        temperature: f32 = 1.0, Spec::number("T", 0.0, MAX_TEMPERATURE).json_high(2.0);
        /// Moves the temperature by up to `dynamic_temperature_range`: up where the model is unsure, else down.
        dynamic_temperature_range: f32 = 0.0,
            Spec::number("R", 0.0, MAX_TEMPERATURE).flag("dynamic-temperature").sampled_only();
        /// Exponent of the relative entropy that moves the temperature; 1 is a straight line.
        dynamic_temperature_exponent: f32 = 1.0,
            Spec::number("E", 0.0, 100.0).needs("dynamic_temperature_range", |p| p.dynamic_temperature_range != 0.0);

        /// Keeps logits at most `top_n_sigma` standard deviations below the highest; 0 keeps all.
        top_n_sigma: f32 = 0.0, Spec::number("N", 0.0, 100.0).sampled_only();
        /// Keeps the `top_k` most probable tokens; 0 keeps all.
        top_k: u32 = 0, Spec::count("K", 0).sampled_only();
        /// Keeps the tokens whose surprise is closest to the entropy, until their probabilities sum to `typical_p`.
        typical_p: f32 = 1.0, Spec::number("P", 0.0, 1.0).sampled_only();
        /// Keeps the most probable tokens until their probabilities sum to `top_p`.
        top_p: f32 = 1.0, Spec::number("P", 0.0, 1.0).sampled_only();
        /// Keeps tokens at least `min_p` times as probable as the most probable one.
        min_p: f32 = 0.0, Spec::number("P", 0.0, 1.0).sampled_only();
        /// XTC: probability with which all top choices but the least probable are excluded.
        xtc_probability: f32 = 0.0, Spec::number("P", 0.0, 1.0).sampled_only();
        /// XTC: minimum probability of a top choice.
        // Two tokens cannot both have more than a half.
        xtc_threshold: f32 = 0.1, Spec::number("P", 0.0, 0.5).needs("xtc_probability", |p| p.xtc_probability > 0.0);

        /// Divides positive and multiplies negative logits of tokens in the prompt or the reply.
        repetition_penalty: f32 = 1.0, Spec::number("R", 0.01, 100.0);
        /// Subtracted from a token's logit for each time that the token is in the reply.
        frequency_penalty: f32 = 0.0, Spec::number("F", -2.0, 2.0);
        /// Subtracted once from the logit of every token in the reply.
        presence_penalty: f32 = 0.0, Spec::number("F", -2.0, 2.0);
        /// Number of last tokens that the three penalties count.
        penalty_window: Option<u32> = None, Spec::count("N", 1).unset("all").needs("a penalty", has_penalty);

        /// DRY: penalty in logits for a token that continues a repeat of the allowed length.
        dry_multiplier: f32 = 0.0, Spec::number("M", 0.0, 100.0);
        /// DRY: factor by which the penalty grows with each further token of the repeat.
        dry_base: f32 = 1.75, Spec::number("B", 1.0, 100.0).needs("dry_multiplier", has_dry);
        /// DRY: length in tokens from which a repeat is penalised.
        dry_allowed_length: u32 = 2, Spec::count("N", 1).needs("dry_multiplier", has_dry);
        /// DRY: number of last tokens that are searched for repeats.
        dry_range: Option<u32> = None, Spec::count("N", 1).unset("all").needs("dry_multiplier", has_dry);
        /// DRY: texts that a repeat does not extend across.
        dry_sequence_breakers: Vec<Vec<u32>> = Vec::new(),
            Spec::texts("TEXT", MAX_DRY_BREAKERS, MAX_DRY_BREAKER_BYTES, &DRY_BREAKERS)
                .flag("dry-breaker")
                .unset("line end, colon, double quote, asterisk")
                .needs("dry_multiplier", has_dry);

        /// Mirostat 2: target surprise in bits per token, usually 5. Replaces the steps that truncate.
        mirostat_tau: Option<f32> = None, Spec::number("TAU", 0.0, 100.0).flag("mirostat").unset("off").sampled_only();
        /// Mirostat 2: learning rate of the correction after each token.
        mirostat_eta: Option<f32> = None,
            Spec::number("ETA", 0.0, 1.0).default(DEFAULT_ETA).needs("mirostat_tau", |p| p.mirostat_tau.is_some());

        /// Added to the logits of single tokens.
        logit_bias: Vec<(u32, f32)> = Vec::new(), Spec::token_bias("TOKEN=BIAS", -100.0, 100.0);
        /// Tokens that are never sampled.
        // A ban may name a large part of the vocabulary, such as all of one script.
        banned_tokens: Vec<u32> = Vec::new(),
            Spec::tokens("TOKEN", 0, MAX_VOCAB_SIZE).json_name("banned_token_ids").flag("ban");
        /// The only tokens that may be sampled.
        allowed_tokens: Option<Vec<u32>> = None,
            Spec::tokens("TOKEN", 1, MAX_VOCAB_SIZE).json_name("allowed_token_ids").flag("allow").unset("all");
        /// Tokens at which the reply ends.
        stop_ids: Vec<u32> = Vec::new(),
            Spec::tokens("TOKEN", 0, MAX_LISTED_TOKENS).json_name("stop_token_ids").flag("stop-token");
        /// Minimum number of tokens to generate before the reply may end.
        min_tokens: u32 = 0, Spec::count("N", 0);

        /// Order of the steps; must list every step that is set.
        samplers: Option<Vec<StepKind>> = None, Spec::steps("LIST").unset("the default order");
    }
    others {
        /// Tokens with which the model ends its reply.
        end_ids: Vec<u32> = Vec::new();
        /// Number of most probable tokens to report beside the sampled one, by the model's own probabilities.
        logprobs: Option<u32> = None;
    }
}

fn has_penalty(p: &SamplingParams) -> bool {
    p.repetition_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0
}

fn has_dry(p: &SamplingParams) -> bool {
    p.dry_multiplier != 0.0
}
