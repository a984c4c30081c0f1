//! A model ready to answer: opened, its tokenizer and template read, its weights on the device the arguments chose.
//!
//! `run`, `serve` and `perplexity` share it.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_checkpoint::{Checkpoint, Source};
use pellucid_cpu::Isa;
use pellucid_engine::{Engine, EngineHandle, EngineOptions, KvBudget, KvNeed, MemoryPlan, Overcommit};
use pellucid_generate::{LoadedModel, utc_now};
use pellucid_model::{BLOCK_LEN, Decoder, DecoderConfig, KvMemory, LoadOptions, Model};
use pellucid_tensor::Backend;
use pellucid_tokenizer::{ChatTemplate, Tokenizer};

use crate::device::{self, CpuChoice, CudaChoice, DeviceChoice};
use crate::format::{bytes_text, grouped};
use crate::kv_type::KvType;
use crate::size;

/// How to compute; the same flags for every command that runs a model.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Computing")]
pub(crate) struct ComputeArgs {
    /// What computes: auto, cpu, cuda or cuda:N
    /// [default: the first usable GPU, else the CPU]
    #[arg(long, verbatim_doc_comment, value_name = "DEVICE")]
    device: Option<DeviceChoice>,

    /// Threads to compute with; as many as cores stay on a core each
    /// [default: every core]
    #[arg(long, verbatim_doc_comment, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Instructions: scalar, neon, avx2, avx512 or amx
    /// [default: the best that the machine has]
    #[arg(long, verbatim_doc_comment, value_name = "NAME")]
    cpu_isa: Option<Isa>,

    /// Let cuBLASLt do a GPU's products of BF16 and F16: faster
    /// with many rows, but a reply's bytes may then depend on who
    /// else is served
    #[arg(long, verbatim_doc_comment)]
    pub(crate) fast: bool,

    /// Tokens that prompt and reply may take together
    /// [default: what the model was made for]
    #[arg(long, verbatim_doc_comment, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,

    /// Keys and values in f32, f16, bf16 or q8_0
    #[arg(long, value_name = "TYPE", value_enum, ignore_case = true, default_value_t, hide_possible_values = true)]
    pub(crate) kv_type: KvType,

    /// Memory for keys and values, such as 2GB or 512MiB
    /// [default: what is needed, out of what is free]
    #[arg(long, verbatim_doc_comment, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) kv_memory: Option<u64>,
}

/// Everything that answering takes.
pub(crate) struct Loaded {
    pub(crate) model: LoadedModel,
    /// What the weights and the keys and values take, in words.
    pub(crate) memory: String,
    /// What computes, in words.
    pub(crate) device: String,
    /// The files that hold its weights.
    pub(crate) files: Vec<PathBuf>,
}

/// Who is to be served.
pub(crate) struct Service {
    /// Sequences at once.
    pub(crate) width: usize,
    /// Requests that may wait.
    pub(crate) max_waiting: usize,
    pub(crate) overcommit: Overcommit,
    /// Keys the hashes of the prefix cache.
    pub(crate) secret: [u8; 32],
}

/// Loads a model for one user, whose request may run `width` sequences at once.
pub(crate) fn load(path: &Path, args: &ComputeArgs, width: usize) -> Result<Loaded> {
    // One user, one process: there is nobody to hide a prefix from.
    let service = Service { width, max_waiting: 1, overcommit: Overcommit::Never, secret: [0; 32] };
    load_for(path, args, service, |_, _, _| Ok(()))
}

