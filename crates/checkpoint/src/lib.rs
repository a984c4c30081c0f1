//! A model on disk: GGUF files and Hugging Face folders look alike above [`Checkpoint`].
//!
//! `tokenizer` and `model` call this room for hyperparameters, vocabulary text and tensor bytes. It knows file formats and nothing
//! of what the numbers mean: no architecture, no tensor name and no token has a special place here.
//!
//! Every file is untrusted. Counts and lengths are held against the bytes that are left before anything is allocated, sizes are
//! computed with checked arithmetic, and what does not hold is an [`Error`] that names the file and the tensor or key.

mod checkpoint;
mod convert;
mod error;
mod gguf;
mod hugging_face;
mod mmap;
mod pickle;

pub use checkpoint::{Checkpoint, Source, TensorInfo, TensorView};
pub use convert::{ConvertedTensor, TensorSource, write_converted};
pub use error::Error;
pub use gguf::metadata::Metadata;
pub use gguf::value::{Array, StringArray, Value};
pub use gguf::writer::{GgufWriter, NewTensor};
pub use hugging_face::HuggingFace;
