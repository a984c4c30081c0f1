//! [`Checkpoint`]: one type for every file format. Chooses the reader for a path, and finds tensors by name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pellucid_tensor::{DType, SharedBytes};

use crate::error::{Error, quote};
use crate::file_bytes::{FileAccess, FileHash, FileReader};
use crate::gguf::metadata::Metadata;
use crate::gguf::writer::NewTensor;
use crate::hugging_face::HuggingFace;
use crate::hugging_face::quantized::EncodedTensor;
use crate::{gguf, hugging_face, pickle};

const GGUF_CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const GGUF_ARCHITECTURE: &str = "general.architecture";

/// An opened model: its description, and its tensors as views of the bytes of its files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    source: Source,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    files: Vec<PathBuf>,
    file_bytes: u64,
    hashes: Vec<FileHash>,
    notes: Vec<String>,
}

/// The source of hyperparameters and tokenizer.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one exists for each model")]
pub enum Source {
    Gguf(Metadata),
    HuggingFace(HuggingFace),
}

/// The description of one tensor. Its bytes were checked to lie within the file.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    pub name: String,
    /// Format of the values that [`TensorView::bytes`] returns.
    pub dtype: DType,
    /// Outermost dimension first; the last one is contiguous in memory. No dimension is zero; a scalar has no
    /// dimensions.
    pub shape: Vec<usize>,
    data: TensorData,
}

/// Source of a tensor's values.
#[derive(Debug, Clone)]
enum TensorData {
    /// The bytes of the file.
    Stored(SharedBytes),
    /// Several tensors of the file, from which the values are computed.
    Encoded(Arc<EncodedTensor>),
}

/// A tensor's description, and access to its values.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    pub info: &'a TensorInfo,
}

impl TensorView<'_> {
    /// Returns the values in the format `info.dtype`. Bytes that the file has are still in the mapped file; the values
    /// of an encoded tensor are computed by every call.
    pub fn bytes(&self) -> SharedBytes {
        match &self.info.data {
            TensorData::Stored(bytes) => bytes.clone(),
            TensorData::Encoded(encoded) => encoded.decode(self.info.dtype),
        }
    }
}

/// The result of a format's reader: everything except the index by name.
pub(crate) struct Contents {
    pub(crate) source: Source,
    pub(crate) tensors: Vec<TensorInfo>,
    /// Weight files in order, with their lengths in bytes.
    pub(crate) files: Vec<(PathBuf, u64)>,
    pub(crate) notes: Vec<String>,
}

impl TensorInfo {
    pub(crate) fn new(name: String, dtype: DType, shape: Vec<usize>, bytes: SharedBytes) -> TensorInfo {
        TensorInfo { name, dtype, shape, data: TensorData::Stored(bytes) }
    }

    /// Describes a tensor whose values are computed from several tensors of the file.
    pub(crate) fn encoded(name: String, shape: Vec<usize>, encoded: EncodedTensor) -> TensorInfo {
        TensorInfo { name, dtype: encoded.dtype(), shape, data: TensorData::Encoded(Arc::new(encoded)) }
    }

    /// Returns the name of the scheme by which the file encodes the values, such as "GPTQ 4-bit"; `None` if it
    /// holds them as they are.
    pub fn encoding(&self) -> Option<&str> {
        match &self.data {
            TensorData::Stored(_) => None,
            TensorData::Encoded(encoded) => Some(&encoded.scheme),
        }
    }

    /// Returns the number of values. Cannot overflow: the product was checked when the file was opened.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns `num_samples` pieces of up to `len` bytes at equal distances, from the first byte to the last: they say
    /// cheaply whether two files differ. Empty if the values are computed from several tensors of the file.
    pub fn samples(&self, num_samples: usize, len: usize) -> Vec<u8> {
        let TensorData::Stored(bytes) = &self.data else { return Vec::new() };
        let last = bytes.len().saturating_sub(len);
        let start =
            |sample: usize| (last as u128 * sample as u128 / num_samples.max(2).saturating_sub(1) as u128) as usize;
        (0..num_samples)
            .flat_map(|sample| &bytes[start(sample)..bytes.len().min(start(sample) + len)])
            .copied()
            .collect()
    }

    /// Returns the number of bytes in the file.
    pub fn num_bytes(&self) -> usize {
        match &self.data {
            TensorData::Stored(bytes) => bytes.len(),
            TensorData::Encoded(encoded) => encoded.num_bytes,
        }
    }
}

impl Checkpoint {
    /// Opens a GGUF file, a Hugging Face folder, or a file of such a folder. Any part of a split GGUF file opens all of
    /// them. Weights are mapped.
    pub fn open(path: &Path) -> Result<Checkpoint, Error> {
        Checkpoint::open_with(path, &FileAccess::Mapped)
    }

    /// Opens a model like [`Checkpoint::open`], with its files mapped or in memory.
    pub fn open_with(path: &Path, access: &FileAccess) -> Result<Checkpoint, Error> {
        let mut reader = FileReader::new(access);
        let contents = read(path, &mut reader)?;
        let hashes = reader.hashes;
        Ok(Checkpoint { hashes, ..Checkpoint::index(path, contents)? })
    }

