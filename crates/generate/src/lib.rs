//! From text to text over one engine: the crate between the programs (command line, server, library) and the engine.
//!
//! Read in the order of a request: [`LoadedModel`] is a model that is ready to answer, [`PromptEncoder`] makes token
//! ids of messages or text, [`Generation`] submits them and returns pieces of text, each made by [`ChoiceText`], which
//! separates thoughts and calls of tools by the model's own format and holds back half characters and stop strings.
//! [`Guards`] judge prompts and replies before anybody reads them.
//! This crate opens no file, chooses no device, and knows neither HTTP nor terminals.
#![forbid(unsafe_code)]
#![deny(missing_docs)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod choice_text;
mod clock;
mod embedder;
mod error;
mod event_channel;
mod finish;
mod generation;
mod grammars;
mod guard;
mod model;
mod progress;
mod prompt;
mod prompt_replies;
mod reply_format;
mod summary;
mod thinking;
mod tool_messages;

pub use choice_text::{ChoiceText, Delta, ReplyToken, ReplyTrace, TextRules};
pub use clock::{utc_at, utc_now};
pub use embedder::{LoadedEmbedder, ShorterVectors, cosine, finished_vector};
pub use error::Error;
pub use event_channel::Monitor;
pub use finish::Finish;
pub use generation::{Generation, GenerationEvent, GenerationRequest, PromptRequest};
pub use grammars::Grammars;
pub use guard::{
    Guard, GuardCount, GuardError, Guards, JudgedPrompt, Judging, MAX_MATCH_BYTES, ModelGuard, OnGuardError, Passage,
    PatternError, PatternGuard, PromptText, Refusal, ReplyScanner, ReplyText, SEGMENT_CHARACTERS, Scan, TokenVerdict,
    Turn, Verdict, VerdictFormat, VerdictKind,
};
pub use model::{LoadedModel, ModelDetails};
pub use pellucid_grammar::{
    CallFormat, Error as GrammarError, FORMATS as TOOL_FORMATS, GrammarSource, MAX_CHOICES as MAX_GRAMMAR_CHOICES,
    MAX_SOURCE_BYTES,
};
pub use progress::{Phase, Progress};
pub use prompt::{ChatPrompt, EncodedChat, FillInTokens, PromptEncoder, PromptEnd};
pub use reply_format::{
    CallDelta, Calling, Channels, MAX_TOOL_NAME, MAX_TOOLS, MarkerTokens, PartKind, REASONING_EFFORTS, ReplyPart,
    ReplyPlan, ReplySplitter, ThinkingError, ThinkingSettings, ThoughtConstraint, ThoughtMarkers, Tool, ToolChoice,
    ToolError, ToolRules,
};
pub use summary::{ReplyMiss, ReplyProbe, Summary};
pub use thinking::Thinking;
pub use tool_messages::ToolCall;
