//! The model that is served: what the routes need to know of it. Made by the program, which alone knows files and devices.

use std::sync::Arc;

use pellucid_engine::EngineHandle;
use pellucid_tokenizer::{ChatTemplate, DateTime, Tokenizer};

/// A loaded model behind its engine.
#[derive(Debug)]
pub struct ServedModel {
    /// The name that requests must give.
    pub id: String,
    /// Names model, build and instruction set: the same request to the same fingerprint gives the same bytes.
    pub fingerprint: String,
    pub tokenizer: Arc<Tokenizer>,
    /// Absent for models that were not trained to converse.
    pub template: Option<ChatTemplate>,
    /// Tokens that prompt and reply may take together.
    pub context_len: usize,
    /// Logits that the model gives; a tokenizer may know fewer tokens.
    pub vocab_size: usize,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    pub engine: EngineHandle,
    /// The clock for templates that ask for the date.
    pub now: fn() -> DateTime,
}