    /// Creates a checkpoint that is not in a file. `name` takes the place of the path in messages.
    pub fn in_memory(
        name: &str,
        metadata: Metadata,
        tensors: Vec<(NewTensor, SharedBytes)>,
    ) -> Result<Checkpoint, Error> {
        let described = tensors.into_iter().map(|(tensor, bytes)| {
            assert_eq!(bytes.len(), tensor.num_bytes(), "the bytes of {}", tensor.name);
            TensorInfo::new(tensor.name, tensor.dtype, tensor.shape, bytes)
        });
        let tensors: Vec<TensorInfo> = described.collect();
        let file_bytes = tensors.iter().map(|tensor| tensor.num_bytes() as u64).sum();
        let contents = Contents {
            source: Source::Gguf(metadata),
            tensors,
            files: vec![(PathBuf::from(name), file_bytes)],
            notes: Vec::new(),
        };
        Checkpoint::index(Path::new(name), contents)
    }

    fn index(path: &Path, contents: Contents) -> Result<Checkpoint, Error> {
        let mut by_name = HashMap::with_capacity(contents.tensors.len());
        for (index, tensor) in contents.tensors.iter().enumerate() {
            if by_name.insert(tensor.name.clone(), index).is_some() {
                let what = format!("tensor {}", quote(&tensor.name));
                return Err(Error::Duplicate { path: path.to_path_buf(), what });
            }
        }
        // The getters of these keys return no error, so a wrong type is reported here.
        if let Source::Gguf(metadata) = &contents.source {
            metadata.opt_str(GGUF_CHAT_TEMPLATE)?;
            metadata.opt_str(GGUF_ARCHITECTURE)?;
        }
        let file_bytes = contents.files.iter().map(|(_, bytes)| bytes).sum();
        let files = contents.files.into_iter().map(|(file, _)| file).collect();
        let Contents { source, tensors, notes, .. } = contents;
        let (path, hashes) = (path.to_path_buf(), Vec::new());
        Ok(Checkpoint { path, source, tensors, by_name, files, file_bytes, hashes, notes })
    }

    /// Rounds quantized weights as the package that defines their scheme does. Without this, integers that are kept in
    /// blocks have products with their scales that are not rounded.
    pub fn with_reference_rounding(mut self) -> Checkpoint {
        for tensor in &mut self.tensors {
            if let TensorData::Encoded(encoded) = &tensor.data {
                tensor.dtype = encoded.reference_dtype();
            }
        }
        self
    }

    /// Returns the path as it was passed to [`Checkpoint::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Returns the model's architecture: `general.architecture` of a GGUF file, `model_type` of a `config.json`.
    pub fn architecture(&self) -> Result<&str, Error> {
        match &self.source {
            Source::Gguf(metadata) => metadata.str(GGUF_ARCHITECTURE),
            Source::HuggingFace(folder) => folder.model_type(),
        }
    }

    /// Returns all tensors, in the order of the files and of the data within each.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
        self.find_tensor(name).ok_or_else(|| Error::MissingTensor { name: quote(name) })
    }

    pub fn find_tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let info = &self.tensors[*self.by_name.get(name)?];
        Some(TensorView { info })
    }

    /// Returns sentences about weights that are decoded when they are loaded, and about tensors of a quantization
    /// scheme that are not used.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the text of the model's chat template.
    pub fn chat_template(&self) -> Option<&str> {
        match &self.source {
            Source::Gguf(metadata) => metadata.opt_str(GGUF_CHAT_TEMPLATE).ok().flatten(),
            Source::HuggingFace(folder) => folder.chat_template.as_deref(),
        }
    }

    /// Returns the bytes of all weight files together.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Returns the bytes that the weights take in memory, in the formats of [`TensorInfo::dtype`]: those of the files,
    /// except for weights that are decoded.
    pub fn weight_bytes(&self) -> u64 {
        let (mut decoded, mut encoded) = (0u64, 0u64);
        for tensor in self.tensors.iter().filter(|tensor| tensor.encoding().is_some()) {
            let bytes = tensor.dtype.bytes_for(tensor.num_elements()).unwrap_or(usize::MAX);
            decoded = decoded.saturating_add(bytes as u64);
            encoded += tensor.num_bytes() as u64;
        }
        self.file_bytes.saturating_sub(encoded).saturating_add(decoded)
    }

    /// Returns the SHA-256 of each weight file that was read into memory; none if the files are mapped.
    pub fn hashes(&self) -> &[FileHash] {
        &self.hashes
    }

    /// Returns the weight files, in order: the parts of a split GGUF file, or the safetensors shards.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }
}

/// Reads a folder as a Hugging Face folder, and a file by its extension or its first bytes.
fn read(path: &Path, reader: &mut FileReader<'_>) -> Result<Contents, Error> {
    let about = std::fs::metadata(path).map_err(|e| Error::io(path, "open the model", e))?;
    if about.is_dir() {
        return hugging_face::read_folder(path, reader);
    }
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase();
    if let Some(reason) = pickle::by_name(path) {
        return Err(pickle::refuse(path, reason));
    }
    match extension.as_str() {
        "safetensors" => return hugging_face::read_weights_file(path, reader),
        "json" | "jinja" => return hugging_face::read_folder(hugging_face::folder_of(path), reader),
        _ => {}
    }
    let bytes = reader.read(path)?;
    if let Some(reason) = pickle::by_magic(&bytes) {
        return Err(pickle::refuse(path, reason));
    }
    if extension == "gguf" || bytes.starts_with(&gguf::MAGIC) {
        return gguf::read(path, bytes, reader);
    }
    let start = &bytes[..bytes.len().min(4)];
    let found = format!("a file that starts with \"{}\"", start.escape_ascii());
    Err(Error::NotAModel { path: path.to_path_buf(), found })
}
