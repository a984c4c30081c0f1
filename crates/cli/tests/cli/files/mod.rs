//! Files of models: fetched, embedded, mapped, quantized.

mod embedded_model;
mod hub;
mod no_mmap;
mod pip_isolation;
mod quantize;
