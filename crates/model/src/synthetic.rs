//! Models with the sizes of published ones and random weights, for benchmarks and tests without a file.
//!
//! A synthetic model becomes a checkpoint in memory with the keys and names of a GGUF file, so it is loaded, and can be
//! written, like any other. It has no vocabulary: only token ids can be used with it.

use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Value};
use pellucid_tensor::{SharedBytes, quant};

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
}

/// Experts in every layer, in place of the MLP.
#[derive(Debug, Clone, Copy)]
struct SyntheticExperts {
    num_experts: usize,
    num_selected: usize,
    mlp_size: usize,
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
    }
}

impl SyntheticModel {
    const fn with_experts(self, (num_experts, num_selected, mlp_size): (usize, usize, usize)) -> SyntheticModel {
        SyntheticModel { experts: Some(SyntheticExperts { num_experts, num_selected, mlp_size }), ..self }
    }

    /// All models.
    #[rustfmt::skip]
    pub const ALL: [SyntheticModel; 17] = [
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
    ];

    /// Finds a model by its name, ignoring case.
    pub fn named(name: &str) -> Option<SyntheticModel> {
        SyntheticModel::ALL.into_iter().find(|model| model.name.eq_ignore_ascii_case(name))
    }

    /// Returns a tiny model of the same family, for tests. Every width is a whole number of blocks in all formats.
    pub fn miniature(self) -> SyntheticModel {
        SyntheticModel {
            vocab_size: 512,
            hidden_size: 256,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            head_size: 64,
            mlp_size: 768,
            context_len: 256,
            experts: self.experts.map(|experts| SyntheticExperts { num_experts: 8, mlp_size: 256, ..experts }),
            ..self
        }
    }

    /// Returns a model of two layers of full width, for tests of kernels that only wide models reach.
    pub fn shallow(self) -> SyntheticModel {
        let fewer =
            |experts: SyntheticExperts| SyntheticExperts { num_experts: experts.num_experts.min(16), ..experts };
        SyntheticModel {
            vocab_size: 512,
            num_layers: 2,
            mlp_size: self.mlp_size.min(9_216),
            context_len: 256,
            experts: self.experts.map(fewer),
            ..self
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
            if tensor.name.ends_with("norm.weight") {
                bytes.chunks_exact_mut(4).for_each(|weight| weight.copy_from_slice(&1f32.to_le_bytes()));
            } else {
                fill(&tensor, seed ^ (i as u64) << 32, &mut bytes);
            }
            tensors.push((tensor, SharedBytes::from(bytes)));
            progress(i + 1, num_tensors);
        }
        Checkpoint::in_memory(&format!("{} in {}, random weights", self.name, scheme.name()), self.metadata(), tensors)
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
        number("attention.head_count_kv", self.num_kv_heads);
        number("attention.key_length", self.head_size);
        number("attention.value_length", self.head_size);
        number("rope.dimension_count", self.head_size);
        if let Some(SyntheticExperts { num_experts, num_selected, mlp_size }) = self.experts {
            number("expert_count", num_experts);
            number("expert_used_count", num_selected);
            number("expert_feed_forward_length", mlp_size);
        }
        put(&format!("{}.rope.freq_base", self.architecture), Value::F32(self.rope_base));
        put(&format!("{}.attention.layer_norm_rms_epsilon", self.architecture), Value::F32(1e-5));
        metadata
    }

    /// Every tensor, in the order in which a forward pass meets them.
    fn tensors(&self, scheme: QuantScheme) -> Vec<NewTensor> {
        let names = &tensor_names::GGUF;
        let (hidden, mlp) = (self.hidden_size, self.mlp_size);
        let (queries, keys) = (self.num_heads * self.head_size, self.num_kv_heads * self.head_size);
        let mut tensors = Vec::new();
        let mut add = |template: &str, layer: usize, ending: &str, shape: &[usize]| {
            let name = format!("{}.{ending}", template.replace("{}", &layer.to_string()));
            let role = TensorRole { name: &name, shape, num_layers: self.num_layers, is_tied: self.is_tied };
            tensors.push(NewTensor { dtype: scheme.dtype(role), name, shape: shape.to_vec() });
        };
        add(names.token_embedding, 0, "weight", &[self.vocab_size, hidden]);
        for layer in 0..self.num_layers {
            add(names.attention_norm, layer, "weight", &[hidden]);
            for (template, rows) in [(names.query, queries), (names.key, keys), (names.value, keys)] {
                add(template, layer, "weight", &[rows, hidden]);
                if self.architecture == "qwen2" {
                    add(template, layer, "bias", &[rows]);
                }
            }
            if self.architecture.starts_with("qwen3") {
                add(names.query_norm, layer, "weight", &[self.head_size]);
                add(names.key_norm, layer, "weight", &[self.head_size]);
            }
            add(names.attention_output, layer, "weight", &[hidden, queries]);
            add(names.mlp_norm, layer, "weight", &[hidden]);
            match self.experts {
                None => {
                    add(names.gate, layer, "weight", &[mlp, hidden]);
                    add(names.up, layer, "weight", &[mlp, hidden]);
                    add(names.down, layer, "weight", &[hidden, mlp]);
                }
                Some(SyntheticExperts { num_experts, mlp_size, .. }) => {
                    add(names.router, layer, "weight", &[num_experts, hidden]);
                    add(names.expert_gate, layer, "weight", &[num_experts, mlp_size, hidden]);
                    add(names.expert_up, layer, "weight", &[num_experts, mlp_size, hidden]);
                    add(names.expert_down, layer, "weight", &[num_experts, hidden, mlp_size]);
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
mod tests {
    use pellucid_tensor::DType;

    use super::*;

    #[test]
    fn models_have_the_published_number_of_parameters() {
        let parameters = |name: &str| -> usize {
            let model = SyntheticModel::named(name).expect("a known model");
            let tensors = model.tensors(QuantScheme::named("bf16").expect("a known scheme"));
            tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum()
        };
        // As stated by the publishers.
        assert_eq!(parameters("SmolLM2-135M"), 134_515_008);
        assert_eq!(parameters("smollm3-3b"), 3_075_098_624);
        assert_eq!(parameters("llama-3.2-1b"), 1_235_814_400);
        assert_eq!(parameters("llama-3.1-8b"), 8_030_261_248);
        assert_eq!(parameters("qwen2.5-0.5b"), 494_032_768);
        assert_eq!(parameters("qwen3-0.6b"), 596_049_920);
        assert_eq!(parameters("mixtral-8x7b"), 46_702_792_704);
        assert_eq!(parameters("qwen3-30b-a3b"), 30_532_122_624);
    }

    #[test]
    fn a_synthetic_model_opens_like_a_file() {
        let names = ["smollm2-135m", "smollm3-3b", "mixtral-8x7b", "qwen3-30b-a3b"];
        let models = names.map(|name| SyntheticModel::named(name).expect("a known model").miniature());
        for (model, scheme) in models.iter().flat_map(|model| QuantScheme::ALL.map(|scheme| (model, scheme))) {
            let checkpoint = model.checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
            let config = crate::read_config(&checkpoint).expect("a known family");
            assert_eq!((config.vocab_size, config.num_layers()), (512, 2));
            assert_eq!(config.experts.is_some(), model.experts.is_some());
            let norm = checkpoint.tensor("output_norm.weight").expect("a norm");
            assert_eq!(norm.info.dtype, DType::F32);
        }
    }
}
