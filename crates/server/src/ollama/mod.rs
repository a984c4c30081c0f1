//! Ollama's API: requests become chat requests or completions, replies are lines of JSON.

pub(crate) mod embed;
mod messages;
pub(crate) mod models;
mod options;
mod reply;
mod request;
pub(crate) mod routes;
mod schemas;
