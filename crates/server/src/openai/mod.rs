//! OpenAI's API: requests are read field by field, replies are written as JSON. vLLM's routes for tokens are here too.

pub(crate) mod cache_miss;
pub(crate) mod chat;
pub(crate) mod client_fields;
pub(crate) mod completions;
pub(crate) mod conversation;
pub(crate) mod embeddings;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod openapi;
pub(crate) mod probe;
pub(crate) mod reply_json;
pub(crate) mod sampling;
pub(crate) mod shared_fields;
pub(crate) mod speculation;
pub(crate) mod structured_output;
mod thinking;
pub(crate) mod tokenize;
pub(crate) mod tools;
pub(crate) mod usage;
pub(crate) mod whole_reply;
