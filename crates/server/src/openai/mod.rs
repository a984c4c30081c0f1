//! OpenAI's dialects: requests read field by field, replies in their shapes.

pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completions;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod sampling;
pub(crate) mod usage;
