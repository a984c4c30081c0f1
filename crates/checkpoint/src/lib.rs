//! A model on disk: [`Checkpoint`] opens GGUF files and Hugging Face folders and presents both in the same way.
//!
//! `tokenizer` and `model` use this crate for hyperparameters, vocabulary text and tensor bytes. It knows file formats,
//! but not what the values mean: no architecture, tensor name or token is treated specially.
//!
//! Every file is untrusted. Counts and lengths are compared with the bytes that are left before anything is allocated,
//! and sizes are computed with checked arithmetic. A file that fails a check gives an [`Error`] that names the file and
//! the tensor or key.

#![deny(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod checkpoint;
mod convert;
mod error;
mod file_bytes;
mod gguf;
mod hugging_face;
// The only module with unsafe code: memory-mapping a file, and the handler of its bus errors.
#[allow(unsafe_code)]
mod mmap;
mod pickle;

pub use checkpoint::{Checkpoint, Source, TensorInfo, TensorView};
pub use convert::{ConvertedTensor, TensorSource, write_converted};
pub use error::Error;
pub use file_bytes::{FileAccess, FileHash};
pub use gguf::metadata::Metadata;
pub use gguf::value::{Array, StringArray, Value};
pub use gguf::writer::{GgufWriter, NewTensor};
pub use hugging_face::HuggingFace;
pub use mmap::report_bus_errors;