/// Loads a model with an engine for many; `prepare` sees the engine before it starts, and what makes text ids.
pub(crate) fn load_for(
    path: &Path,
    args: &ComputeArgs,
    service: Service,
    prepare: impl FnOnce(&mut Engine, &Tokenizer, Option<&ChatTemplate>) -> Result<()>,
) -> Result<Loaded> {
    let Service { width, max_waiting, overcommit, secret } = service;
    let checkpoint = Checkpoint::open(path)?;
    // Whether it can be run at all, before anything is said of its tokenizer.
    pellucid_model::read_config(&checkpoint).with_context(|| path.display().to_string())?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).with_context(|| path.display().to_string())?;
    // What needs no template does not fail for want of one.
    let (template, template_error) =
        match checkpoint.chat_template().map(|text| ChatTemplate::compile(text, &tokenizer)) {
            Some(Ok(template)) => (Some(template), None),
            Some(Err(error)) => (None, Some(format!("{}: {error}", path.display()))),
            None => (None, None),
        };
    if let Source::HuggingFace(folder) = checkpoint.source()
        && let Some(suggested) = folder.suggested_sampling()
    {
        let _ = writeln!(
            std::io::stderr(),
            "note: generation_config.json suggests {suggested}; it is taken where you say so"
        );
    }
    let backend = backend(args)?;
    let model = decoder(&checkpoint, args, backend.clone())?;
    let (context_len, vocab_size) = (model.config().context_len, model.config().vocab_size);
    let plan = memory_plan(args, model.config(), &*backend, width.max(1))?;
    let memory = describe(&plan, args, checkpoint.file_bytes());
    let chunk_len = backend.chunk_len();
    let options = EngineOptions {
        num_blocks: plan.num_blocks,
        block_len: BLOCK_LEN,
        kv_dtype: args.kv_type.dtype(),
        max_sequences: width.max(1),
        step_tokens: chunk_len.max(width),
        chunk_len,
        max_waiting,
        overcommit,
        secret,
    };
    let device = backend.description();
    let mut engine = Engine::new(Box::new(model), backend, options)?;
    prepare(&mut engine, &tokenizer, template.as_ref())?;
    let files = checkpoint.files().to_vec();
    let model = LoadedModel {
        id: path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        fingerprint: String::new(),
        tokenizer: Arc::new(tokenizer),
        template,
        template_error,
        context_len,
        vocab_size,
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        engine: EngineHandle::start(engine),
        now: utc_now,
    };
    Ok(Loaded { model, memory, device, files })
}

/// Memory for as many whole contexts as may be under way, as far as the budget goes.
pub(crate) fn memory_plan(
    args: &ComputeArgs,
    config: &DecoderConfig,
    backend: &dyn Backend,
    num_contexts: usize,
) -> Result<MemoryPlan> {
    let bytes_per_block = KvMemory::bytes_per_block(config, args.kv_type.dtype(), BLOCK_LEN)? as u64;
    let need = KvNeed { bytes_per_block, block_len: BLOCK_LEN, context_len: config.context_len, num_contexts };
    let budget = match args.kv_memory {
        Some(bytes) => KvBudget::Bytes(bytes),
        None => backend.free_memory().map_or(KvBudget::Unknown, KvBudget::OutOf),
    };
    MemoryPlan::new(need, budget).map_err(|refused| {
        let (needed, available) = (bytes_text(refused.needed), bytes_text(refused.available));
        let (context, fits) = (grouped(refused.context_len as u64), grouped(refused.fits as u64));
        let kv = args.kv_type.dtype();
        let source = if args.kv_memory.is_some() { "--kv-memory gives" } else { "the memory that is free allows" };
        let advice = if refused.fits > 0 { format!("--context {}", refused.fits) } else { "a smaller model".into() };
        anyhow!(
            "a whole context of {context} tokens takes {needed} for keys and values in {kv}; {source} {available}, \
             which holds {fits} tokens. Give {advice}, a larger --kv-memory or a smaller --kv-type"
        )
    })
}

/// The plan in one line.
pub(crate) fn describe(plan: &MemoryPlan, args: &ComputeArgs, weights: u64) -> String {
    let contexts = plan.num_tokens() as f64 / plan.need.context_len as f64;
    format!(
        "memory: weights {}, keys and values {} in {} for {} tokens ({contexts:.1} x the context of {})",
        bytes_text(weights),
        bytes_text(plan.bytes()),
        args.kv_type.dtype(),
        grouped(plan.num_tokens() as u64),
        grouped(plan.need.context_len as u64),
    )
}

/// The weights of a checkpoint, on a device.
pub(crate) fn decoder(checkpoint: &Checkpoint, args: &ComputeArgs, backend: Arc<dyn Backend>) -> Result<Decoder> {
    let options = LoadOptions { context_len: args.context.map(|tokens| tokens as usize) };
    let bar = bar();
    let loaded = Decoder::load(checkpoint, backend.clone(), options, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    for remark in backend.remarks() {
        let _ = writeln!(std::io::stderr(), "{remark}");
    }
    loaded.with_context(|| checkpoint.path().display().to_string())
}

/// How far loading is, on a terminal; elsewhere nothing.
fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("loading {bar:24} {percent} % {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// The device that the arguments chose.
pub(crate) fn backend(args: &ComputeArgs) -> Result<Arc<dyn Backend>> {
    let cpu = CpuChoice { num_threads: args.threads.map(usize::from), isa: args.cpu_isa };
    device::open(args.device, cpu, CudaChoice { fast: args.fast, ..CudaChoice::default() })
}

/// The CPU with a single thread.
pub(crate) fn single_threaded(args: &ComputeArgs) -> Result<Arc<dyn Backend>> {
    device::open(Some(DeviceChoice::Cpu), CpuChoice { num_threads: Some(1), isa: args.cpu_isa }, CudaChoice::default())
}
