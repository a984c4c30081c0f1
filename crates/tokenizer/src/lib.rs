//! Text to ids and back: tokenizers of GGUF files and of tokenizer.json, chat templates, the incremental text stream.
//!
//! The server and the CLI call this room; the engine never sees text. It reads a [`pellucid_checkpoint::Checkpoint`]
//! and knows nothing of tensors, sampling or HTTP. It has no clock, reads no environment and opens no file.
//!
//! Begin with [`Tokenizer`]; a conversation goes through [`ChatTemplate`] to [`Segment`]s, and
//! [`Tokenizer::encode_segments`] makes ids of them in which no message text can become a control token.

mod added;
mod adjacency;
mod bpe;
mod chat;
mod error;
mod gguf;
mod json;
mod merge;
mod normalize;
mod pipeline;
mod pretokenize;
mod segment;
mod spm;
mod stop;
mod text_stream;
mod to_gguf;
mod tokenizer;
mod unicode;
mod unigram;
mod vocabulary;

pub use chat::{ChatTemplate, Conversation, DateTime, ROLES, message};
pub use error::Error;
pub use segment::Segment;
pub use stop::StopFilter;
pub use text_stream::TextStream;
pub use to_gguf::write_gguf;
pub use tokenizer::Tokenizer;
pub use vocabulary::{Kind, TokenInfo};
