//! Whole models: against the reference implementation, from both file formats, bit by bit. One program links once.

mod beams;
mod devices;
mod encoders;
mod gguf_conversion;
mod goldens;
mod invalid_models;
mod invariance;
mod predictors;
mod ranks;
