//! Why a prompt was not found whole in the prefix cache, in the reply's `pellucid` object.

use pellucid_engine::{MissReason, PrefixDifference};
use pellucid_generate::ReplyMiss;
use serde::Serialize;
use utoipa::ToSchema;

/// Why the tokens of a prompt after `reused_tokens` were computed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct MissReport {
    /// Prompt tokens that were found.
    reused_tokens: usize,
    /// `differs`: the nearest cached prompt has another token at `position`; `evicted`: the next block was cached and
    /// has been evicted; `other_salt`: it is cached under another `cache_salt`; `no_snapshot`: it is cached, but no
    /// snapshot of the model's recurrent state; `no_window`: it is cached, but not the windows that layers with sliding
    /// windows need to go on; `new`: the next whole block of tokens is not cached.
    reason: &'static str,
    /// The reason as a sentence.
    sentence: String,
    /// Position of the first token that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    /// Text before it, which both have.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<String>,
    /// Text of the prompt from there on.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<String>,
    /// Text of the cached prompt from there on.
    #[serde(skip_serializing_if = "Option::is_none")]
    cached: Option<String>,
}

impl MissReport {
    pub(crate) fn new(found: &ReplyMiss) -> MissReport {
        let text = |ids: &[u32]| Some(found.tokenizer.decode(ids, false));
        let report = |reason| MissReport {
            reused_tokens: found.miss.reused,
            reason,
            sentence: found.sentence(),
            position: None,
            before: None,
            prompt: None,
            cached: None,
        };
        match &found.miss.reason {
            MissReason::Differs(PrefixDifference { position, before, prompt, cached }) => MissReport {
                position: Some(*position),
                before: text(before),
                prompt: text(prompt),
                cached: text(cached),
                ..report("differs")
            },
            MissReason::Evicted => report("evicted"),
            MissReason::OtherSalt => report("other_salt"),
            MissReason::NoSnapshot => report("no_snapshot"),
            MissReason::NoWindow => report("no_window"),
            MissReason::New => report("new"),
        }
    }
}
