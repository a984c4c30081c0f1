//! The flags that choose a device, a context and KV memory, and how a model is opened with them.
//!
//! `pellucid` does the work; this module names its options as flags, shows progress and puts errors in terms of flags.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Error, Result};
use pellucid::{
    Builder, Device, DeviceError, DeviceGroup, DeviceNeed, DeviceOptions, FileAccess, Isa, KvType, LoadOptions, Loaded,
    LoadedEmbeddings, ModelInfo, Overcommit, Pellucid, Pooling, Ranks, Speculation, Split,
};
use pellucid_checkpoint::Checkpoint;
use pellucid_engine::ContextDoesNotFit;
use pellucid_model::{Decoder, Error as ModelError};
use pellucid_tensor::Backend;

use crate::flags::byte_size;
use crate::flags::chat_template::TemplateArgs;
use crate::flags::ranks::RankArgs;
use crate::flags::speculation::SpeculationArgs;
use crate::flags::usage_error::{UsageError, bail_usage};
use crate::hub::Hub;
use crate::terminal::format::{bytes_text, grouped};
use crate::terminal::loading_bar::LoadingBar;
use crate::terminal::log;

/// Sequences for whose memory `prove` and `bench` leave room on devices that share out a model.
const PLANNED_SEQUENCES: usize = 16;

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Computing")]
pub(crate) struct ComputeArgs {
    /// Device that computes: auto, cpu, cuda or cuda:N; or several that
    /// share out the layers, such as cuda:0,cpu, the fastest first
    /// [default: the first usable GPU, with the CPU if the model is too
    /// large for it; else the CPU]
    #[arg(long, verbatim_doc_comment, value_name = "DEVICE", value_delimiter = ',')]
    device: Vec<Device>,

    /// Which of several devices has what: numbers of layers, such as
    /// 24,8; experts=N, those of the first N layers on the last device;
    /// or auto, by free memory
    /// [default: auto]
    #[arg(long, verbatim_doc_comment, value_name = "SPLIT")]
    split: Option<Split>,

    /// CPU threads; pinned if there is one for each core
    /// [default: every core]
    #[arg(long, verbatim_doc_comment, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// CPU instruction set: scalar, neon, avx2, avx512 or amx
    /// [default: the best that the machine has]
    #[arg(long, verbatim_doc_comment, value_name = "NAME")]
    cpu_isa: Option<Isa>,

    /// Read the model into memory instead of mapping its file, and
    /// check the SHA-256 that was recorded when the model was pulled:
    /// takes memory of the file's size, and the file may change then
    #[arg(long, verbatim_doc_comment)]
    no_mmap: bool,

    /// Let cuBLASLt multiply BF16 and F16 matrices on a GPU: faster
    /// with many rows, but a reply's bytes may then depend on the
    /// other requests
    #[arg(long, verbatim_doc_comment)]
    pub(crate) fast: bool,

    /// Maximum tokens of prompt and reply together
    /// [default: the maximum that the model supports]
    #[arg(long, verbatim_doc_comment, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,

    /// Format of keys and values: f32, f16, bf16 or q8_0
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub(crate) kv_type: KvType,

    /// Memory for keys and values, such as 2GB or 512MiB
    /// [default: a full context per sequence, at most 4/5 of free memory]
    #[arg(long, verbatim_doc_comment, value_name = "SIZE", value_parser = byte_size::parse)]
    pub(crate) kv_memory: Option<u64>,

    /// Tokens between two snapshots of the state of a model with recurrent layers
    /// [default: as many snapshots as take the memory of keys and values]
    #[arg(long, verbatim_doc_comment, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    snapshot_distance: Option<u32>,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,
}

impl ComputeArgs {
    /// Ids of all flags, for a flag that cannot be combined with any of them. The group that clap makes of a struct is
    /// empty if the struct contains another.
    pub(crate) const FLAGS: [&str; 13] = [
        "device",
        "split",
        "threads",
        "cpu_isa",
        "no_mmap",
        "fast",
        "context",
        "kv_type",
        "kv_memory",
        "snapshot_distance",
        "ranks",
        "rank_timeout",
        "mpi_library",
    ];

