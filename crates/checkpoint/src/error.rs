//! Everything that can be wrong with a model on disk. Each variant says what, where, what was expected and what was
//! found.
//!
//! Names that come from a file are quoted with escapes and cut to a readable length, so that a hostile name can neither
//! control a terminal nor flood a log. A message contains its cause, so no variant has a `source`: a printed chain
//! would state it twice.

use std::path::{Path, PathBuf};

/// Why a checkpoint could not be opened, or does not contain what was requested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system returned an error.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io { path: PathBuf, action: &'static str, cause: std::io::Error },

    /// The path is neither a GGUF file nor a Hugging Face folder or a file of one.
    #[error(
        "{}: not a model: expected a GGUF file or a Hugging Face folder (config.json beside *.safetensors), \
         found {found}",
        path.display()
    )]
    NotAModel { path: PathBuf, found: String },

    /// A pickle, which runs code when it is loaded. It is recognised, but never loaded.
    #[error(
        "{}: this is a Python pickle ({reason}). Loading a pickle runs whatever code its author put into it, so \
         it is refused; use the *.safetensors files of the same model, or a GGUF file",
        path.display()
    )]
    Pickle { path: PathBuf, reason: &'static str },

    #[error(
        "{}: not a GGUF file: expected the four bytes \"GGUF\" at the start, found \"{}\"",
        path.display(),
        found.escape_ascii()
    )]
    BadMagic { path: PathBuf, found: Vec<u8> },

    #[error(
        "{}: GGUF version {version} in big-endian byte order; only little-endian files are supported, convert it first",
        path.display()
    )]
    BigEndian { path: PathBuf, version: u32 },

    #[error("{}: GGUF version: expected 2 or 3, found {found}", path.display())]
    UnsupportedVersion { path: PathBuf, found: u32 },

    /// Fewer bytes are left than the next item takes, or than a count of items takes at the very least.
    #[error(
        "{}: the file ends within {what}: expected {needed} bytes from byte {offset}, found {left}",
        path.display()
    )]
    Truncated { path: PathBuf, what: String, offset: u64, needed: u64, left: u64 },

    /// A length or count above a fixed limit of the reader.
    #[error("{}: {what}: expected at most {limit}, found {found}", path.display())]
    TooLarge { path: PathBuf, what: String, limit: u64, found: u64 },

    /// A value that the format does not allow.
    #[error("{}: {what}: expected {expected}, found {found}", path.display())]
    Invalid { path: PathBuf, what: String, expected: &'static str, found: String },

    #[error("{}: {what} appears twice", path.display())]
    Duplicate { path: PathBuf, what: String },

    #[error("{}: tensor {tensor} has the unsupported type {found}; supported are {supported}", path.display())]
    UnsupportedTensorType { path: PathBuf, tensor: String, found: String, supported: String },

    /// The shape does not fit the type, or the number of bytes overflows.
    #[error("{}: tensor {tensor} of type {dtype} and shape {shape}: expected {expected}", path.display())]
    TensorShape { path: PathBuf, tensor: String, dtype: String, shape: String, expected: &'static str },

    /// The data of the tensor overlaps another tensor's, is not aligned, or is not within the file.
    #[error("{}: tensor {tensor} lies at bytes {start} to {end} of the data: expected {expected}", path.display())]
    TensorOffsets { path: PathBuf, tensor: String, start: u64, end: u64, expected: String },

    /// A part of a split GGUF, a shard of a safetensors model, or a file that a Hugging Face folder must have.
    #[error("{}: missing; {needed_by}", path.display())]
    MissingFile { path: PathBuf, needed_by: String },

    /// The parts of a split model do not agree with each other or with their names.
    #[error("{}: {what}: expected {expected}, found {found}", path.display())]
    Split { path: PathBuf, what: String, expected: String, found: String },

    #[error("{}: not valid JSON: {cause}", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },

    /// A tensor that is converted to another format has a value that is infinite, NaN, or beyond the range of the new
    /// format.
    #[error("{}: tensor {tensor} has a value that is not finite, or not finite in the new format", path.display())]
    NotFinite { path: PathBuf, tensor: String },

    /// A file that was read into memory has another SHA-256 than expected.
    #[error(
        "{}: the file has changed: expected the sha256 {expected}, found {found}; pull the model again",
        path.display()
    )]
    Hash { path: PathBuf, expected: String, found: String },

    #[error(
        "{}: no memory for the {bytes} bytes of the file; without --no-mmap the file is mapped instead",
        path.display()
    )]
    OutOfMemory { path: PathBuf, bytes: u64 },

    #[error("the model has no tensor {name}")]
    MissingTensor { name: String },

    #[error("the model has no key {key}")]
    MissingKey { key: String },

    #[error("key {key}: expected {expected}, found {found}")]
    KeyType { key: String, expected: &'static str, found: String },
}

impl Error {
    pub(crate) fn io(path: &Path, action: &'static str, cause: std::io::Error) -> Error {
        Error::Io { path: path.to_path_buf(), action, cause }
    }

    pub(crate) fn invalid(
        path: &Path,
        what: impl std::fmt::Display,
        expected: &'static str,
        found: impl std::fmt::Display,
    ) -> Error {
        Error::Invalid { path: path.to_path_buf(), what: what.to_string(), expected, found: found.to_string() }
    }
}

/// Returns a name from a file for use in a message: escaped, quoted, and cut after 120 characters.
pub(crate) fn quote(name: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    match name.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{:?}... ({} bytes)", &name[..cut], name.len()),
        None => format!("{name:?}"),
    }
}
