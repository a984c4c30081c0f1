//! Tools through the API: how requests with tools, calls and results are read, and replies that call tools.

#[path = "../support/mod.rs"]
mod support;

mod replies;
mod requests;
