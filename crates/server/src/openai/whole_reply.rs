//! Whole replies, written in pieces. The JSON is that of `reply_json::ChatCompletion` and `reply_json::Completion`,
//! which would take many times the memory of the tokens that they show.

use std::sync::Arc;

use pellucid_generate::{Delta, ReplyToken, ReplyTrace, Summary, TokenVerdict};
use pellucid_sampling::{CandidateTrace, StepTrace};

use super::logprobs::{self, ChatLogprobs, CompletionLogprobs};
use super::reply_json::{Envelope, finish_reason};
use super::tools;
use super::usage::{Extension, Usage};
use crate::reply::parts::JsonParts;
use crate::reply::{Dialect, Sampling};

/// Allocations are rounded up, and vectors have spare capacity.
const ALLOCATION_BYTES: usize = 16;

/// Memory that the pieces of a choice take until the reply is written.
pub(crate) fn delta_bytes(delta: &Delta) -> usize {
    let trace = |trace: &ReplyTrace| {
        let step = |step: &StepTrace| {
            size_of::<StepTrace>() + step.setting.len() + step.candidates.len() * size_of::<CandidateTrace>()
        };
        let verdicts = trace.verdicts.len() * size_of::<TokenVerdict>();
        size_of::<ReplyTrace>() + verdicts + trace.token.steps.iter().map(step).sum::<usize>()
    };
    let tokens = delta.tokens.iter();
    let tokens = tokens.map(|token| token_bytes(token.logprobs.as_ref().map_or(0, |logprobs| logprobs.top.len())));
    // Strings and vectors that grow have up to twice their length.
    let texts = 2 * (delta.text.len() + delta.thoughts.len()) + tools::calls_bytes(&delta.calls);
    texts + 2 * size_of_val(&*delta.ids) + tokens.sum::<usize>() + 2 * delta.traces.iter().map(trace).sum::<usize>()
}

/// Memory of a token of the reply that is reported with `num_top` log probabilities.
pub(crate) fn token_bytes(num_top: usize) -> usize {
    2 * size_of::<ReplyToken>() + num_top * size_of::<(u32, f32)>() + ALLOCATION_BYTES
}

/// The text of a choice, shared with the parts that show its tokens.
struct ChoiceText(Arc<Delta>);

impl AsRef<str> for ChoiceText {
    fn as_ref(&self) -> &str {
        &self.0.text
    }
}

/// The thoughts of a choice.
struct ChoiceThoughts(Arc<Delta>);

impl AsRef<str> for ChoiceThoughts {
    fn as_ref(&self) -> &str {
        &self.0.thoughts
    }
}

