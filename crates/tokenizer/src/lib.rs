//! Text to ids and back: tokenizers of GGUF files and of tokenizer.json, chat templates, the incremental text stream.
//!
//! The server and the CLI call this crate; the engine never sees text. It reads a [`pellucid_checkpoint::Checkpoint`]
//! and knows nothing of tensors, sampling or HTTP. It has no clock, reads no environment variable and opens no file.
//!
//! Start with [`Tokenizer`]. [`ChatTemplate`] renders a conversation to [`Segment`]s, and
//! [`Tokenizer::encode_segments`] encodes them so that no text of a message becomes a control token.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod added_tokens;
mod algorithms;
mod chat;
mod error;
mod formats;
mod stop_filter;
mod text_stream;
mod tokenizer;
mod unicode_categories;
mod vocabulary;
mod vocabulary_difference;

pub use chat::{ChatTemplate, Conversation, DateTime, MemoryGrant, ROLES, RenderLimits, Segment, message};
pub use error::Error;
pub use formats::write_gguf;
pub use stop_filter::StopFilter;
pub use text_stream::TextStream;
pub use tokenizer::Tokenizer;
pub use vocabulary::{TokenInfo, TokenKind};
pub use vocabulary_difference::VocabularyDifference;
