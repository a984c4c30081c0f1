//! Models with the sizes of published ones and random weights, for benchmarks and tests without a file.
//!
//! A synthetic model becomes a checkpoint in memory with the keys and names of a GGUF file, so it is loaded, and can be
//! written, like any other. It has no vocabulary: only token ids can be used with it.

use pellucid_checkpoint::{Array, Checkpoint, Metadata, NewTensor, Value};
use pellucid_tensor::{DeltaNetShape, Mamba2Shape, SharedBytes, quant};

use crate::config::LatentAttention;
use crate::loader::tensor_names;
use crate::quant_scheme::{QuantScheme, TensorRole};

/// The sizes of a decoder, from its published configuration.
#[derive(Debug, Clone, Copy)]
pub struct SyntheticModel {
    pub name: &'static str,
    architecture: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_size: usize,
    mlp_size: usize,
    context_len: usize,
    rope_base: f32,
    is_tied: bool,
    experts: Option<SyntheticExperts>,
    /// Gated delta nets in place of attention in all layers but the last of each `PERIOD`.
    delta_net: Option<DeltaNetShape>,
    latent: Option<LatentAttention>,
    /// Mamba-2 in place of attention in all layers but the sixth of each ten.
    mamba2: Option<Mamba2Shape>,
}

/// The family with Mamba-2, without rotation, and with an expert that every token uses beside the others.
const GRANITE_HYBRID: &str = "granitehybrid";
/// The family with biases everywhere, attention sinks, a window in every other layer and YaRN.
const GPT_OSS: &str = "gpt-oss";
/// Layers from one with attention to the next, in models with delta nets.
const PERIOD: usize = 4;

/// Experts in place of the MLP.
#[derive(Debug, Clone, Copy)]
struct SyntheticExperts {
    num_experts: usize,
    num_selected: usize,
    mlp_size: usize,
    /// Number of experts that every token uses, stored as one.
    num_shared: usize,
    /// Number of first layers that have an MLP instead.
    num_dense: usize,
}

/// A row of the table [`SyntheticModel::ALL`]: (vocabulary, hidden, layers), (heads, KV heads, head size), (MLP,
/// context, RoPE base).
const fn model(
    name: &'static str,
    architecture: &'static str,
    (vocab_size, hidden_size, num_layers): (usize, usize, usize),
    (num_heads, num_kv_heads, head_size): (usize, usize, usize),
    (mlp_size, context_len, rope_base): (usize, usize, f32),
    is_tied: bool,
) -> SyntheticModel {
    SyntheticModel {
        name,
        architecture,
        vocab_size,
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_size,
        mlp_size,
        context_len,
        rope_base,
        is_tied,
        experts: None,
        delta_net: None,
        latent: None,
        mamba2: None,
    }
}

impl SyntheticModel {
    const fn with_experts(self, (num_experts, num_selected, mlp_size): (usize, usize, usize)) -> SyntheticModel {
        let experts = SyntheticExperts { num_experts, num_selected, mlp_size, num_shared: 0, num_dense: 0 };
        SyntheticModel { experts: Some(experts), ..self }
    }

    /// Sets the sizes of experts as [`SyntheticModel::with_experts`] does, and (shared experts, dense layers).
    const fn with_shared_experts(self, sizes: (usize, usize, usize), (num_shared, num_dense): (usize, usize)) -> Self {
        let Some(experts) = self.with_experts(sizes).experts else { unreachable!() };
        SyntheticModel { experts: Some(SyntheticExperts { num_shared, num_dense, ..experts }), ..self }
    }

    /// Sets (rotated values, latent) of a row and (plain values of a key, values of a value) of a head.
    const fn with_latents(
        self,
        (rotary_size, latent_size): (usize, usize),
        (plain_size, value_size): (usize, usize),
    ) -> SyntheticModel {
        let sizes =
            LatentAttention { query_rank: None, latent_size, rotary_size, plain_size, value_size, yarn_scale: 0.0 };
        SyntheticModel { latent: Some(sizes), ..self }
    }

