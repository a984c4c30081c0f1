//! Text to ids and back: tokenizers of GGUF files and of tokenizer.json, chat templates, the incremental text stream.
//!
//! The server and the CLI call this room; the engine never sees text. It reads a [`pellucid_checkpoint::Checkpoint`]
//! and knows nothing of tensors, sampling or HTTP. It has no clock, reads no environment and opens no file.
//!
//! Begin with [`Tokenizer`]; a conversation goes through [`ChatTemplate`] to [`Segment`]s, and
//! [`Tokenizer::encode_segments`] makes ids of them in which no message text can become a control token.

#![forbid(unsafe_code)]

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

pub use chat::{ChatTemplate, Conversation, DateTime, ROLES, Segment, message};
pub use error::Error;
pub use formats::write_gguf;
pub use stop_filter::StopFilter;
pub use text_stream::TextStream;
pub use tokenizer::Tokenizer;
pub use vocabulary::{TokenInfo, TokenKind};
