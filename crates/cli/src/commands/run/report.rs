//! The end of a reply: the line with counts and speeds, and the object of `--json`.

use std::time::Duration;

use pellucid_engine::{GAP_BOUNDS_S, MissReason, PrefixDifference};
use pellucid_generate::{Delta, Finish, Generation, LoadedModel, ToolCall};
use pellucid_sampling::SamplingParams;
use serde_json::{Map, Value, json};

use crate::commands::explain::sampling_json;
use crate::flags::speculation::{counts_json, counts_text};
use crate::terminal::cells::one_line;

/// Why a reply ended, for programs and for people.
struct Ending {
    /// Name in JSON.
    name: &'static str,
    /// Words for people; empty if the model ended the reply.
    words: &'static str,
}

/// Whether a reply with this end satisfies its grammar as a whole.
pub(super) fn completes_grammar(finish: Option<&Finish>) -> bool {
    matches!(finish, Some(Finish::EndToken(_) | Finish::ToolCalls(_)))
}

/// Returns why a reply ended; `None` is a reply that Ctrl-C stopped.
fn ending(finish: Option<&Finish>) -> Ending {
    let (name, words) = match finish {
        Some(Finish::EndToken(_)) => ("stop", ""),
        Some(Finish::StopToken(_)) => ("stop_token", ""),
        Some(Finish::StopString(_)) => ("stop_text", "ended at --stop"),
        Some(Finish::MaxTokens) => ("max_tokens", "ended at --max-tokens"),
        Some(Finish::ContextFull) => ("context_full", "ended because the context is full"),
        Some(Finish::Repetition(_)) => ("repetition", "ended because it repeated itself"),
        Some(Finish::ToolCalls(_)) => ("tool_calls", "called a tool"),
        Some(Finish::Deadline) => ("deadline", "ended at its time limit"),
        Some(Finish::ContentFilter { .. }) => ("content_filter", "blocked by a guard"),
        None => ("interrupted", "stopped"),
    };
    Ending { name, words }
}

/// A finished request.
pub(super) struct Report<'r> {
    pub(super) model: &'r LoadedModel,
    pub(super) generation: &'r Generation,
    pub(super) sampling: &'r SamplingParams,
    /// Whether the replies have a grammar.
    pub(super) has_grammar: bool,
    /// Whether the replies could call tools.
    pub(super) has_tools: bool,
    /// Parts of the tools' schemas that calls need not satisfy.
    pub(super) not_enforced: &'r [String],
    /// Whether tokens were chosen at random, by the seed.
    pub(super) is_sampled: bool,
    /// Whether drafters were to propose tokens.
    pub(super) is_drafted: bool,
}

/// Token counts and times of a request.
struct Counts {
    prompt: usize,
    cached: usize,
    output: usize,
    /// From submission to the first token: the prefill.
    first: Option<Duration>,
    /// From the first token to the last.
    decode: Duration,
    total: Duration,
}

