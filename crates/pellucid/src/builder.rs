//! Options of a model, and how it is opened.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pellucid_checkpoint::{Checkpoint, FileAccess};
use pellucid_cpu::Isa;
use pellucid_engine::kv_cache::KvEventSink;
use pellucid_engine::{Engine, EngineHandle, EngineOptions, Overcommit, TenantId};
use pellucid_generate::{Grammars, Guards, LoadedModel, utc_now};
use pellucid_model::{BLOCK_LEN, LoadOptions, Model as _, Pooling};
use pellucid_sampling::SamplingDefaults;
use pellucid_tokenizer::{ChatTemplate, Tokenizer};

use crate::draft_model::DraftFiles;
use crate::loading::{description, details, hash_notes, plan_kv_memory, shared_prefix, step_tokens};
use crate::recommended_sampling::recommended_sampling;
use crate::{
    Device, DeviceError, DeviceGroup, DeviceNeed, DeviceOptions, Error, KvType, LoadEvent, LoadPhase, Loaded,
    ModelInfo, Pellucid, Ranks, Speculation, Split, load_decoder_on_ranks,
};

/// Sequences computed at once unless the builder says otherwise.
const DEFAULT_MAX_SEQUENCES: usize = 8;
/// Requests that may wait unless the builder says otherwise.
const DEFAULT_MAX_WAITING: usize = 256;
/// Tokens for which a request without `max_tokens` reserves KV memory at a time.
const DEFAULT_GROWTH: usize = 256;

/// Opens a model with options; [`Pellucid::builder`] returns one.
///
/// ```
/// use pellucid::{Device, KvType, Pellucid};
///
/// # fn main() -> Result<(), pellucid::Error> {
/// let model = Pellucid::builder("models/tiny.gguf")
///     .device(Device::Cpu)
///     .context(512)
///     .kv_type(KvType::F32)
///     .kv_memory(4 << 20)
///     .open()?;
/// assert_eq!(model.context_len(), 512);
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until `open` is called"]
pub struct Builder {
    pub(crate) path: PathBuf,
    pub(crate) file_access: FileAccess,
    pub(crate) device: DeviceOptions,
    pub(crate) context_len: Option<usize>,
    pub(crate) kv_type: KvType,
    snapshot_tokens: Option<usize>,
    kv_memory: Option<u64>,
    pub(crate) max_sequences: usize,
    pub(crate) max_waiting: usize,
    overcommit: Overcommit,
    tenants: Vec<String>,
    quotas: Vec<(TenantId, usize)>,
    shared_system: Option<String>,
    chat_template: Option<String>,
    speculation: Speculation,
    guards: Guards,
    pub(crate) kv_events: Option<(TenantId, Box<dyn KvEventSink>)>,
    /// How the rows of a text become one vector, for models that compute vectors.
    pub(crate) pooling: Option<Pooling>,
    pub(crate) ranks: Ranks,
    further_devices: Vec<Device>,
    split: Split,
    pub(crate) on_event: Box<dyn FnMut(LoadEvent) + Send>,
}

impl Builder {
    pub(crate) fn draft_path(&self) -> Option<&Path> {
        self.speculation.draft_path().map(PathBuf::as_path)
    }

    /// Returns the options with which the decoder is loaded.
    pub(crate) fn load_options(&self) -> LoadOptions {
        LoadOptions { context_len: self.context_len, predictor: self.speculation.uses_mtp() }
    }

