//! Opens model files of every kind, valid and damaged, through the public API.
//!
//! A damaged file is always a small change to one that opens (the positive control), so that a test can only pass for
//! the reason in its name.

mod build;
mod gguf;
mod gguf_corrupt;
mod hugging_face;
mod hugging_face_corrupt;
mod properties;
mod quantized;
