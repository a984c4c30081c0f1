//! Counts and times of a reply: OpenAI's `usage` object, and the `pellucid` object beside it.

use std::time::Duration;

use pellucid_engine::{DrafterKind, GAP_BOUNDS_S, Repetition};
use pellucid_generate::{Finish, Summary};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::cache_miss::MissReport;
use super::probe::ProbeReport;
use super::sampling::effective;
use super::speculation::SpeculationReport;
use crate::reply::Sampling;

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    /// All generated tokens, those of replies that were not returned included.
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

/// Details of the prompt's tokens.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct PromptDetails {
    /// Tokens found in the tenant's prefix cache.
    cached_tokens: usize,
    audio_tokens: usize,
}

/// Details of the reply's tokens.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct CompletionDetails {
    /// Tokens of thoughts, with their markers, in the replies that are returned.
    reasoning_tokens: usize,
    audio_tokens: usize,
    /// Tokens of `prediction` that were proposed and that the model chose as well.
    accepted_prediction_tokens: u64,
    /// Tokens of `prediction` that were proposed and not chosen. They are no part of `completion_tokens`.
    rejected_prediction_tokens: u64,
}

/// Information beyond OpenAI's fields.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Extension {
    /// The seed of the first choice; choice i used this plus i.
    seed: u64,
    /// Every sampling parameter in effect at the end, under the names of the request fields.
    #[schema(value_type = Object)]
    parameters: Value,
    /// The model's end tokens; empty with `ignore_eos`.
    end_token_ids: Vec<u32>,
    cached_tokens: usize,
    /// Times that the request was preempted and computed again.
    preemptions: usize,
    speculation: SpeculationReport,
    timings: Timings,
    /// Why prompts were not found whole in the prefix cache, if the request sets `explain_cache`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    cache_misses: Vec<MissReport>,
    /// Result of the request's `probe`, if the reply has the token that it names.
    #[serde(skip_serializing_if = "Option::is_none")]
    probe: Option<ProbeReport>,
    /// Why each choice ended, in their order.
    endings: Vec<EndingDetail>,
    /// Parts of the schemas of tools without `strict` that calls need not satisfy, such as
    /// `tools[3].function.parameters.properties.tags.uniqueItems`. Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    not_enforced: Vec<String>,
}

/// Times in milliseconds.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct Timings {
    /// From submission to the first step that computed for the request.
    queue_ms: f64,
    /// From submission to the first token.
    #[schema(required)]
    time_to_first_token_ms: Option<f64>,
    /// From the first step that computed for the request to the first token.
    #[schema(required)]
    prefill_ms: Option<f64>,
    /// Mean time between tokens, however many a step accepts.
    #[schema(required)]
    time_per_output_token_ms: Option<f64>,
    /// Tokens per second after the first.
    #[schema(required)]
    tokens_per_second: Option<f64>,
    /// Gaps between the steps that gave the reply tokens; null if the reply ended before the engine told them.
    #[schema(required)]
    gaps: Option<Gaps>,
    /// Part of the steps in which tokens of the reply were sampled; null if the reply ended before the engine told it.
    #[schema(required)]
    sampling_ms: Option<f64>,
    /// Time that guards took for the prompt, before it was submitted, and for the reply, beside the steps; null without
    /// guards.
    #[schema(required)]
    guard_ms: Option<f64>,
    decode_ms: f64,
    total_ms: f64,
}

/// Histogram of gaps.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct Gaps {
    /// Upper bound of each bucket but the last.
    #[schema(value_type = Vec<f64>)]
    bounds_ms: [f64; GAP_BOUNDS_S.len()],
    /// Gaps in each bucket; the last one has those above all bounds.
    #[schema(value_type = Vec<u64>)]
    counts: [u64; GAP_BOUNDS_S.len() + 1],
}

