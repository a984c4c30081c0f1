//! The two files that a tokenizer is read from: tokenizer.json and GGUF metadata; and the writer for GGUF.

pub(crate) mod gguf;
mod gguf_writer;
pub(crate) mod tokenizer_json;

pub use gguf_writer::write_gguf;
