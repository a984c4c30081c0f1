//! Reads files that flags name.

pub(crate) mod json_file;
pub(crate) mod text_file;
pub(crate) mod toml_file;