impl Envelope {
    /// Returns the JSON of a whole reply; `choices` holds the joined pieces of each choice.
    pub(crate) fn parts(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts {
        let mut parts = JsonParts::default();
        let object = match self.dialect {
            Dialect::Chat => "chat.completion",
            Dialect::Completions => "text_completion",
        };
        parts.literal("{\"id\":");
        parts.value(&self.id);
        parts.literal(&format!(",\"object\":\"{object}\",\"created\":{},\"model\":", self.created));
        parts.value(&self.model);
        parts.literal(",\"system_fingerprint\":");
        parts.value(&self.fingerprint);
        if let Some(tier) = self.service_tier {
            parts.literal(",\"service_tier\":");
            parts.value(&tier);
        }
        parts.literal(",\"choices\":[");
        for (i, delta) in choices.into_iter().enumerate() {
            parts.literal(if i > 0 { ",{" } else { "{" });
            self.choice(&Arc::new(delta), true, &mut parts);
            parts.literal("}");
        }
        parts.literal("]");
        if let (Some(ids), Dialect::Chat) = (&self.prompt_ids, self.dialect) {
            ids.write(0, &mut parts);
        }
        parts.literal(",\"usage\":");
        parts.value(&Usage::new(summary));
        parts.literal(",\"pellucid\":");
        parts.value(&Extension::new(sampling, summary));
        parts.literal("}");
        parts
    }

    /// Writes the fields of a choice. `is_first` says that no earlier piece of the choice was written.
    pub(crate) fn choice(&self, delta: &Arc<Delta>, is_first: bool, parts: &mut JsonParts) {
        parts.literal(&format!("\"index\":{},", delta.choice));
        match self.dialect {
            Dialect::Completions => {
                parts.literal("\"text\":\"");
                parts.text(ChoiceText(delta.clone()));
                parts.literal("\"");
            }
            Dialect::Chat => self.message(delta, parts),
        }
        self.details(delta, parts);
        let Some(ids) = &self.prompt_ids else { return };
        if is_first && self.dialect == Dialect::Completions {
            ids.write(delta.choice, parts);
        }
        parts.literal(",\"token_ids\":[");
        let delta = delta.clone();
        parts.list(0..delta.ids.len(), move |i, out| out.json(&delta.ids[i]));
        parts.literal("]");
    }

    /// Writes the assistant's message.
    fn message(&self, delta: &Arc<Delta>, parts: &mut JsonParts) {
        parts.literal("\"message\":{\"role\":\"assistant\",\"content\":");
        if delta.text.is_empty() && !delta.calls.is_empty() {
            parts.literal("null");
        } else {
            parts.literal("\"");
            parts.text(ChoiceText(delta.clone()));
            parts.literal("\"");
        }
        if !delta.thoughts.is_empty() {
            parts.literal(",\"reasoning_content\":\"");
            parts.text(ChoiceThoughts(delta.clone()));
            parts.literal("\"");
        }
        parts.literal(",\"refusal\":null");
        tools::write_calls(delta, parts);
        parts.literal("}");
    }

    /// Writes the fields of a choice that follow its text.
    fn details(&self, delta: &Arc<Delta>, parts: &mut JsonParts) {
        parts.literal(",\"logprobs\":");
        match (self.logprobs, self.dialect) {
            (None, _) => parts.literal("null"),
            (Some(_), Dialect::Chat) => ChatLogprobs::write(delta, &self.tokenizer, parts),
            (Some(num_top), Dialect::Completions) => {
                CompletionLogprobs::write(delta, num_top, &self.tokenizer, parts);
            }
        }
        parts.literal(",\"finish_reason\":");
        parts.value(&delta.finish.as_ref().map(finish_reason));
        if !delta.traces.is_empty() {
            parts.literal(",\"trace\":[");
            let (delta, tokenizer) = (delta.clone(), self.tokenizer.clone());
            let traces = 0..delta.traces.len();
            parts.list(traces, move |i, out| out.json(&logprobs::trace(&delta.traces[i], &tokenizer)));
            parts.literal("]");
        }
    }
}

#[cfg(test)]
mod tests {
    use pellucid_checkpoint::Checkpoint;
    use pellucid_generate::{CallDelta, Finish, PartKind};
    use pellucid_sampling::Logprobs;
    use pellucid_testing::tiny_model;
    use pellucid_tokenizer::Tokenizer;

    use super::*;
    use crate::openai::reply_json::{ChunkWriter, PromptIds};
    use crate::openai::sampling::SamplingFields;
    use crate::openai::shared_fields::Streaming;
    use crate::reply::buffer::ReplyBuffer;

    fn envelope(dialect: Dialect, logprobs: Option<u32>) -> Envelope {
        let folder = tempfile::tempdir().unwrap();
        tiny_model(folder.path(), None);
        let tokenizer = Tokenizer::from_checkpoint(&Checkpoint::open(folder.path()).unwrap()).unwrap();
        Envelope {
            dialect,
            logprobs,
            id: "an \"id\"".into(),
            created: 5,
            model: "tiny/é".into(),
            fingerprint: "pellucid-test".into(),
            service_tier: logprobs.map(|_| "default"),
            may_call: false,
            tokenizer: Arc::new(tokenizer),
            // Requests with log probabilities also ask for ids, so that both forms are tested.
            prompt_ids: logprobs.map(|_| PromptIds::new(vec![(0..700).collect()], 3)),
        }
    }

