//! From text to ids, in the order that a text takes: normalizer, pre-tokenizer, and one of four encoding algorithms.

pub(crate) mod bpe;
pub(crate) mod joinable_pairs;
mod merge_loop;
pub(crate) mod normalize;
pub(crate) mod pattern;
pub(crate) mod pipeline;
pub(crate) mod pretokenize;
pub(crate) mod reference_classes;
pub(crate) mod sentencepiece;
pub(crate) mod unigram;
pub(crate) mod wordpiece;
