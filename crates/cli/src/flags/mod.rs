//! Flags: what the command line, the environment and the config file say, and what it means.
//!
//! `command_line` holds the program's commands and is the only module that reads the environment. The others are groups
//! of flags that several commands share.

pub(crate) mod byte_size;
pub(crate) mod chat_template;
pub(crate) mod command_line;
pub(crate) mod compute;
mod files;
pub(crate) mod guard;
pub(crate) mod prompt;
pub(crate) mod ranks;
mod reply;
pub(crate) mod sampling;
pub(crate) mod setting_layers;
pub(crate) mod speculation;
pub(crate) mod usage_error;

pub(crate) use files::{json_file, text_file, toml_file};
pub(crate) use reply::{grammar, stop, thinking, tools};
