//! One module for each command: its flags, and `run`.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod devices;
pub(crate) mod embed;
pub(crate) mod event_queue;
pub(crate) mod explain;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod model_on_device;
pub(crate) mod models;
pub(crate) mod open;
pub(crate) mod perplexity;
pub(crate) mod prove;
pub(crate) mod pull;
pub(crate) mod quantize;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod selftest;
pub(crate) mod serve;
pub(crate) mod server_models;
pub(crate) mod tokenize;
