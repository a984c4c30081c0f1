//! The hyperparameters of a model that `inspect` shows, read from its file.
//!
//! Each may be missing: a file that holds only a vocabulary has none. For a model that can be run, they are those of
//! the crate `model`, which requires all that its architecture needs.

use anyhow::{Context, Result, bail};
use pellucid_checkpoint::{Checkpoint, HuggingFace, Metadata, Source, Value};
use pellucid_model::{DecoderConfig, LatentAttention, Mixer};
use pellucid_tensor::DType;

use crate::flags::usage_error::bail_usage;

/// A model's dimensions and special ids.
#[derive(Debug, Default)]
pub(crate) struct Hyperparameters {
    pub(crate) name: Option<String>,
    pub(crate) num_layers: Option<u64>,
    /// Kinds of layers by the way in which they mix positions, and their numbers; empty if all have attention.
    pub(crate) layer_kinds: Vec<(&'static str, u64)>,
    /// Bytes of the recurrent state of a sequence; 0 if it has none.
    pub(crate) state_bytes: u64,
    pub(crate) latent_attention: Option<LatentAttention>,
    pub(crate) num_heads: Option<u64>,
    /// One entry for each layer, since they differ in some families.
    pub(crate) kv_heads: Vec<u64>,
    pub(crate) windows: Option<Windows>,
    /// Values in a key of one head.
    pub(crate) key_size: Option<u64>,
    /// Values in a value of one head; 0 if values are parts of the keys.
    pub(crate) value_size: Option<u64>,
    pub(crate) width: Option<u64>,
    pub(crate) num_experts: Option<u64>,
    pub(crate) context_tokens: Option<u64>,
    pub(crate) vocabulary: Option<u64>,
    /// Purpose and id of each special token.
    pub(crate) special_ids: Vec<(&'static str, u64)>,
}

/// The layers that need the keys and values of the last positions alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Windows {
    pub(crate) num_layers: u64,
    /// Key/value heads of these layers together.
    pub(crate) num_heads: u64,
    /// Positions of the longest window.
    pub(crate) num_tokens: u64,
}

/// Upper bounds far above any real model, with which no product overflows.
const MAX_LAYERS: u64 = 1 << 16;
const MAX_SIZE: u64 = 1 << 32;

impl Hyperparameters {
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Hyperparameters> {
        let mut read = match checkpoint.source() {
            Source::Gguf(metadata) => from_gguf(metadata, checkpoint.architecture()?)?,
            Source::HuggingFace(folder) => from_config(folder)?,
        };
        if let Ok(config) = pellucid_model::read_config(checkpoint) {
            read.take(&config);
        }
        for (what, value, limit) in [
            ("number of layers", read.num_layers, MAX_LAYERS),
            ("number of heads", read.num_heads, MAX_LAYERS),
            ("number of key/value heads", read.kv_heads.iter().copied().max(), MAX_LAYERS),
            ("size of a key", read.key_size, MAX_SIZE),
            ("size of a value", read.value_size, MAX_SIZE),
        ] {
            if let Some(value) = value.filter(|value| *value > limit) {
                bail!("the model's {what} is {value}, expected at most {limit}");
            }
        }
        Ok(read)
    }

    /// Takes the values of a model that can be run: its file may omit defaults of the architecture.
    fn take(&mut self, config: &DecoderConfig) {
        let number = |size: usize| Some(size as u64);
        self.num_layers = number(config.layers.len());
        self.layer_kinds = layer_kinds(config);
        self.state_bytes = config.state_bytes() as u64;
        self.latent_attention = config.latent_attention;
        self.num_heads = number(config.num_heads);
        // Layers may have heads of another size; they are counted in heads of this one.
        let heads = |layer: usize| (config.stored_key_size(layer) / config.head_size) as u64;
        self.kv_heads = (0..config.layers.len()).map(heads).collect();
        self.windows = config.kv_window().map(|num_tokens| {
            let windowed = || (0..config.layers.len()).filter(|&layer| config.is_windowed(layer) && heads(layer) > 0);
            let num_heads = windowed().map(heads).sum();
            Windows { num_layers: windowed().count() as u64, num_heads, num_tokens: num_tokens as u64 }
        });
        let value_size = if config.latent_attention.is_some() { 0 } else { config.head_size };
        (self.key_size, self.value_size) = (number(config.head_size), number(value_size));
        self.width = number(config.hidden_size);
        self.context_tokens = number(config.context_len);
        self.vocabulary = self.vocabulary.or(number(config.vocab_size));
    }