    /// Sets (key heads, value heads) of delta nets of the published sizes.
    const fn with_delta_net(self, (num_key_heads, num_value_heads): (usize, usize)) -> SyntheticModel {
        let shape = DeltaNetShape { num_key_heads, num_value_heads, key_size: 128, value_size: 128, num_taps: 4 };
        SyntheticModel { delta_net: Some(shape), ..self }
    }

    /// Sets the number of heads of Mamba-2 layers of the published sizes.
    const fn with_mamba2(self, num_heads: usize) -> SyntheticModel {
        let (head_size, num_groups, state_size, num_taps) = (64, 1, 128, 4);
        let norm_size = num_heads * head_size;
        let shape = Mamba2Shape { num_heads, head_size, num_groups, state_size, num_taps, norm_size };
        SyntheticModel { mamba2: Some(shape), ..self }
    }

    /// Whether a layer has Mamba-2 or a delta net.
    fn is_recurrent(&self, layer: usize) -> bool {
        self.mamba2.is_some() && layer % 10 != 5 || self.delta_net.is_some() && !(layer + 1).is_multiple_of(PERIOD)
    }

    /// All models.
    #[rustfmt::skip]
    pub const ALL: [SyntheticModel; 23] = [
        model("smollm2-135m", "llama", (49_152, 576, 30), (9, 3, 64), (1_536, 8_192, 1e5), true),
        model("smollm2-1.7b", "llama", (49_152, 2_048, 24), (32, 32, 64), (8_192, 8_192, 1.3e5), true),
        model("smollm3-3b", "smollm3", (128_256, 2_048, 36), (16, 4, 128), (11_008, 65_536, 5e6), true),
        model("tinyllama-1.1b", "llama", (32_000, 2_048, 22), (32, 4, 64), (5_632, 2_048, 1e4), false),
        model("llama-3.2-1b", "llama", (128_256, 2_048, 16), (32, 8, 64), (8_192, 131_072, 5e5), true),
        model("llama-3.2-3b", "llama", (128_256, 3_072, 28), (24, 8, 128), (8_192, 131_072, 5e5), true),
        model("llama-3.1-8b", "llama", (128_256, 4_096, 32), (32, 8, 128), (14_336, 131_072, 5e5), false),
        model("llama-3.1-70b", "llama", (128_256, 8_192, 80), (64, 8, 128), (28_672, 131_072, 5e5), false),
        model("mistral-7b", "llama", (32_768, 4_096, 32), (32, 8, 128), (14_336, 32_768, 1e6), false),
        model("qwen2.5-0.5b", "qwen2", (151_936, 896, 24), (14, 2, 64), (4_864, 32_768, 1e6), true),
        model("qwen2.5-1.5b", "qwen2", (151_936, 1_536, 28), (12, 2, 128), (8_960, 32_768, 1e6), true),
        model("qwen2.5-7b", "qwen2", (152_064, 3_584, 28), (28, 4, 128), (18_944, 32_768, 1e6), false),
        model("qwen3-0.6b", "qwen3", (151_936, 1_024, 28), (16, 8, 128), (3_072, 40_960, 1e6), true),
        model("qwen3-8b", "qwen3", (151_936, 4_096, 36), (32, 8, 128), (12_288, 40_960, 1e6), false),
        model("granite-3.3-2b", "granite", (49_159, 2_048, 40), (32, 8, 64), (8_192, 131_072, 1e7), true),
        model("mixtral-8x7b", "llama", (32_000, 4_096, 32), (32, 8, 128), (14_336, 32_768, 1e6), false)
            .with_experts((8, 2, 14_336)),
        model("qwen3-30b-a3b", "qwen3moe", (151_936, 2_048, 48), (32, 4, 128), (6_144, 40_960, 1e6), false)
            .with_experts((128, 8, 768)),
        model("gpt-oss-20b", GPT_OSS, (201_088, 2_880, 24), (64, 8, 64), (2_880, 131_072, 1.5e5), false)
            .with_experts((32, 4, 2_880)),
        model("qwen3.5-0.8b", "qwen35", (248_320, 1_024, 24), (8, 2, 256), (3_584, 262_144, 1e7), true)
            .with_delta_net((16, 16)),
        model("qwen3.5-9b", "qwen35", (248_320, 4_096, 32), (16, 4, 256), (12_288, 262_144, 1e7), false)
            .with_delta_net((16, 32)),
        model("deepseek-v2-lite", "deepseek2", (102_400, 2_048, 27), (16, 1, 576), (10_944, 163_840, 1e4), false)
            .with_shared_experts((64, 6, 1_408), (2, 1))
            .with_latents((64, 512), (128, 128)),
        model("granite-4.0-h-1b", GRANITE_HYBRID, (100_352, 1_536, 40), (12, 4, 128), (4_096, 131_072, 1e4), true)
            .with_mamba2(48),
        model("granite-4.0-h-tiny", GRANITE_HYBRID, (100_352, 1_536, 40), (12, 4, 128), (512, 131_072, 1e4), true)
            .with_mamba2(48)
            .with_shared_experts((64, 6, 512), (2, 0)),
    ];