/// Why a choice ended.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct EndingDetail {
    index: usize,
    /// `end_of_sequence`, `stop_token`, `stop_string`, `max_tokens`, `context_full`, `timeout`, `tool_calls`,
    /// `repetition` or `content_filter`.
    reason: &'static str,
    /// `unfinished` if a grammar constrains the reply and the choice ended before the grammar did: it may be no valid
    /// JSON, for example.
    #[serde(skip_serializing_if = "Option::is_none")]
    grammar: Option<&'static str>,
    /// The token that ended the choice, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_id: Option<u32>,
    /// The stop string that ended the choice, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop: Option<String>,
    /// Number of tokens of the passage that was repeated, if `loop_guard` ended the choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    period: Option<usize>,
    /// Number of whole times that the passage occurred in a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    repeats: Option<usize>,
    /// Name of the guard that blocked the rest of the choice, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    guard: Option<&'static str>,
}

impl Usage {
    pub(crate) fn new(summary: &Summary) -> Usage {
        let prediction = summary.speculation.of(DrafterKind::Prediction);
        Usage {
            prompt_tokens: summary.prompt_tokens,
            completion_tokens: summary.completion_tokens,
            total_tokens: summary.prompt_tokens + summary.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: summary.cached_tokens, audio_tokens: 0 },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: summary.thought_tokens,
                audio_tokens: 0,
                accepted_prediction_tokens: prediction.accepted,
                rejected_prediction_tokens: prediction.rejected(),
            },
        }
    }
}

impl Extension {
    pub(crate) fn new(sampling: &Sampling, summary: &Summary) -> Extension {
        // Rounded to microseconds; finer digits are noise.
        let milliseconds = |time: Duration| time.as_micros() as f64 / 1e3;
        Extension {
            seed: sampling.params.seed,
            parameters: effective(&sampling.fields, &sampling.params),
            not_enforced: sampling.not_enforced.to_vec(),
            end_token_ids: sampling.params.end_ids.clone(),
            cached_tokens: summary.cached_tokens,
            preemptions: summary.preemptions,
            speculation: SpeculationReport::new(&summary.speculation, sampling.is_beam_search),
            timings: Timings {
                queue_ms: milliseconds(summary.queue_time),
                time_to_first_token_ms: summary.time_to_first_token.map(milliseconds),
                prefill_ms: summary.prefill_time.map(milliseconds),
                time_per_output_token_ms: summary.time_per_output_token.map(milliseconds),
                tokens_per_second: (summary.time_per_output_token.filter(|time| !time.is_zero()))
                    .map(|time| (10.0 / time.as_secs_f64()).round() / 10.0),
                gaps: (summary.gaps).map(|gaps| Gaps { bounds_ms: GAP_BOUNDS_S.map(|s| s * 1e3), counts: gaps.counts }),
                sampling_ms: summary.sampling_time.map(milliseconds),
                guard_ms: summary.guard_time.map(milliseconds),
                decode_ms: milliseconds(summary.decode_time),
                total_ms: milliseconds(summary.total_time),
            },
            cache_misses: summary.misses.iter().map(|miss| MissReport::new(miss)).collect(),
            probe: summary.probe.as_deref().map(ProbeReport::new),
            endings: summary
                .finishes
                .iter()
                .enumerate()
                .filter_map(|(i, finish)| Some(detail(i, finish.as_ref()?, sampling.has_grammar)))
                .collect(),
        }
    }
}

fn detail(index: usize, finish: &Finish, has_grammar: bool) -> EndingDetail {
    let reason = finish.name();
    let grammar =
        (has_grammar && !matches!(finish, Finish::EndToken(_) | Finish::ToolCalls(_))).then_some("unfinished");
    let mut detail =
        EndingDetail { index, reason, grammar, token_id: None, stop: None, period: None, repeats: None, guard: None };
    match finish {
        Finish::EndToken(id) | Finish::StopToken(id) | Finish::ToolCalls(id) => detail.token_id = *id,
        Finish::StopString(text) => detail.stop = Some(text.clone()),
        Finish::Repetition(Repetition { period, repeats }) => {
            detail.period = Some(*period);
            detail.repeats = Some(*repeats);
        }
        // The rule may tell what the operator's patterns are, so only the log has it.
        Finish::ContentFilter { guard, .. } => detail.guard = Some(guard),
        Finish::MaxTokens | Finish::ContextFull | Finish::Deadline => {}
    }
    detail
}