impl Report<'_> {
    /// Returns the lines of `--verbose`: the prefix cache and the time.
    pub(super) fn details(&self) -> Vec<String> {
        let summary = self.generation.summary();
        let text = |ids: &[u32]| one_line(&self.model.tokenizer.decode(ids, false));
        let mut lines = vec![format!("[cache: {} of {} prompt tokens]", summary.cached_tokens, summary.prompt_tokens)];
        for found in &summary.misses {
            lines.push(format!("[cache: {}]", found.sentence()));
            if let MissReason::Differs(PrefixDifference { before, prompt, cached, .. }) = &found.miss.reason {
                lines.push(format!("[cache: after \"{}\"", text(before)));
                lines.push(format!("   this prompt has \"{}\"", text(prompt)));
                lines.push(format!("   the cached one has \"{}\"]", text(cached)));
            }
        }
        let milliseconds = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
        let prefill = summary.prefill_time.map(milliseconds).unwrap_or_else(|| "none".into());
        lines.push(format!("[time: queue {}, prefill {prefill}]", milliseconds(summary.queue_time)));
        if let Some(gaps) = summary.gaps.filter(|gaps| gaps.count() > 0) {
            let bounds = GAP_BOUNDS_S.iter().map(|bound| format!("up to {} ms", bound * 1e3));
            let names = bounds.chain(["longer".to_owned()]);
            let counts = names.zip(gaps.counts).filter(|(_, count)| *count > 0);
            let counts: Vec<String> = counts.map(|(name, count)| format!("{count} {name}")).collect();
            lines.push(format!("[gaps between tokens: {}]", counts.join(", ")));
        }
        lines
    }

    fn counts(&self) -> Counts {
        let summary = self.generation.summary();
        let stats = self.generation.stats(0);
        // A beam search sends no tokens, but the engine measures its first step.
        let first = stats.map(|stats| stats.time_to_first_token).or(summary.time_to_first_token);
        Counts {
            prompt: summary.prompt_tokens,
            cached: summary.cached_tokens,
            // Without tokens that the engine computed behind a stop string.
            output: summary.completion_tokens,
            first: first.filter(|first| !first.is_zero()),
            decode: stats.map_or(summary.decode_time, |stats| stats.decode_time),
            total: summary.total_time,
        }
    }

    /// Returns the last line: `[34 in at 420 tok/s, 87 out at 71 tok/s, 1.5 s, seed 7]`, with the drafted tokens
    /// before the seed if there are any.
    pub(super) fn line(&self) -> String {
        let counts = self.counts();
        let cached = match counts.cached {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        let computed = counts.prompt.saturating_sub(counts.cached);
        let mut parts = vec![
            format!("{} in{cached}{}", counts.prompt, speed(computed, counts.first)),
            // The first token comes with the prefill.
            format!("{} out{}", counts.output, speed(counts.output.saturating_sub(1), Some(counts.decode))),
            seconds_text(counts.total),
        ];
        if let Some(counts) = counts_text(&self.generation.summary().speculation) {
            parts.push(counts);
        } else if self.is_drafted {
            parts.push("nothing drafted".to_owned());
        }
        if self.is_sampled {
            parts.push(format!("seed {}", self.sampling.seed));
        }
        let finishes = &self.generation.summary().finishes;
        let words = ending(finishes.iter().flatten().next()).words;
        if !words.is_empty() {
            parts.push(words.to_owned());
        }
        format!("[{}]", parts.join(", "))
    }

    /// Returns the object of `--json`. `load` is the time that loading the model took.
    pub(super) fn json(&self, replies: &[Delta], load: Duration) -> Value {
        let counts = self.counts();
        let finishes = &self.generation.summary().finishes;
        let reply = |i: usize, delta: &Delta| {
            let mut reply = Map::new();
            if self.model.thinking().markers.is_some() {
                reply.insert("thoughts".into(), json!(delta.thoughts));
            }
            reply.insert("text".into(), json!(delta.text));
            if self.has_tools {
                let calls = delta
                    .calls
                    .iter()
                    .filter_map(ToolCall::of)
                    .map(|call| json!({ "id": call.id, "name": call.name, "arguments": call.arguments }));
                reply.insert("tool_calls".into(), calls.collect());
            }
            let finish = finishes.get(i).and_then(Option::as_ref);
            reply.insert("finish_reason".into(), json!(ending(finish).name));
            if self.has_grammar && !completes_grammar(finish) {
                reply.insert("grammar".into(), json!("unfinished"));
            }
            if let Some(score) = delta.score {
                reply.insert("score".into(), json!(score));
            }
            reply
        };
        let mut object = Map::new();
        object.insert("model".into(), json!(self.model.id));
        if !self.not_enforced.is_empty() {
            object.insert("not_enforced".into(), json!(self.not_enforced));
        }
        match replies {
            [only] => object.extend(reply(0, only)),
            several => {
                let replies = several.iter().enumerate().map(|(i, delta)| Value::Object(reply(i, delta))).collect();
                object.insert("replies".into(), replies);
            }
        }
        let mut tokens = json!({ "prompt": counts.prompt, "cached": counts.cached, "output": counts.output });
        if self.model.thinking().markers.is_some() {
            tokens["thoughts"] = json!(self.generation.summary().thought_tokens);
        }
        let seconds = json!({
            "load": load.as_secs_f64(),
            "prefill": counts.first.map(|first| first.as_secs_f64()),
            "decode": counts.decode.as_secs_f64(),
            "total": counts.total.as_secs_f64(),
        });
        object.insert("tokens".into(), tokens);
        object.insert("seconds".into(), seconds);
        object.insert("speculation".into(), counts_json(&self.generation.summary().speculation));
        object.insert("seed".into(), json!(self.is_sampled.then_some(self.sampling.seed)));
        object.insert("settings".into(), sampling_json(self.sampling));
        Value::Object(object)
    }
}

/// Returns ` at 420 tok/s`; nothing where no time was measured.
fn speed(num_tokens: usize, time: Option<Duration>) -> String {
    match time.map(|time| time.as_secs_f64()) {
        Some(seconds) if num_tokens > 0 && seconds > 0.0 => {
            let rate = num_tokens as f64 / seconds;
            let decimals = usize::from(rate < 9.95);
            format!(" at {rate:.decimals$} tok/s")
        }
        _ => String::new(),
    }
}

fn seconds_text(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 0.0995 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds < 99.95 => format!("{seconds:.1} s"),
        seconds => format!("{seconds:.0} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_and_times() {
        let at = |tokens, milliseconds| speed(tokens, Some(Duration::from_millis(milliseconds)));
        assert_eq!(at(34, 81), " at 420 tok/s");
        assert_eq!(at(3, 1500), " at 2.0 tok/s");
        assert_eq!((at(0, 5), at(5, 0), speed(5, None)), (String::new(), String::new(), String::new()));
        let text = |milliseconds| seconds_text(Duration::from_millis(milliseconds));
        assert_eq!([text(4), text(1500), text(240_000)], ["4 ms", "1.5 s", "240 s"]);
    }
}