    /// Returns the bytes of keys and values of one token: the sum over all layers of heads x (key + value). `None` if
    /// the file lacks a number or the result overflows; an error if a head is not a whole number of blocks of the
    /// format.
    pub(crate) fn kv_bytes_per_token(&self, dtype: DType) -> Result<Option<u64>> {
        self.bytes_of_heads(self.kv_heads.iter().sum(), dtype)
    }

    /// Returns the same bytes of layers with windows alone; `None` also if there are none.
    pub(crate) fn windowed_bytes_per_token(&self, dtype: DType) -> Result<Option<u64>> {
        self.windows.map_or(Ok(None), |windows| self.bytes_of_heads(windows.num_heads, dtype))
    }

    fn bytes_of_heads(&self, heads: u64, dtype: DType) -> Result<Option<u64>> {
        let (Some(key), Some(value), true) = (self.key_size, self.value_size, heads > 0) else { return Ok(None) };
        let block = dtype.block_len() as u64;
        if let Some(size) = [key, value].into_iter().find(|size| !size.is_multiple_of(block)) {
            bail_usage!("--kv-type: {dtype} needs heads of a multiple of {block} values, but this model's have {size}");
        }
        let blocks = key.checked_add(value).map(|pair| pair / block);
        Ok(blocks.and_then(|blocks| heads.checked_mul(blocks)?.checked_mul(dtype.block_bytes() as u64)))
    }
}

/// Reads a GGUF file, whose keys have the name of the architecture as a prefix.
fn from_gguf(metadata: &Metadata, architecture: &str) -> Result<Hyperparameters> {
    let number = |key: &str| metadata.opt_u64(&format!("{architecture}.{key}"));
    let num_layers = number("block_count")?;
    let num_heads = match metadata.get(&format!("{architecture}.attention.head_count")) {
        // With a head count for each layer, the maximum is shown.
        Some(Value::Array(_)) => {
            let heads = metadata.opt_u32s(&format!("{architecture}.attention.head_count"))?;
            heads.and_then(|heads| heads.into_iter().max()).map(u64::from)
        }
        _ => number("attention.head_count")?,
    };
    let kv_key = format!("{architecture}.attention.head_count_kv");
    let kv_heads = match metadata.get(&kv_key) {
        Some(Value::Array(_)) => metadata.opt_u32s(&kv_key)?.unwrap_or_default().into_iter().map(u64::from).collect(),
        _ => per_layer(num_layers, number("attention.head_count_kv")?.or(num_heads)),
    };
    let width = number("embedding_length")?;
    let shared = quotient(width, num_heads);
    let vocabulary = match metadata.opt_strings("tokenizer.ggml.tokens")? {
        Some(tokens) => Some(tokens.len() as u64),
        None => number("vocab_size")?,
    };
    let mut special_ids = Vec::new();
    for (purpose, key) in [
        ("begin", "bos_token_id"),
        ("end", "eos_token_id"),
        ("end of turn", "eot_token_id"),
        ("unknown", "unknown_token_id"),
        ("padding", "padding_token_id"),
    ] {
        if let Some(id) = metadata.opt_u64(&format!("tokenizer.ggml.{key}"))? {
            special_ids.push((purpose, id));
        }
    }
    Ok(Hyperparameters {
        name: metadata.opt_str("general.name")?.map(str::to_owned),
        num_layers,
        layer_kinds: Vec::new(),
        state_bytes: 0,
        latent_attention: None,
        num_heads,
        kv_heads,
        windows: None,
        key_size: number("attention.key_length")?.or(shared),
        value_size: number("attention.value_length")?.or(shared),
        width,
        num_experts: number("expert_count")?.filter(|count| *count > 0),
        context_tokens: number("context_length")?,
        vocabulary,
        special_ids,
    })
}

/// Reads a `config.json`, in which families use different names for the same values.
fn from_config(folder: &HuggingFace) -> Result<Hyperparameters> {
    // Multimodal models have the language model's values one level down.
    let config = folder.config.get("text_config").unwrap_or(&folder.config);
    let number = |names: &[&str]| -> Result<Option<u64>> {
        let found = names.iter().find_map(|name| Some((name, config.get(name).filter(|value| !value.is_null())?)));
        let Some((name, value)) = found else { return Ok(None) };
        let number = value
            .as_u64()
            .with_context(|| format!("`{name}` in config.json: expected a whole number, found {value}"))?;
        Ok(Some(number))
    };
    let num_layers = number(&["num_hidden_layers", "n_layer", "num_layers"])?;
    let num_heads = number(&["num_attention_heads", "n_head", "attention_heads"])?;
    let width = number(&["hidden_size", "n_embd", "d_model"])?;
    let head_size = number(&["head_dim"])?.or(quotient(width, num_heads));
    let mut special_ids = Vec::new();
    for (purpose, key) in [("begin", "bos_token_id"), ("end", "eos_token_id"), ("padding", "pad_token_id")] {
        // generation_config.json takes precedence; some list several ids.
        let sources = [folder.generation_config.as_ref(), Some(config), Some(&folder.config)];
        let value = sources.into_iter().flatten().find_map(|source| source.get(key).filter(|value| !value.is_null()));
        let ids = value.map_or(&[][..], |value| value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice));
        special_ids.extend(ids.iter().filter_map(|id| Some((purpose, id.as_u64()?))));
    }
    Ok(Hyperparameters {
        name: folder
            .config
            .get("_name_or_path")
            .and_then(|name| name.as_str())
            .filter(|name| !name.is_empty())
            .map(str::to_owned),
        num_layers,
        layer_kinds: Vec::new(),
        state_bytes: 0,
        latent_attention: None,
        num_heads,
        kv_heads: per_layer(num_layers, number(&["num_key_value_heads"])?.or(num_heads)),
        windows: None,
        key_size: head_size,
        value_size: head_size,
        width,
        num_experts: number(&["num_local_experts", "num_experts", "n_routed_experts"])?.filter(|count| *count > 0),
        context_tokens: number(&["max_position_embeddings", "n_positions"])?,
        vocabulary: number(&["vocab_size"])?,
        special_ids,
    })
}

