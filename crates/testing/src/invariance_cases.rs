//! The models and KV formats on which batch invariance is tested: every golden with keys and values in f32, a few
//! families in 16 bits, and models whose heads are wide enough for every format, in each format.

use std::path::{Path, PathBuf};

use pellucid_model::KvMemory;
use pellucid_selftest::goldens;
use pellucid_selftest::suites::RandomData;
use pellucid_tensor::DType;
use serde_json::{Map, Value, json};

/// A model and a format of its keys and values.
#[derive(Debug, Clone)]
pub struct InvarianceCase {
    pub name: String,
    pub path: PathBuf,
    pub kv_dtype: DType,
    /// A prompt that is longer than windows and blocks.
    pub prompt: Vec<u32>,
}

/// Families whose attention differs: soft caps, windows, query norms, no RoPE, groups of three heads.
const IN_SIXTEEN_BITS: [&str; 5] = ["gemma2", "gpt2", "mistral", "qwen3", "smollm2"];

/// Returns all cases. Writes models to `folder`, which must exist as long as the cases are used.
pub fn invariance_cases(folder: &Path) -> Vec<InvarianceCase> {
    let mut cases = Vec::new();
    for golden in goldens() {
        let longest = golden.prompts.iter().max_by_key(|prompt| prompt.len()).expect("a prompt");
        let prompt = longest.iter().chain(longest.iter().rev().take(24)).copied().take(60).collect();
        let case = InvarianceCase { name: golden.name, path: golden.folder, kv_dtype: DType::F32, prompt };
        if IN_SIXTEEN_BITS.contains(&case.name.as_str()) {
            cases.extend([DType::F16, DType::BF16].map(|kv_dtype| InvarianceCase { kv_dtype, ..case.clone() }));
        }
        cases.push(case);
    }
    let prompt: Vec<u32> = (0..60).map(|i| (i * i * 7 + i * 3) % 96).collect();
    for (name, write) in [("wide heads", write_wide_model as fn(&Path)), ("wide latents", write_latent_model)] {
        let path = folder.join(name);
        std::fs::create_dir(&path).expect("a writable folder");
        write(&path);
        cases.extend(KvMemory::FORMATS.map(|kv_dtype| InvarianceCase {
            name: name.into(),
            path: path.clone(),
            kv_dtype,
            prompt: prompt.clone(),
        }));
    }
    cases
}

/// Writes a Llama with two layers and random weights: the heads of the goldens are too narrow for blocks of 32.
fn write_wide_model(folder: &Path) {
    const HIDDEN: usize = 48;
    const MLP: usize = 40;
    const HEAD: usize = 32;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 96,
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 2, "head_dim": HEAD,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "float32",
    });
    let mut shapes = vec![("model.embed_tokens".to_owned(), vec![96, HIDDEN]), ("model.norm".to_owned(), vec![HIDDEN])];
    for layer in 0..2 {
        shapes.extend(
            [
                ("input_layernorm", vec![HIDDEN]),
                ("post_attention_layernorm", vec![HIDDEN]),
                ("self_attn.q_proj", vec![4 * HEAD, HIDDEN]),
                ("self_attn.k_proj", vec![2 * HEAD, HIDDEN]),
                ("self_attn.v_proj", vec![2 * HEAD, HIDDEN]),
                ("self_attn.o_proj", vec![HIDDEN, 4 * HEAD]),
                ("mlp.gate_proj", vec![MLP, HIDDEN]),
                ("mlp.up_proj", vec![MLP, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, MLP]),
            ]
            .map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)),
        );
    }
    write_model(folder, &config, shapes);
}

/// Writes a model with latent attention, as DeepSeek V3 without experts.
fn write_latent_model(folder: &Path) {
    const HIDDEN: usize = 48;
    const MLP: usize = 40;
    const RANK: usize = 24;
    const LATENT: usize = 64;
    const HEADS: usize = 3;
    let (plain, rotary, value) = (20, 32, 24);
    let config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu", "vocab_size": 96,
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "q_lora_rank": RANK, "kv_lora_rank": LATENT, "qk_nope_head_dim": plain, "qk_rope_head_dim": rotary,
        "v_head_dim": value, "first_k_dense_replace": 2, "moe_intermediate_size": MLP, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "float32",
    });
    let mut shapes = vec![("model.embed_tokens".to_owned(), vec![96, HIDDEN]), ("model.norm".to_owned(), vec![HIDDEN])];
    for layer in 0..2 {
        shapes.extend(
            [
                ("input_layernorm", vec![HIDDEN]),
                ("post_attention_layernorm", vec![HIDDEN]),
                ("self_attn.q_a_proj", vec![RANK, HIDDEN]),
                ("self_attn.q_a_layernorm", vec![RANK]),
                ("self_attn.q_b_proj", vec![HEADS * (plain + rotary), RANK]),
                ("self_attn.kv_a_proj_with_mqa", vec![LATENT + rotary, HIDDEN]),
                ("self_attn.kv_a_layernorm", vec![LATENT]),
                ("self_attn.kv_b_proj", vec![HEADS * (plain + value), LATENT]),
                ("self_attn.o_proj", vec![HIDDEN, HEADS * value]),
                ("mlp.gate_proj", vec![MLP, HIDDEN]),
                ("mlp.up_proj", vec![MLP, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, MLP]),
            ]
            .map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)),
        );
    }
    write_model(folder, &config, shapes);
}

/// Writes a folder with this configuration and random weights of these shapes.
fn write_model(folder: &Path, config: &Value, shapes: Vec<(String, Vec<usize>)>) {
    let mut random = RandomData(4);
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape) in shapes {
        let len = shape.iter().product();
        // Norms near one, and matrices that keep the size of their input.
        let scale = if shape.len() == 1 { 0.1 } else { 1.0 / (shape[1] as f32).sqrt() };
        let offset = if shape.len() == 1 { 1.0 } else { 0.0 };
        let start = data.len();
        data.extend(random.normals(len).iter().flat_map(|x| (x * scale + offset).to_le_bytes()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(format!("{name}.weight"), entry);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a writable folder");
    std::fs::write(folder.join("model.safetensors"), file).expect("a writable folder");
}