    /// Opens a model for one user whose requests run `width` sequences at once.
    pub(crate) fn open(&self, path: &Path, width: usize, hub: &Hub) -> Result<Loaded> {
        self.ranks.refuse("this command")?;
        self.load(self.builder(path, hub)?.max_sequences(width).max_waiting(1).overcommit(Overcommit::Never))
    }

    /// Opens a model like [`ComputeArgs::open`], with the template of `--chat-template` if it is given, and with
    /// drafters.
    pub(crate) fn open_with(
        &self,
        path: &Path,
        width: usize,
        hub: &Hub,
        template: &TemplateArgs,
        speculation: &SpeculationArgs,
    ) -> Result<Loaded> {
        let builder = speculation.apply(template.apply(self.builder_on_ranks(path, hub)?)?, hub)?;
        self.load(builder.max_sequences(width).max_waiting(1).overcommit(Overcommit::Never))
    }

    /// Returns the flags for the model of a guard: those about context, KV memory and several devices hold for the
    /// guarded model.
    pub(crate) fn for_guard(&self) -> ComputeArgs {
        let device = self.device.first().copied().into_iter().collect();
        ComputeArgs { context: None, kv_memory: None, device, split: None, ..self.clone() }
    }

    /// Returns a builder with these flags, for the model that all ranks compute.
    pub(crate) fn builder_on_ranks(&self, path: &Path, hub: &Hub) -> Result<Builder> {
        let builder = self.builder(path, hub)?;
        let ranks = self.ranks.take()?;
        // Groups of threads divide the device themselves.
        let device = self.device_options();
        let device = if matches!(ranks, Ranks::Process { .. }) { self.ranks.device(device)? } else { device };
        Ok(builder.device_options(device).ranks(ranks))
    }

    /// Returns a builder with these flags.
    pub(crate) fn builder(&self, path: &Path, hub: &Hub) -> Result<Builder> {
        self.check_split()?;
        let mut builder = Pellucid::builder(path).device_options(self.device_options()).kv_type(self.kv_type);
        if self.device.len() > 1 {
            builder = builder.devices(&self.device, self.split());
        }
        builder = builder.file_access(self.file_access(hub)?);
        if let Some(context) = self.context {
            builder = builder.context(context as usize);
        }
        if let Some(bytes) = self.kv_memory {
            builder = builder.kv_memory(bytes);
        }
        if let Some(tokens) = self.snapshot_distance {
            builder = builder.snapshot_distance(tokens as usize);
        }
        Ok(builder)
    }

    /// Returns the value of `--context`.
    pub(crate) fn context(&self) -> Option<usize> {
        self.context.map(|tokens| tokens as usize)
    }

    /// Returns a builder for one of several models, whose files are read as `access` says, with a context of its own.
    /// An encoder runs on the CPU, whatever the device of the other models is.
    pub(crate) fn builder_for(
        &self,
        path: &Path,
        access: FileAccess,
        context_len: Option<usize>,
        is_encoder: bool,
    ) -> Builder {
        let mut options = self.device_options();
        if is_encoder {
            let (threads, isa) = (options.threads, options.isa);
            options = DeviceOptions { device: Some(Device::Cpu), threads, isa, ..DeviceOptions::default() };
        }
        let mut builder = Pellucid::builder(path).device_options(options).kv_type(self.kv_type).file_access(access);
        if let Some(context_len) = context_len {
            builder = builder.context(context_len);
        }
        if let Some(tokens) = self.snapshot_distance {
            builder = builder.snapshot_distance(tokens as usize);
        }
        builder
    }

    /// Returns the free memory of the device.
    pub(crate) fn free_memory(&self) -> Result<Option<u64>> {
        Ok(self.backend()?.free_memory())
    }