/// Returns the kinds of layers of a model that has others than attention.
fn layer_kinds(config: &DecoderConfig) -> Vec<(&'static str, u64)> {
    let kinds = [
        (Mixer::Attention, "with attention"),
        (Mixer::ShortConvolution, "with a short convolution"),
        (Mixer::DeltaNet, "with a gated delta net"),
        (Mixer::Mamba2, "with Mamba-2"),
        (Mixer::None, "with an MLP alone"),
    ];
    let count = |mixer: Mixer| config.layers.iter().filter(|layer| layer.mixer == mixer).count() as u64;
    let kinds = kinds.map(|(mixer, name)| (name, count(mixer)));
    if kinds[0].1 == config.layers.len() as u64 {
        return Vec::new();
    }
    kinds.into_iter().filter(|(_, count)| *count > 0).collect()
}

/// Returns `heads` once for each layer; empty if either is unknown or the number of layers is out of bounds.
fn per_layer(num_layers: Option<u64>, heads: Option<u64>) -> Vec<u64> {
    match (num_layers, heads) {
        (Some(layers), Some(heads)) if layers <= MAX_LAYERS => vec![heads; layers as usize],
        _ => Vec::new(),
    }
}

fn quotient(total: Option<u64>, parts: Option<u64>) -> Option<u64> {
    total?.checked_div(parts?)
}
