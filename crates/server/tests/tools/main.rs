//! Tools through the API: how requests with tools, calls and results are read.

#[path = "../support/mod.rs"]
mod support;

mod requests;
