//! Vocabularies and chat templates, against the reference implementation and under attack. One program links once.

#[path = "../common/mod.rs"]
mod common;

mod chat_attacks;
mod chat_jinja;
mod chat_reference;
mod chat_security;
mod chat_tools;
mod conformance;
mod gguf_metadata;
mod gguf_writer;
mod properties;
mod reference_library;
mod stream;
mod tokenizer_json;