    pub(crate) fn new(path: impl AsRef<Path>) -> Builder {
        Builder {
            path: path.as_ref().to_owned(),
            file_access: FileAccess::Mapped,
            device: DeviceOptions::default(),
            context_len: None,
            kv_type: KvType::default(),
            snapshot_tokens: None,
            kv_memory: None,
            max_sequences: DEFAULT_MAX_SEQUENCES,
            max_waiting: DEFAULT_MAX_WAITING,
            overcommit: Overcommit::Unbounded { growth: DEFAULT_GROWTH },
            tenants: Vec::new(),
            quotas: Vec::new(),
            shared_system: None,
            chat_template: None,
            speculation: Speculation::DEFAULT,
            guards: Guards::default(),
            kv_events: None,
            pooling: None,
            ranks: Ranks::One,
            further_devices: Vec::new(),
            split: Split::Auto,
            on_event: Box::new(|_| ()),
        }
    }

    /// Sets the device. Default: the first usable GPU, else the CPU.
    pub fn device(mut self, device: Device) -> Builder {
        self.device.device = Some(device);
        self
    }

    /// Sets all options of the device at once.
    pub fn device_options(mut self, options: DeviceOptions) -> Builder {
        self.device = options;
        self
    }

    /// Sets whether the model's files are mapped or read into memory. Default: mapped.
    ///
    /// Files in memory may be changed or deleted while the model is open, and their SHA-256 is compared with the
    /// expected ones. They take memory of their size, in addition to the weights on the device.
    ///
    /// ```
    /// use std::collections::HashMap;
    ///
    /// use pellucid::{FileAccess, LoadEvent, Pellucid};
    ///
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let model = Pellucid::builder("models/tiny.gguf")
    ///     .file_access(FileAccess::InMemory { sha256: HashMap::new() })
    ///     .on_event(|event| {
    ///         if let LoadEvent::Note(note) = event {
    ///             println!("{note}");
    ///         }
    ///     })
    ///     .open()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn file_access(mut self, access: FileAccess) -> Builder {
        self.file_access = access;
        self
    }

    /// Sets the number of CPU threads. Default: one for each core. The number does not change any reply.
    pub fn threads(mut self, num_threads: usize) -> Builder {
        self.device.threads = Some(num_threads);
        self
    }

    /// Sets the ranks that compute the model together. Default: [`Ranks::One`]. Their number does not change any reply.
    ///
    /// Models with recurrent layers, latent attention and a few other parts cannot be shared out yet: opening fails. On
    /// a process that is not rank 0, opening follows rank 0 until that shuts down, and returns [`Error::RankEnded`].
    ///
    /// ```
    /// use pellucid::{Device, Pellucid, Ranks};
    ///
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let two = Ranks::Threads(2.try_into().unwrap());
    /// let model = Pellucid::builder("models/tiny.gguf").device(Device::Cpu).ranks(two).open()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn ranks(mut self, ranks: Ranks) -> Builder {
        self.ranks = ranks;
        self
    }

    /// Sets the devices that compute the model together, the fastest first: each has a part of the layers, with their
    /// keys and values. Devices with the same arithmetic give the bytes of one of them. Without it, the CPU helps a GPU
    /// that was not named with a model that is too large for it.
    ///
    /// ```
    /// use pellucid::{Device, Pellucid, Split};
    ///
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let (devices, split) = ([Device::Cpu; 2], Split::Layers(vec![3, 2]));
    /// let model = Pellucid::builder("models/tiny.gguf").devices(&devices, split).open()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn devices(mut self, devices: &[Device], split: Split) -> Builder {
        self.device.device = devices.first().copied();
        self.further_devices = devices.iter().skip(1).copied().collect();
        self.split = split;
        self
    }

    /// Sets the CPU's instruction set. Default: the best that the machine has.
    pub fn isa(mut self, isa: Isa) -> Builder {
        self.device.isa = Some(isa);
        self
    }

    /// Lets cuBLASLt multiply BF16 and F16 matrices on a GPU: faster with many requests, but the bits of a reply may
    /// then depend on the other requests. Opening fails when a CPU computes.
    pub fn fast(mut self, fast: bool) -> Builder {
        self.device.fast = fast;
        self
    }

    /// Sets the maximum tokens of a prompt and its reply together. Default: the maximum that the model supports.
    pub fn context(mut self, num_tokens: usize) -> Builder {
        self.context_len = Some(num_tokens);
        self
    }

    /// Sets the number format of keys and values. Default: [`KvType::F16`].
    pub fn kv_type(mut self, kv_type: KvType) -> Builder {
        self.kv_type = kv_type;
        self
    }

    /// Sets the tokens between two snapshots of the recurrent state, for models that have one, rounded up to whole
    /// blocks of 32. By default, snapshots take as much memory as keys and values.
    pub fn snapshot_distance(mut self, num_tokens: usize) -> Builder {
        self.snapshot_tokens = Some(num_tokens);
        self
    }

    /// Returns the blocks between two snapshots, if they were set.
    pub(crate) fn distance_in_blocks(&self) -> Option<usize> {
        self.snapshot_tokens.map(|num_tokens| num_tokens.div_ceil(BLOCK_LEN))
    }

    /// Sets the memory for keys and values in bytes.
    ///
    /// Default: `max_sequences` whole contexts, or four fifths of the device's free memory if that is less.
    pub fn kv_memory(mut self, num_bytes: u64) -> Builder {
        self.kv_memory = Some(num_bytes);
        self
    }

    /// Sets the maximum number of sequences that are computed at once. Default: 8.
    ///
    /// A request with `n` choices or beams is `n` sequences.
    pub fn max_sequences(mut self, num_sequences: usize) -> Builder {
        self.max_sequences = num_sequences.max(1);
        self
    }

    /// Sets the maximum number of requests that wait for their turn. Default: 256. Further ones are rejected.
    pub fn max_waiting(mut self, num_requests: usize) -> Builder {
        self.max_waiting = num_requests.max(1);
        self
    }

    /// Sets which requests may start before there is KV memory for their maximum length.
    pub fn overcommit(mut self, overcommit: Overcommit) -> Builder {
        self.overcommit = overcommit;
        self
    }

    /// Declares a tenant. Requests with this tenant find cached prefixes of this tenant only.
    pub fn tenant(mut self, name: impl Into<String>) -> Builder {
        self.tenants.push(name.into());
        self
    }

    /// Declares a tenant that may hold at most `num_tokens` tokens of KV memory, in use and cached together.
    pub fn tenant_with_quota(self, name: impl Into<String>, num_tokens: usize) -> Builder {
        let tenant = TenantId(self.tenants.len() as u32 + 1);
        self.tenant(name).quota(tenant, num_tokens)
    }

    /// Sets the quota of a tenant by its id, for programs that number tenants themselves.
    pub fn quota(mut self, tenant: TenantId, num_tokens: usize) -> Builder {
        self.quotas.push((tenant, num_tokens));
        self
    }

    /// Declares a system prompt whose cached prefix all tenants share. Whether it is cached is then no secret.
    pub fn shared_system(mut self, text: impl Into<String>) -> Builder {
        self.shared_system = Some(text.into());
        self
    }

    /// Sets a chat template in Jinja that is used instead of the model's own. Opening fails if it does not compile.
    ///
    /// ```
    /// use pellucid::Pellucid;
    ///
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
    /// let model = Pellucid::builder("models/tiny.gguf").chat_template(template).open()?;
    /// assert!(Pellucid::builder("models/tiny.gguf").chat_template("{% for %}").open().is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn chat_template(mut self, source: impl Into<String>) -> Builder {
        self.chat_template = Some(source.into());
        self
    }

    /// Sets the drafters that propose tokens. Default: [`Speculation::DEFAULT`]. They do not change any reply.
    ///
    /// A draft model takes memory for its weights, and its keys and values come out of the KV memory.
    pub fn speculate(mut self, speculation: Speculation) -> Builder {
        self.speculation = speculation;
        self
    }

    /// Sets the guards that judge prompts and replies. Default: none.
    ///
    /// A prompt that they block is [`Error::Blocked`]; a reply ends with
    /// [`Finish::ContentFilter`](crate::Finish::ContentFilter), and nothing of what is blocked is returned.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use pellucid::{Error, Guards, OnGuardError, PatternGuard, Pellucid};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let guard = PatternGuard::parse(r"\bhunter2\b")?;
    /// let guards = Guards::new(vec![Arc::new(guard)], OnGuardError::Closed);
    /// let model = Pellucid::builder("models/tiny.gguf").guards(guards).open()?;
    /// assert!(matches!(model.chat("Say hunter2."), Err(Error::Blocked(_))));
    /// # Ok(())
    /// # }
    /// ```
    pub fn guards(mut self, guards: Guards) -> Builder {
        self.guards = guards;
        self
    }

    /// Sets a function that is called with notes and progress while the model is opened.
    pub fn on_event(mut self, on_event: impl FnMut(LoadEvent) + Send + 'static) -> Builder {
        self.on_event = Box::new(on_event);
        self
    }

    /// Opens the model, loads its weights onto the device and starts its engine.
    pub fn open(self) -> Result<Pellucid, Error> {
        Ok(Pellucid::from(self.load()?))
    }

    /// Opens the model like [`open`](Builder::open), for programs that use [`pellucid_generate`] directly.
    pub fn load(mut self) -> Result<Loaded, Error> {
        (self.on_event)(LoadEvent::Phase(LoadPhase::Files));
        let checkpoint = Checkpoint::open_with(&self.path, &self.file_access).map_err(Error::Open)?;
        let path = self.path.clone();
        hash_notes(&checkpoint).for_each(|note| (self.on_event)(LoadEvent::Note(note)));
        // An unsupported architecture is reported before a missing tokenizer.
        pellucid_model::read_config(&checkpoint)
            .map_err(|source| Error::Load { path: path.clone(), source: Box::new(source) })?;
        (self.on_event)(LoadEvent::Phase(LoadPhase::Vocabulary));
        let mut tokenizer = Tokenizer::from_checkpoint(&checkpoint)
            .map_err(|source| Error::Tokenizer { path: path.clone(), source: Box::new(source) })?;
        // A template that does not compile is an error of the requests that need it.
        let (template, template_error) = match &self.chat_template {
            Some(text) => {
                let template = ChatTemplate::compile(text, &tokenizer);
                let template = template.map_err(|error| Error::GivenTemplate(Box::new(error)))?;
                tokenizer.guard(text);
                (Some(template), None)
            }
            None => match checkpoint.chat_template().map(|text| ChatTemplate::compile(text, &tokenizer)) {
                Some(Ok(template)) => (Some(template), None),
                Some(Err(error)) => (None, Some(format!("{}: {error}", path.display()))),
                None => (None, None),
            },
        };
        let recommended = recommended_sampling(&checkpoint);
        recommended.warning.into_iter().for_each(|warning| (self.on_event)(LoadEvent::Note(warning)));
        let snapshot_distance = self.distance_in_blocks();
        let load_options = self.load_options();
        let on_event = &mut self.on_event;
        let draft_files = match self.speculation.draft_path() {
            Some(draft) => Some(DraftFiles::open(draft, &self.file_access, &path, &tokenizer, on_event)?),
            None => None,
        };
        on_event(LoadEvent::Phase(LoadPhase::Device));
        let device = self.ranks.device_of_one(&self.device);
        let backend = device.open(&mut |note| on_event(LoadEvent::Note(note)))?;
        let need = DeviceNeed { kv_type: self.kv_type, max_sequences: self.max_sequences };
        let decoder = match self.ranks {
            Ranks::One => {
                let group = DeviceGroup::new(self.device, self.further_devices, self.split);
                group.load(&checkpoint, load_options, &backend, need, on_event)?
            }
            ranks if self.further_devices.is_empty() => {
                load_decoder_on_ranks(ranks, &checkpoint, load_options, (&self.device, &backend), on_event)?
            }
            _ => {
                let reason = "ranks and several devices cannot be combined yet".into();
                return Err(DeviceError::Split { reason }.into());
            }
        };
        let devices = decoder.devices().clone();
        let config = decoder.config().clone();
        if snapshot_distance.is_some() && !config.has_state() {
            let note = format!("a snapshot distance has no effect: {} has no recurrent layers", config.architecture);
            on_event(LoadEvent::Note(note));
        }
        let draft = match &draft_files {
            Some(files) => Some(files.load(config.context_len, &backend, on_event)?),
            None => None,
        };
        on_event(LoadEvent::Phase(LoadPhase::Memory));
        let kv_memory = plan_kv_memory(
            &config,
            draft.as_ref().map(|draft| draft.config()),
            &devices,
            self.kv_type,
            self.kv_memory,
            self.max_sequences,
            snapshot_distance,
        )?;
        let chunk_len = backend.chunk_len();
        let options = EngineOptions {
            num_blocks: kv_memory.num_blocks,
            block_len: BLOCK_LEN,
            kv_dtype: self.kv_type.dtype(),
            max_sequences: self.max_sequences,
            step_tokens: step_tokens(&*backend, self.max_sequences),
            chunk_len,
            max_waiting: self.max_waiting,
            overcommit: self.overcommit,
            secret: secret(),
            snapshot_distance,
        };
        let device = description(&decoder);
        let scratch_bytes = decoder.step_bytes(options.step_tokens, options.max_sequences);
        let mut engine = Engine::new(Box::new(decoder), backend, options).map_err(Error::Start)?;
        for &(tenant, num_tokens) in &self.quotas {
            let num_blocks = engine.cache().blocks_for(num_tokens);
            engine.cache_mut().set_quota(tenant, num_blocks);
        }
        // Requests without a tenant are those of one more.
        engine.set_num_tenants(self.tenants.len() + 1);
        if let Some(system) = &self.shared_system {
            if let Some(reason) = template_error {
                return Err(Error::Template { reason });
            }
            let prefix = shared_prefix(system, &tokenizer, template.as_ref(), on_event)?;
            engine.cache_mut().share_prefix(prefix);
        }
        if let Some((tenant, sink)) = self.kv_events {
            engine.set_kv_events(tenant, sink);
        }
        engine.set_speculation(self.speculation.options());
        // After the quotas and the shared prefix, which hold for the draft model's cache as well.
        if let Some(draft) = draft {
            engine.set_draft_model(Box::new(draft), kv_memory.num_blocks).map_err(Error::Start)?;
        }
        let model = LoadedModel {
            aliases: Vec::new(),
            id: path.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned()),
            fingerprint: String::new(),
            tokenizer: Arc::new(tokenizer),
            template,
            template_error,
            context_len: config.context_len,
            vocab_size: config.vocab_size,
            sampling: SamplingDefaults { model: recommended.options, ..SamplingDefaults::default() },
            details: details(&checkpoint),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            grammars: Grammars::default(),
            thinking: Default::default(),
            guards: self.guards,
            calling: Default::default(),
            engine: EngineHandle::start(engine),
            now: utc_now,
        };
        let (files, weight_bytes) = (checkpoint.files().to_vec(), checkpoint.weight_bytes());
        let info = ModelInfo {
            path,
            files,
            weight_bytes,
            device,
            kv_type: self.kv_type,
            draft: draft_files.map(|files| files.info(kv_memory.draft_bytes())),
            kv_memory,
            scratch_bytes,
            speculation: self.speculation,
        };
        Ok(Loaded { model, info, tenants: self.tenants })
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("path", &self.path).field("device", &self.device).finish_non_exhaustive()
    }
}

/// Returns the key of the prefix cache's hashes: random, so that no one can construct prompts whose hashes collide.
fn secret() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the operating system provides random bytes");
    bytes
}