    fn choice(choice: usize, num_tokens: u32, num_top: u32) -> Delta {
        let token = |i: u32| {
            let chosen = if i % 7 == 3 { f32::NEG_INFINITY } else { -0.1 * i as f32 };
            let top = (0..num_top).map(|rank| ((i + rank) % 256, -1.5 - rank as f32 / 3.0)).collect();
            let logprobs = (i > 0).then_some(Logprobs { chosen, top });
            ReplyToken { id: i % 256, logprobs, offset: 2 * i as usize, at_start: i == 0, part: PartKind::Answer }
        };
        let text = "a \"text\"\n\u{1F600}é".repeat(num_tokens as usize);
        let thoughts = "\"Hm\" ".repeat(num_tokens as usize);
        let ids = (0..num_tokens).collect();
        Delta { text, thoughts, tokens: (0..num_tokens).map(token).collect(), ids, ..Delta::new(choice) }
    }

    fn calls() -> Vec<CallDelta> {
        let call = |index: usize, num: usize| CallDelta {
            index,
            id: Some(format!("call_{index}")),
            name: Some("f".into()),
            arguments: format!("{{\"a\":\"{}\"}}", "é\\n".repeat(num)),
        };
        vec![call(0, 4), call(1, 3000)]
    }

    #[test]
    fn pieces_join_to_the_documented_json() {
        for dialect in [Dialect::Chat, Dialect::Completions] {
            for logprobs in [None, Some(0), Some(20)] {
                let num_top = logprobs.unwrap_or(0);
                let ended = Delta { finish: Some(Finish::MaxTokens), ..choice(1, 0, 0) };
                let mut choices = vec![choice(0, 600, num_top), ended];
                if dialect == Dialect::Chat {
                    choices.push(Delta { calls: calls(), finish: Some(Finish::ToolCalls(None)), ..choice(2, 0, 0) });
                }
                let sampling = Sampling {
                    fields: SamplingFields::default(),
                    params: Default::default(),
                    is_beam_search: false,
                    has_grammar: false,
                    not_enforced: Arc::default(),
                    explains_cache: false,
                };
                let summary = Summary::default();
                let mut parts = envelope(dialect, logprobs).parts(choices.clone(), &sampling, &summary);
                let (mut joined, mut num_pieces) = (Vec::new(), 1);
                loop {
                    let mut piece = ReplyBuffer::default();
                    let is_last = parts.write(2000, &mut piece).unwrap();
                    joined.extend(piece.into_bytes());
                    if is_last {
                        break;
                    }
                    num_pieces += 1;
                }
                assert!(num_pieces > 2);
                let expected = envelope(dialect, logprobs).whole(choices, &sampling, &summary);
                assert!(expected == String::from_utf8(joined).unwrap(), "{dialect:?} {logprobs:?}");
            }
        }
    }

    #[test]
    fn a_long_piece_of_a_stream_has_the_same_json() {
        for obfuscates in [false, true] {
            let streaming = Streaming { include_usage: true, obfuscates };
            let mut writer = ChunkWriter::new(envelope(Dialect::Completions, Some(3)), streaming);
            let delta = choice(0, 600, 3);
            assert!(writer.is_long(&delta) && !writer.is_long(&choice(0, 10, 3)));
            let mut expected = ReplyBuffer::default();
            writer.delta(&delta, None, &mut expected).unwrap();
            let mut writer = ChunkWriter::new(envelope(Dialect::Completions, Some(3)), streaming);
            let mut joined = ReplyBuffer::default();
            let mut long = writer.begin_long(delta, &mut joined).unwrap();
            let mut num_steps = 0;
            loop {
                let limit = joined.len() + 1000;
                num_steps += 1;
                if writer.continue_long(&mut long, limit, &mut joined).unwrap() {
                    break;
                }
            }
            assert!(num_steps > 3);
            // The padding is random; its length is not.
            assert_eq!(joined.len(), expected.len());
            assert!(obfuscates || joined.as_bytes() == expected.as_bytes());
        }
    }
}