    /// Finds a model by its name, ignoring case.
    pub fn named(name: &str) -> Option<SyntheticModel> {
        SyntheticModel::ALL.into_iter().find(|model| model.name.eq_ignore_ascii_case(name))
    }

    /// Returns the model with its first `num_layers` layers only, for machines that cannot hold it; an error with the
    /// number of its layers if `num_layers` is larger, or 0.
    pub fn with_layers(self, num_layers: usize) -> Result<SyntheticModel, usize> {
        match (1..=self.num_layers).contains(&num_layers) {
            true => Ok(SyntheticModel { num_layers, ..self }),
            false => Err(self.num_layers),
        }
    }

    /// Returns a tiny model of the same family, for tests. Every width is a whole number of blocks in all formats.
    pub fn miniature(self) -> SyntheticModel {
        let latent =
            |sizes| LatentAttention { latent_size: 256, rotary_size: 64, plain_size: 64, value_size: 64, ..sizes };
        SyntheticModel {
            vocab_size: 512,
            hidden_size: 256,
            num_layers: self.few_layers(),
            num_heads: 4,
            num_kv_heads: if self.latent.is_some() { 1 } else { 2 },
            head_size: if self.latent.is_some() { 320 } else { 64 },
            mlp_size: 768,
            context_len: 256,
            experts: self.experts.map(|experts| SyntheticExperts { num_experts: 8, mlp_size: 256, ..experts }),
            delta_net: self.delta_net.map(|shape| DeltaNetShape { num_key_heads: 2, num_value_heads: 4, ..shape }),
            latent: self.latent.map(latent),
            mamba2: self.mamba2.map(|shape| Mamba2Shape { num_heads: 8, norm_size: 8 * shape.head_size, ..shape }),
            ..self
        }
    }

    /// Returns a model of two layers of full width, for tests of kernels that only wide models reach.
    pub fn shallow(self) -> SyntheticModel {
        let fewer =
            |experts: SyntheticExperts| SyntheticExperts { num_experts: experts.num_experts.min(16), ..experts };
        SyntheticModel {
            vocab_size: 512,
            num_layers: self.few_layers(),
            mlp_size: self.mlp_size.min(9_216),
            context_len: 256,
            experts: self.experts.map(fewer),
            ..self
        }
    }

    /// Returns the number of layers of a small model: two, or as many as there are from one with attention to the next.
    fn few_layers(self) -> usize {
        if self.mamba2.is_some() {
            6
        } else if self.delta_net.is_some() {
            PERIOD
        } else {
            2
        }
    }

