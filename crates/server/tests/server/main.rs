//! A server in this process, tested through its routes.
//!
//! One program for all of these tests: each program with a server takes a quarter of a minute to compile.

mod bad_input;
mod client_fields;
mod dialects;
mod embeddings;
mod limits;
mod metrics;
mod models;
mod openapi;
mod output;
mod pages;
mod refusals;
mod replies;
mod sampling_defaults;
mod support;