    /// Returns how the files of models are read.
    pub(crate) fn file_access(&self, hub: &Hub) -> Result<FileAccess> {
        if !self.no_mmap {
            return Ok(FileAccess::Mapped);
        }
        Ok(FileAccess::InMemory { sha256: hub.store.hashes()? })
    }

    /// Opens the files of a model without loading its weights.
    pub(crate) fn checkpoint(&self, path: &Path, hub: &Hub) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open_with(path, &self.file_access(hub)?)?;
        pellucid::hash_notes(&checkpoint).for_each(|note| log::note(&note));
        Ok(checkpoint)
    }

    /// Opens a model and shows progress and notes on standard error.
    pub(crate) fn load(&self, builder: Builder) -> Result<Loaded> {
        let bar = LoadingBar::new();
        let shown = bar.clone();
        builder.on_event(move |event| shown.show(event)).load().map_err(|error| self.in_flags(error))
    }

    /// Opens a model that computes vectors, like [`ComputeArgs::load`].
    pub(crate) fn open_embeddings(&self, path: &Path, pooling: Option<Pooling>, hub: &Hub) -> Result<LoadedEmbeddings> {
        self.load_embeddings(self.builder(path, hub)?, pooling)
    }

    /// Opens a model that computes vectors with the options of a builder.
    pub(crate) fn load_embeddings(&self, mut builder: Builder, pooling: Option<Pooling>) -> Result<LoadedEmbeddings> {
        self.ranks.refuse("a model that computes vectors")?;
        self.refuse_several_devices("a model that computes vectors")?;
        if self.kv_memory.is_some() {
            bail_usage!("--kv-memory has no effect on a model that computes vectors; use --context");
        }
        if let Some(pooling) = pooling {
            builder = builder.pooling(pooling);
        }
        self.finish_embeddings(builder)
    }

    /// Opens a model that computes vectors beside one that generates text, whose context and KV memory these flags set.
    /// An encoder runs on the CPU, whatever the device of the other model is.
    pub(crate) fn load_second(
        &self,
        path: &Path,
        pooling: Option<Pooling>,
        max_waiting: usize,
        hub: &Hub,
    ) -> Result<LoadedEmbeddings> {
        let is_encoder = pellucid_model::is_encoder(&Checkpoint::open(path)?)?;
        let mut options = self.device_options();
        if is_encoder {
            let (threads, isa) = (options.threads, options.isa);
            options = DeviceOptions { device: Some(Device::Cpu), threads, isa, ..DeviceOptions::default() };
        }
        let mut builder = Pellucid::builder(path).device_options(options).kv_type(self.kv_type);
        builder = builder.file_access(self.file_access(hub)?).max_waiting(max_waiting);
        if let Some(pooling) = pooling {
            builder = builder.pooling(pooling);
        }
        self.finish_embeddings(builder)
    }

    fn finish_embeddings(&self, builder: Builder) -> Result<LoadedEmbeddings> {
        let bar = LoadingBar::new();
        let shown = bar.clone();
        builder.on_event(move |event| shown.show(event)).load_embeddings().map_err(|error| self.in_flags(error))
    }

    fn split(&self) -> Split {
        self.split.clone().unwrap_or_default()
    }

    /// Refuses `--split` without several devices, and several devices where there are several ranks.
    fn check_split(&self) -> Result<()> {
        if self.split.is_some() && self.device.len() < 2 {
            bail_usage!("--split needs several devices, such as --device cuda:0,cpu");
        }
        if self.device.len() > 1 {
            self.ranks.refuse("a model on several devices")?;
        }
        Ok(())
    }

    /// Refuses several devices for what computes on one.
    pub(crate) fn refuse_several_devices(&self, what: &str) -> Result<()> {
        if self.device.len() > 1 {
            bail_usage!("--device: {what} computes on one device, found {}", self.device.len());
        }
        self.check_split()
    }

    /// Opens the device of these flags: that of this process's first rank.
    pub(crate) fn backend(&self) -> Result<Arc<dyn Backend>> {
        open_device(self.ranks.device(self.device_options())?)
    }

    /// Opens the CPU with a single thread.
    pub(crate) fn single_threaded(&self) -> Result<Arc<dyn Backend>> {
        let device = Some(Device::Cpu);
        open_device(DeviceOptions { device, threads: Some(1), isa: self.cpu_isa, ..DeviceOptions::default() })
    }

    /// Loads the weights of a checkpoint onto a device.
    pub(crate) fn decoder(&self, checkpoint: &Checkpoint, backend: &Arc<dyn Backend>) -> Result<Decoder> {
        self.decoder_on(Ranks::One, checkpoint, backend, &Speculation::OFF)
    }

    /// Loads the model that all ranks compute, and the weights that these drafters need of their own model as well. A
    /// process that is not rank 0 does not return while that runs.
    pub(crate) fn decoder_for(
        &self,
        checkpoint: &Checkpoint,
        backend: &Arc<dyn Backend>,
        speculation: &Speculation,
    ) -> Result<Decoder> {
        self.check_split()?;
        let ranks = self.ranks.take()?;
        if !matches!(ranks, Ranks::One) {
            return self.decoder_on(ranks, checkpoint, backend, speculation);
        }
        let bar = LoadingBar::new();
        let further = self.device.iter().skip(1).copied().collect();
        let group = DeviceGroup::new(self.device_options(), further, self.split());
        let need = DeviceNeed { kv_type: self.kv_type, max_sequences: PLANNED_SEQUENCES };
        group
            .load(checkpoint, self.load_options(speculation), backend, need, &mut |event| bar.show(event))
            .map_err(|error| self.in_flags(error))
    }

    fn decoder_on(
        &self,
        ranks: Ranks,
        checkpoint: &Checkpoint,
        backend: &Arc<dyn Backend>,
        speculation: &Speculation,
    ) -> Result<Decoder> {
        let bar = LoadingBar::new();
        let options = self.load_options(speculation);
        let device = self.device_options();
        pellucid::load_decoder_on_ranks(ranks, checkpoint, options, (&device, backend), &mut |event| bar.show(event))
            .map_err(|error| self.in_flags(error))
    }

    fn load_options(&self, speculation: &Speculation) -> LoadOptions {
        LoadOptions { context_len: self.context.map(|tokens| tokens as usize), predictor: speculation.uses_mtp() }
    }

    fn device_options(&self) -> DeviceOptions {
        DeviceOptions {
            device: self.device.first().copied(),
            threads: self.threads.map(usize::from),
            isa: self.cpu_isa,
            fast: self.fast,
            ..DeviceOptions::default()
        }
    }

    /// Names options by their flags.
    pub(crate) fn in_flags(&self, error: pellucid::Error) -> Error {
        match error {
            pellucid::Error::Open(source) => source.into(),
            pellucid::Error::Load { source, .. } if matches!(*source, ModelError::ContextTooLong { .. }) => {
                UsageError::because(format!("--context: {source}"))
            }
            pellucid::Error::Load { source, .. } if matches!(*source, ModelError::SharedAcrossDevices { .. }) => {
                UsageError::because(format!("--split: {source}"))
            }
            pellucid::Error::Load { path, source } if matches!(*source, ModelError::NoPooling) => {
                UsageError::because(format!("--pooling: {}: {source}", path.display()))
            }
            pellucid::Error::Load { path, source } if matches!(*source, ModelError::IsEncoder { .. }) => {
                UsageError::because(format!("{}: {source}; use `pellucid embed` or `pellucid serve`", path.display()))
            }
            error @ pellucid::Error::EncoderOnGpu { .. } => UsageError::because(format!("--device {error}")),
            pellucid::Error::Load { path, source } => Error::new(*source).context(path.display().to_string()),
            pellucid::Error::Tokenizer { path, source } => Error::new(*source).context(path.display().to_string()),
            pellucid::Error::GivenTemplate(source) => UsageError::because(format!("--chat-template: {source}")),
            pellucid::Error::Device(error) => device_in_flags(error),
            error @ pellucid::Error::DraftVocabulary { .. } => UsageError::because(format!("--speculate: {error}")),
            pellucid::Error::KvMemory { kv_type, source } => self.memory_in_flags(kv_type, source),
            pellucid::Error::Start(source) => source.into(),
            other => other.into(),
        }
    }

    fn memory_in_flags(&self, kv_type: KvType, refused: ContextDoesNotFit) -> Error {
        let (needed, available) = (bytes_text(refused.needed), bytes_text(refused.available));
        let (context, fits) = (grouped(refused.context_len as u64), grouped(refused.fits as u64));
        let source = if self.kv_memory.is_some() { "--kv-memory gives" } else { "the free memory allows" };
        let advice = if refused.fits > 0 { format!("--context {}", refused.fits) } else { "a smaller model".into() };
        let text = format!(
            "a whole context of {context} tokens takes {needed} for keys and values in {}; {source} {available}, \
             which holds {fits} tokens. Use {advice}, a larger --kv-memory or a smaller --kv-type",
            kv_type.dtype(),
        );
        // Too little free memory is no fault of the flags.
        if self.kv_memory.is_some() { UsageError::because(text) } else { Error::msg(text) }
    }
}

