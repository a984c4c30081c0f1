//! Ollama's API: requests become chat requests or completions, replies are lines of JSON.

mod messages;
pub(crate) mod models;
mod options;
mod reply;
mod request;
pub(crate) mod routes;
mod schemas;