    /// Creates the model. The same scheme and seed give the same weights. Calls `progress` with the number of finished
    /// tensors and the number of all tensors.
    pub fn checkpoint(
        &self,
        scheme: QuantScheme,
        seed: u64,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Checkpoint, pellucid_checkpoint::Error> {
        let planned = self.tensors(scheme);
        let num_tensors = planned.len();
        let mut tensors = Vec::with_capacity(num_tensors);
        for (i, tensor) in planned.into_iter().enumerate() {
            let mut bytes = vec![0; tensor.num_bytes()];
            // Norms, and rates of a decay, which must be negative.
            let constant = if tensor.name.ends_with("norm.weight") { Some(1f32) } else { None };
            let constant = if tensor.name.ends_with("ssm_a") { Some(-1f32) } else { constant };
            if let Some(constant) = constant {
                bytes.chunks_exact_mut(4).for_each(|weight| weight.copy_from_slice(&constant.to_le_bytes()));
            } else {
                fill(&tensor, seed ^ (i as u64) << 32, &mut bytes);
            }
            tensors.push((tensor, SharedBytes::from(bytes)));
            progress(i + 1, num_tensors);
        }
        let name = match SyntheticModel::named(self.name) {
            Some(whole) if whole.num_layers > self.num_layers => {
                format!("{} of {} layers of {}", self.num_layers, whole.num_layers, self.name)
            }
            _ => self.name.to_owned(),
        };
        Checkpoint::in_memory(&format!("{name} in {}, random weights", scheme.name()), self.metadata(), tensors)
    }

    fn metadata(&self) -> Metadata {
        let mut metadata = Metadata::default();
        let mut put = |key: &str, value: Value| assert!(metadata.insert(key.into(), value), "{key} is given once");
        put("general.architecture", Value::String(self.architecture.into()));
        put("general.name", Value::String(format!("{} with random weights", self.name)));
        // llama.cpp needs this key to load a file without a vocabulary.
        put("tokenizer.ggml.model", Value::String("no_vocab".into()));
        let mut number = |key: &str, value: usize| {
            put(&format!("{}.{key}", self.architecture), Value::U32(value as u32));
        };
        number("vocab_size", self.vocab_size);
        number("context_length", self.context_len);
        number("embedding_length", self.hidden_size);
        number("block_count", self.num_layers);
        number("feed_forward_length", self.mlp_size);
        number("attention.head_count", self.num_heads);
        if self.mamba2.is_none() {
            number("attention.head_count_kv", self.num_kv_heads);
        }
        number("attention.key_length", self.head_size);
        number("attention.value_length", self.latent.map_or(self.head_size, |latent| latent.latent_size));
        let rotary_size = if self.delta_net.is_some() { self.head_size / 4 } else { self.head_size };
        number("rope.dimension_count", self.latent.map_or(rotary_size, |latent| latent.rotary_size));
        if let Some(latent) = self.latent {
            number("attention.kv_lora_rank", latent.latent_size);
            number("attention.key_length_mla", latent.key_size());
            number("attention.value_length_mla", latent.value_size);
        }
        if let Some(shape) = self.delta_net {
            number("ssm.conv_kernel", shape.num_taps);
            number("ssm.state_size", shape.key_size);
            number("ssm.group_count", shape.num_key_heads);
            number("ssm.time_step_rank", shape.num_value_heads);
            number("ssm.inner_size", shape.output_size());
            number("full_attention_interval", PERIOD);
        }
        if let Some(shape) = self.mamba2 {
            number("ssm.conv_kernel", shape.num_taps);
            number("ssm.state_size", shape.state_size);
            number("ssm.group_count", shape.num_groups);
            number("ssm.time_step_rank", shape.num_heads);
            number("ssm.inner_size", shape.output_size());
        }
        if let Some(SyntheticExperts { num_experts, num_selected, mlp_size, num_shared, num_dense }) = self.experts {
            if self.architecture == GRANITE_HYBRID {
                number("expert_shared_feed_forward_length", num_shared * mlp_size);
            }
            number("expert_count", num_experts);
            number("expert_used_count", num_selected);
            number("expert_feed_forward_length", mlp_size);
            number("expert_shared_count", num_shared);
            number("leading_dense_block_count", num_dense);
        }
        if self.architecture == GRANITE_HYBRID {
            let kv_heads = |layer: usize| if self.is_recurrent(layer) { 0 } else { self.num_kv_heads as i32 };
            let kv_heads = (0..self.num_layers).map(kv_heads).collect();
            put("granitehybrid.attention.head_count_kv", Value::Array(Array::I32(kv_heads)));
            put("granitehybrid.rope.scaling.finetuned", Value::Bool(false));
        }
        if self.architecture == GPT_OSS {
            let mut number = |key: &str, value: usize| put(&format!("{GPT_OSS}.{key}"), Value::U32(value as u32));
            number("attention.sliding_window", 128);
            number("rope.scaling.original_context_length", 4_096);
            put("gpt-oss.rope.scaling.type", Value::String("yarn".into()));
            put("gpt-oss.rope.scaling.factor", Value::F32(32.0));
        }
        put(&format!("{}.rope.freq_base", self.architecture), Value::F32(self.rope_base));
        put(&format!("{}.attention.layer_norm_rms_epsilon", self.architecture), Value::F32(1e-5));
        metadata
    }

    /// Adds the tensors of a layer's latent attention, as [`SyntheticModel::add_attention`] does.
    fn add_latent_attention(
        &self,
        latent: LatentAttention,
        layer: usize,
        add: &mut impl FnMut(&str, usize, &str, &[usize]),
    ) {
        let (names, hidden, heads) = (&tensor_names::GGUF, self.hidden_size, self.num_heads);
        let LatentAttention { latent_size, plain_size, value_size, .. } = latent;
        add(names.query, layer, "weight", &[heads * latent.key_size(), hidden]);
        add(names.latent, layer, "weight", &[latent.row_size(), hidden]);
        add(names.latent_norm, layer, "weight", &[latent_size]);
        add(names.latent_key_up, layer, "weight", &[heads, latent_size, plain_size]);
        add(names.latent_value_up, layer, "weight", &[heads, value_size, latent_size]);
        add(names.attention_output, layer, "weight", &[hidden, heads * value_size]);
    }

    /// Adds the tensors of a layer's attention, each with its template, layer, ending and shape.
    fn add_attention(&self, layer: usize, add: &mut impl FnMut(&str, usize, &str, &[usize])) {
        let (names, hidden) = (&tensor_names::GGUF, self.hidden_size);
        let (queries, keys) = (self.num_heads * self.head_size, self.num_kv_heads * self.head_size);
        let has_biases = self.architecture == GPT_OSS;
        // With delta nets, the outputs of attention have a gate, whose rows are among those of the queries.
        let query_rows = if self.delta_net.is_some() { 2 * queries } else { queries };
        for (template, rows) in [(names.query, query_rows), (names.key, keys), (names.value, keys)] {
            add(template, layer, "weight", &[rows, hidden]);
            if has_biases || self.architecture == "qwen2" {
                add(template, layer, "bias", &[rows]);
            }
        }
        if self.architecture.starts_with("qwen3") {
            add(names.query_norm, layer, "weight", &[self.head_size]);
            add(names.key_norm, layer, "weight", &[self.head_size]);
        }
        add(names.attention_output, layer, "weight", &[hidden, queries]);
        if has_biases {
            add(names.attention_output, layer, "bias", &[hidden]);
            add(names.sinks, layer, "weight", &[self.num_heads]);
        }
    }

    /// Every tensor, in the order in which a forward pass meets them.
    fn tensors(&self, scheme: QuantScheme) -> Vec<NewTensor> {
        let names = &tensor_names::GGUF;
        let (hidden, mlp) = (self.hidden_size, self.mlp_size);
        let has_biases = self.architecture == GPT_OSS;
        let is_after_attention = has_biases || self.delta_net.is_some();
        let mlp_norm = if is_after_attention { names.attention_output_norm } else { names.mlp_norm };
        let mut tensors = Vec::new();
        let mut add = |template: &str, layer: usize, ending: &str, shape: &[usize]| {
            let name = template.replace("{}", &layer.to_string());
            let name = if ending.is_empty() { name } else { format!("{name}.{ending}") };
            let role = TensorRole { name: &name, shape, num_layers: self.num_layers, is_tied: self.is_tied };
            tensors.push(NewTensor { dtype: scheme.dtype(role), name, shape: shape.to_vec() });
        };
        add(names.token_embedding, 0, "weight", &[self.vocab_size, hidden]);
        for layer in 0..self.num_layers {
            add(names.attention_norm, layer, "weight", &[hidden]);
            if let Some(shape) = self.mamba2.filter(|_| self.is_recurrent(layer)) {
                let (channels, width, heads) = (shape.num_channels(), shape.output_size(), shape.num_heads);
                add(names.mamba_input, layer, "weight", &[width + channels + heads, hidden]);
                add(names.mamba_convolution, layer, "weight", &[channels, shape.num_taps]);
                add(names.mamba_convolution, layer, "bias", &[channels]);
                add(names.mamba_decay, layer, "", &[heads, 1]);
                add(names.mamba_time_bias, layer, "", &[heads]);
                add(names.mamba_skip, layer, "", &[heads, 1]);
                add(names.mamba_norm, layer, "weight", &[shape.num_groups, width / shape.num_groups]);
                add(names.mamba_output, layer, "weight", &[hidden, width]);
            } else if let Some(shape) = self.delta_net.filter(|_| self.is_recurrent(layer)) {
                let (channels, width, heads) = (shape.num_channels(), shape.output_size(), shape.num_value_heads);
                add(names.delta_qkv, layer, "weight", &[channels, hidden]);
                add(names.delta_gate, layer, "weight", &[width, hidden]);
                add(names.delta_beta, layer, "weight", &[heads, hidden]);
                add(names.delta_time_step, layer, "weight", &[heads, hidden]);
                add(names.delta_convolution, layer, "weight", &[channels, shape.num_taps]);
                add(names.delta_decay, layer, "", &[heads]);
                add(names.delta_time_bias, layer, "", &[heads]);
                add(names.delta_norm, layer, "weight", &[shape.value_size]);
                add(names.delta_output, layer, "weight", &[hidden, width]);
            } else if let Some(latent) = self.latent {
                self.add_latent_attention(latent, layer, &mut add);
            } else {
                self.add_attention(layer, &mut add);
            }
            add(mlp_norm, layer, "weight", &[hidden]);
            match self.experts.filter(|experts| layer >= experts.num_dense) {
                None => {
                    add(names.gate, layer, "weight", &[mlp, hidden]);
                    add(names.up, layer, "weight", &[mlp, hidden]);
                    add(names.down, layer, "weight", &[hidden, mlp]);
                }
                Some(SyntheticExperts { num_experts, mlp_size, num_shared, .. }) => {
                    add(names.router, layer, "weight", &[num_experts, hidden]);
                    let maps = [
                        (names.expert_gate, mlp_size, hidden),
                        (names.expert_up, mlp_size, hidden),
                        (names.expert_down, hidden, mlp_size),
                    ];
                    for (template, rows, cols) in maps {
                        add(template, layer, "weight", &[num_experts, rows, cols]);
                        if has_biases {
                            add(template, layer, "bias", &[num_experts, rows]);
                        }
                    }
                    if has_biases {
                        add(names.router, layer, "bias", &[num_experts]);
                    }
                    if num_shared > 0 {
                        let shared = num_shared * mlp_size;
                        add(names.shared_gate, layer, "weight", &[shared, hidden]);
                        add(names.shared_up, layer, "weight", &[shared, hidden]);
                        add(names.shared_down, layer, "weight", &[hidden, shared]);
                    }
                }
            }
        }
        add(names.final_norm, 0, "weight", &[hidden]);
        if !self.is_tied {
            add(names.output, 0, "weight", &[self.vocab_size, hidden]);
        }
        tensors
    }
}

/// Fills a tensor with random values, on all cores: the largest models have a hundred gigabytes.
fn fill(tensor: &NewTensor, seed: u64, bytes: &mut [u8]) {
    let fan_in = tensor.shape[tensor.shape.len() - 1];
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let block_bytes = tensor.dtype.block_bytes();
    // The size of a piece does not depend on the machine, so that the weights do not either.
    let piece = (1usize << 20).next_multiple_of(block_bytes * 32);
    let pieces: Vec<(usize, &mut [u8])> = bytes.chunks_mut(piece).enumerate().collect();
    let queue = std::sync::Mutex::new(pieces.into_iter());
    let work = || {
        loop {
            let next = queue.lock().expect("no thread panics while it holds the queue").next();
            let Some((i, piece)) = next else { return };
            quant::fill_random(tensor.dtype, fan_in, seed.wrapping_add(i as u64), piece);
        }
    };
    std::thread::scope(|scope| (0..num_threads).for_each(|_| drop(scope.spawn(work))));
}

#[cfg(test)]
mod tests;