/// Opens a device and writes notes about it to standard error.
pub(crate) fn open_device(options: DeviceOptions) -> Result<Arc<dyn Backend>> {
    options.open(&mut |note| log::note(&note)).map_err(device_in_flags)
}

fn device_in_flags(error: DeviceError) -> Error {
    let is_usage = matches!(
        error,
        DeviceError::Split { .. } | DeviceError::FastOnCpu | DeviceError::CompileOnCpu | DeviceError::Isa { .. }
    );
    let flag = match &error {
        DeviceError::FastOnCpu => "--fast".to_owned(),
        DeviceError::CompileOnCpu => "--nvrtc".to_owned(),
        DeviceError::Isa { isa, .. } => format!("--cpu-isa {isa}"),
        DeviceError::Threads(_) => "--threads".to_owned(),
        DeviceError::Split { .. } => "--split".to_owned(),
        _ => "--device".to_owned(),
    };
    let error = Error::new(error).context(flag);
    // A GPU that is missing or fails is no fault of the flags.
    if is_usage { UsageError::because(error) } else { error }
}

/// Returns the memory that this process uses now, where the system tells it.
pub(crate) fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| 1024 * kibibytes)
}

/// Describes the memory of a model in one line.
pub(crate) fn memory_text(info: &ModelInfo) -> String {
    let plan = &info.kv_memory;
    let contexts = plan.num_tokens() as f64 / plan.need.context_len as f64;
    let states = match plan.state_bytes() {
        0 => String::new(),
        bytes => format!(", recurrent states {}", bytes_text(bytes)),
    };
    let windows = plan.windows().map_or_else(String::new, |(num_blocks, bytes)| {
        let num_tokens = grouped((num_blocks * plan.need.block_len) as u64);
        format!(", of which layers with sliding windows {} for {num_tokens} tokens", bytes_text(bytes))
    });
    let draft = info.draft.as_ref().map_or_else(String::new, |draft| {
        format!(
            "; draft model: weights {}, keys and values {}",
            bytes_text(draft.weight_bytes),
            bytes_text(draft.kv_bytes)
        )
    });
    format!(
        "memory: weights {}, keys and values {} in {} for {} tokens ({contexts:.1} x the context of {})\
         {windows}{states}, scratch {}{draft}",
        bytes_text(info.weight_bytes),
        bytes_text(plan.bytes() - plan.draft_bytes() - plan.state_bytes()),
        info.kv_type.dtype(),
        grouped(plan.num_tokens() as u64),
        grouped(plan.need.context_len as u64),
        bytes_text(info.scratch_bytes),
    )
}
