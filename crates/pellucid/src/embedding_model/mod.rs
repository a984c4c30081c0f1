//! A model that computes vectors of texts, and how it is opened.

mod shorter_vectors;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pellucid_checkpoint::Checkpoint;
use pellucid_engine::{EmbeddingHandle, EmbeddingInput, TenantId};
use pellucid_generate::{LoadedEmbedder, finished_vector};
use pellucid_model::{DecoderEmbedder, Embedder, Encoder, LoadOptions, Pooling};
use pellucid_tokenizer::Tokenizer;

use crate::loading::{hash_notes, load_decoder};
use crate::{Builder, Device, DeviceOptions, Error, LoadEvent, LoadPhase};
use shorter_vectors::shorter_vectors;

/// Maximum tokens of a text for decoders, unless the builder says otherwise: their contexts are far longer than the
/// texts that vectors are computed of, and memory for keys and values is reserved for a whole context.
pub(crate) const DEFAULT_DECODER_CONTEXT: usize = 8192;

/// A model that computes vectors of texts: an encoder of the BERT family, or a decoder whose rows are pooled.
///
/// Cloning is cheap, and all clones share the model. A vector depends on its text alone, to the bit: not on other
/// texts, threads or batches.
///
/// ```no_run
/// # fn main() -> Result<(), pellucid::Error> {
/// let model = pellucid::EmbeddingModel::open("all-MiniLM-L6-v2")?;
/// let vectors = model.embed_all(["a cat on a mat", "a dog in the fog"])?;
/// println!("{}", pellucid::cosine(&vectors[0], &vectors[1]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct EmbeddingModel {
    loaded: Arc<LoadedEmbeddings>,
}

/// An embedding model and the facts about it, for programs that use [`pellucid_generate`] directly.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedEmbeddings {
    /// The model. Its `fingerprint` is empty.
    pub model: LoadedEmbedder,
    /// Path that it was opened from.
    pub path: PathBuf,
    /// Files that hold its weights.
    pub files: Vec<PathBuf>,
    /// Size of these files in bytes.
    pub weight_bytes: u64,
    /// The device in words, such as `cpu (avx512, 2 threads)`.
    pub device: String,
}

impl EmbeddingModel {
    /// Opens a GGUF file or a Hugging Face folder with default options.
    pub fn open(path: impl AsRef<Path>) -> Result<EmbeddingModel, Error> {
        Builder::new(path).open_embeddings()
    }

    /// Returns the vector of a text, of length (Euclidean norm) 1.
    pub fn embed(&self, text: impl AsRef<str>) -> Result<Vec<f32>, Error> {
        Ok(self.embed_all([text])?.pop().unwrap_or_default())
    }

    /// Returns the vectors of texts, each of length 1, in their order.
    pub fn embed_all<T: AsRef<str>>(&self, texts: impl IntoIterator<Item = T>) -> Result<Vec<Vec<f32>>, Error> {
        let model = self.model();
        let inputs: Vec<EmbeddingInput> = texts
            .into_iter()
            .map(|text| model.encode(text.as_ref(), None).map_err(Error::Prompt))
            .collect::<Result<_, _>>()?;
        let found = model.handle.embed(TenantId(0), inputs).map_err(|error| match error {
            error @ (pellucid_engine::Error::Model(_) | pellucid_engine::Error::Internal(_)) => Error::Failed(error),
            error => Error::Rejected(error),
        })?;
        Ok(found.vectors().map(|vector| finished_vector(vector, found.num_dimensions, true)).collect())
    }

    /// Returns the number of values of a vector.
    pub fn num_dimensions(&self) -> usize {
        self.model().info().num_dimensions
    }

    /// Returns the maximum tokens of a text.
    pub fn context_len(&self) -> usize {
        self.model().info().context_len
    }

    /// Returns how the rows of a text become its vector.
    pub fn pooling(&self) -> Pooling {
        self.model().info().pooling
    }

    /// Returns the model as [`pellucid_generate`] uses it.
    pub fn model(&self) -> &LoadedEmbedder {
        &self.loaded.model
    }
}

impl From<LoadedEmbeddings> for EmbeddingModel {
    fn from(loaded: LoadedEmbeddings) -> EmbeddingModel {
        EmbeddingModel { loaded: Arc::new(loaded) }
    }
}

impl Builder {
    /// Sets how the rows of a text become its vector, for [`open_embeddings`](Builder::open_embeddings). Default: as
    /// the model's files state it.
    pub fn pooling(mut self, pooling: Pooling) -> Builder {
        self.pooling = Some(pooling);
        self
    }

