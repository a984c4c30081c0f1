//! Anthropic's Messages API: requests become chat requests, replies become messages of content blocks.

mod content;
mod headers;
mod message;
mod request;
pub(crate) mod routes;
mod schemas;
mod stream;
mod tools;