    /// Opens a model that computes vectors: an encoder, or a decoder whose pooling is stated by its files or by
    /// [`pooling`](Builder::pooling).
    ///
    /// Of the other options, those of the device, the files, the context, the KV type and the queue apply. Encoders run
    /// on the CPU; opening one on a GPU fails.
    pub fn open_embeddings(self) -> Result<EmbeddingModel, Error> {
        Ok(EmbeddingModel::from(self.load_embeddings()?))
    }

    /// Opens a model like [`open_embeddings`](Builder::open_embeddings), for programs that use [`pellucid_generate`]
    /// directly.
    pub fn load_embeddings(mut self) -> Result<LoadedEmbeddings, Error> {
        (self.on_event)(LoadEvent::Phase(LoadPhase::Files));
        let checkpoint = Checkpoint::open_with(&self.path, &self.file_access).map_err(Error::Open)?;
        let path = self.path.clone();
        let cannot_load = |source| Error::Load { path: path.clone(), source: Box::new(source) };
        hash_notes(&checkpoint).for_each(|note| (self.on_event)(LoadEvent::Note(note)));
        let is_encoder = pellucid_model::is_encoder(&checkpoint).map_err(cannot_load)?;
        (self.on_event)(LoadEvent::Phase(LoadPhase::Vocabulary));
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)
            .map_err(|source| Error::Tokenizer { path: path.clone(), source: Box::new(source) })?;
        let (embedder, device) = match is_encoder {
            true => self.load_encoder(&checkpoint)?,
            false => self.load_pooled_decoder(&checkpoint)?,
        };
        let model = LoadedEmbedder {
            id: path.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned()),
            aliases: Vec::new(),
            fingerprint: String::new(),
            tokenizer: Arc::new(tokenizer),
            shorter: shorter_vectors(&checkpoint),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            handle: EmbeddingHandle::start(embedder, self.max_waiting),
        };
        let (files, weight_bytes) = (checkpoint.files().to_vec(), checkpoint.weight_bytes());
        Ok(LoadedEmbeddings { model, path, files, weight_bytes, device })
    }

    fn load_encoder(&mut self, checkpoint: &Checkpoint) -> Result<(Box<dyn Embedder>, String), Error> {
        let on_event = &mut self.on_event;
        on_event(LoadEvent::Phase(LoadPhase::Device));
        let device = match self.device.device {
            Some(Device::Cuda(ordinal)) => return Err(Error::EncoderOnGpu { ordinal }),
            Some(Device::Auto) => {
                on_event(LoadEvent::Note("encoders run on the CPU".into()));
                Device::Cpu
            }
            Some(Device::Cpu) | None => Device::Cpu,
        };
        let options = DeviceOptions { device: Some(device), ..self.device };
        let backend = options.open(&mut |note| on_event(LoadEvent::Note(note)))?;
        on_event(LoadEvent::Phase(LoadPhase::Weights));
        let options = LoadOptions { context_len: self.context_len, ..LoadOptions::default() };
        let loaded = Encoder::load(checkpoint, backend.clone(), self.pooling, options, &mut |loaded, total| {
            on_event(LoadEvent::Weights { loaded, total });
        });
        let encoder = loaded.map_err(|source| Error::Load { path: self.path.clone(), source: Box::new(source) })?;
        let remarks = checkpoint.notes().iter().cloned().chain(backend.remarks());
        remarks.for_each(|remark| (self.on_event)(LoadEvent::Note(remark)));
        Ok((Box::new(encoder), backend.description()))
    }

    fn load_pooled_decoder(&mut self, checkpoint: &Checkpoint) -> Result<(Box<dyn Embedder>, String), Error> {
        let cannot_load = |source| Error::Load { path: self.path.clone(), source: Box::new(source) };
        let config = pellucid_model::read_config(checkpoint).map_err(cannot_load)?;
        let stated = pellucid_model::stated_pooling(checkpoint).map_err(cannot_load)?;
        let pooling = self.pooling.or(stated).ok_or_else(|| cannot_load(pellucid_model::Error::NoPooling))?;
        let on_event = &mut self.on_event;
        on_event(LoadEvent::Phase(LoadPhase::Device));
        let backend = self.device.open(&mut |note| on_event(LoadEvent::Note(note)))?;
        let context_len = self.context_len.unwrap_or(config.context_len.min(DEFAULT_DECODER_CONTEXT));
        let options = LoadOptions { context_len: Some(context_len), ..LoadOptions::default() };
        let decoder = load_decoder(checkpoint, options, &backend, on_event)?;
        on_event(LoadEvent::Phase(LoadPhase::Memory));
        let embedder = DecoderEmbedder::new(decoder, pooling, self.kv_type.dtype());
        let embedder = embedder.map_err(|source| Error::Load { path: self.path.clone(), source: Box::new(source) })?;
        Ok((Box::new(embedder), backend.description()))
    }
}
