//! Models that must not load: each has one invalid setting or tensor, and the error names it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Source, Value as GgufValue};
use pellucid_cpu::Isa;
use pellucid_model::{Decoder, LoadOptions, Model};
use pellucid_selftest::goldens_folder;
use pellucid_tensor::{
    Activation, Attention, Backend, DType, ExpertMlp, HostWeight, KvLayer, Linear, Output, Rope, SharedBytes, StoreKv,
    TableRows, Tensor,
};
use pellucid_testing::cpu;
use serde_json::{Value, json};

/// Copies a golden's folder and changes its configuration.
fn altered(golden: &str, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{golden}-{name}"));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    let source = goldens_folder().join(golden);
    std::fs::copy(source.join("model.safetensors"), folder.join("model.safetensors")).expect("a copy");
    let text = std::fs::read_to_string(source.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("valid JSON");
    change(&mut config);
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a configuration");
    folder
}

fn load_error(path: &Path, context_len: Option<usize>) -> String {
    let backend = cpu(Isa::Scalar, 1).expect("scalar is always available");
    let load = || -> Result<Decoder, String> {
        let checkpoint = Checkpoint::open(path).map_err(|error| error.to_string())?;
        let options = LoadOptions { context_len, ..LoadOptions::default() };
        Decoder::load(&checkpoint, backend, options, &mut |_, _| ()).map_err(|error| error.to_string())
    };
    load().map(|_| ()).expect_err("the model must be rejected")
}

#[test]
fn invalid_settings_are_rejected_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change, &[&str]); 28] = [
        ("llama2", "architecture", |c| c["model_type"] = json!("mamba"), &["mamba", "llama", "qwen3-moe", "xglm"]),
        ("llama2", "zero-heads", |c| c["num_attention_heads"] = json!(0), &["number of heads"]),
        ("llama2", "zero-kv-heads", |c| c["num_key_value_heads"] = json!(0), &["number of kv heads"]),
        ("llama2", "uneven-heads", |c| c["num_key_value_heads"] = json!(3), &["heads"]),
        ("llama2", "negative", |c| c["hidden_size"] = json!(-1), &["hidden_size"]),
        ("llama2", "huge", |c| c["hidden_size"] = json!(u64::MAX), &["hidden_size"]),
        ("llama2", "huge-layers", |c| c["num_hidden_layers"] = json!(2_000_000_000), &["layers"]),
        ("llama2", "text", |c| c["intermediate_size"] = json!("56"), &["intermediate_size", "56"]),
        ("llama2", "wrong-width", |c| c["intermediate_size"] = json!(57), &["mlp", "57"]),
        ("llama2", "missing", |c| _ = c.as_object_mut().unwrap().remove("rms_norm_eps"), &["rms_norm_eps"]),
        ("llama2", "activation", |c| c["hidden_act"] = json!("relu6"), &["hidden_act", "relu6"]),
        ("llama2", "fewer-layers", |c| c["num_hidden_layers"] = json!(1), &["model.layers.1"]),
        ("llama3", "rope", |c| c["rope_parameters"]["rope_type"] = json!("spiral"), &["rope_type", "spiral"]),
        (
            "llama3",
            "longer-factors",
            |c| {
                let (short, long) = (vec![1.0; 8], vec![1.0; 9]);
                c["rope_parameters"] = json!({ "rope_type": "longrope", "short_factor": short, "long_factor": long });
            },
            &["8 factors", "found 9"],
        ),
        (
            "llama3",
            "two-scalings",
            |c| c["rope_scaling"] = json!({ "type": "linear", "factor": 8.0 }),
            &["config.json: rope_scaling", "rope_parameters", "linear"],
        ),
        (
            "llama2",
            "bad-factor",
            |c| {
                c.as_object_mut().unwrap().remove("rope_parameters");
                c["rope_scaling"] = json!({ "type": "linear", "factor": "x" });
            },
            &["config.json: rope_scaling.factor: expected a number"],
        ),
        (
            "llama3",
            "missing-factor",
            |c| c["rope_parameters"] = json!({ "rope_type": "linear" }),
            &["config.json: rope_parameters.factor: missing"],
        ),
        (
            "gemma3",
            "nested-bad-theta",
            |c| c["rope_parameters"]["full_attention"]["rope_theta"] = json!("x"),
            &["config.json: rope_parameters.full_attention.rope_theta: expected a number"],
        ),
        (
            "gemma3",
            "nested-missing",
            |c| _ = c["rope_parameters"].as_object_mut().unwrap().remove("sliding_attention"),
            &["config.json: rope_parameters.sliding_attention: missing"],
        ),
        (
            "gemma4-small",
            "all-layers-share",
            |c| c["text_config"]["num_kv_shared_layers"] = json!(6),
            &["number of layers that share keys and values", "like layer 0"],
        ),
        (
            "gemma4-moe",
            "unknown-setting-of-a-layer",
            |c| c["text_config"]["per_layer_config"]["2"]["sliding_window"] = json!(4),
            &["config.json: text_config.per_layer_config.2.sliding_window: expected no such setting"],
        ),
        (
            "gemma4",
            "sees-later-tokens",
            |c| c["use_bidirectional_attention"] = json!("all"),
            &["use_bidirectional_attention", "found all"],
        ),
        ("smollm2", "untied", |c| c["tie_word_embeddings"] = json!(false), &["lm_head.weight"]),
        ("mistral", "window", |c| c["sliding_window"] = json!(0), &["sliding window"]),
        ("mixtral", "experts", |c| c["num_experts_per_tok"] = json!(5), &["experts used", "1 to 4"]),
        // Sizes that are allowed alone, and whose product fits no memory: the tensor's shape is checked before.
        (
            "deepseek3",
            "huge-queries",
            |c| {
                for key in ["num_attention_heads", "num_key_value_heads"] {
                    c[key] = json!(1 << 24);
                }
                for key in ["qk_nope_head_dim", "qk_head_dim"] {
                    c[key] = json!(1 << 20);
                }
            },
            &["q_b_proj"],
        ),
        (
            "qwen35-text",
            "huge-queries",
            |c| ["num_attention_heads", "head_dim"].into_iter().for_each(|key| c[key] = json!(1 << 22)),
            &["self_attn.q_proj"],
        ),
        ("gpt2", "switch", |c| c["scale_attn_weights"] = json!(false), &["scale_attn_weights"]),
    ];
    for (golden, name, change, expected) in cases {
        let message = load_error(&altered(golden, name, change), None);
        for part in expected {
            assert!(message.contains(part), "{golden}, {name}: \"{message}\" does not name {part}");
        }
    }
}

#[test]
fn a_longer_context_than_the_models_is_rejected_with_both_lengths() {
    let message = load_error(&goldens_folder().join("llama2"), Some(257));
    assert!(message.contains("257") && message.contains("256"), "{message}");
}

/// Loads a golden's GGUF file with changed keys and tensors.
fn load_altered(golden: &str, change: impl FnOnce(&mut Keys, &mut Tensors)) -> Result<Decoder, String> {
    let checkpoint = Checkpoint::open(&goldens_folder().join(golden).join("model.gguf")).expect("a golden");
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("a GGUF file") };
    let mut keys: Keys = metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
    let mut tensors: Tensors = (checkpoint.tensors().iter())
        .map(|info| {
            let bytes = checkpoint.tensor(&info.name).expect("a tensor of the list").bytes().to_vec();
            (NewTensor { name: info.name.clone(), dtype: info.dtype, shape: info.shape.clone() }, bytes.into())
        })
        .collect();
    change(&mut keys, &mut tensors);
    let mut metadata = Metadata::default();
    for (key, value) in keys {
        assert!(metadata.insert(key, value), "keys are unique");
    }
    let checkpoint = Checkpoint::in_memory(golden, metadata, tensors).map_err(|error| error.to_string())?;
    let backend = cpu(Isa::Scalar, 1).expect("scalar is always available");
    Decoder::load(&checkpoint, backend, LoadOptions::default(), &mut |_, _| ()).map_err(|error| error.to_string())
}

type Keys = Vec<(String, GgufValue)>;
type Tensors = Vec<(NewTensor, SharedBytes)>;

fn factors(name: &str, count: usize) -> (NewTensor, SharedBytes) {
    let bytes: Vec<u8> = (0..count).flat_map(|_| 2f32.to_le_bytes()).collect();
    (NewTensor { name: name.into(), dtype: DType::F32, shape: vec![count] }, bytes.into())
}

fn text(value: &str) -> GgufValue {
    GgufValue::String(value.into())
}

#[test]
fn incomplete_or_contradictory_rope_scalings_are_rejected() {
    type Change = fn(&mut Keys, &mut Tensors);
    let cases: [(&str, Change, &[&str]); 8] = [
        (
            "llama-linear",
            |_, tensors| tensors.push(factors("rope_freqs.weight", 4)),
            &["llama.rope.scaling", "Linear", "tensors of factors"],
        ),
        ("llama2", |_, tensors| tensors.push(factors("rope_freqs.weight", 9)), &["8 factors", "found 9"]),
        ("llama2", |_, tensors| tensors.push(factors("rope_freqs.weight", 7)), &["8 factors", "found 7"]),
        (
            "phi3-longrope",
            |_, tensors| tensors.retain(|(tensor, _)| tensor.name != "rope_factors_short.weight"),
            &["rope_factors_long.weight", "\"rope_factors_short.weight\" as well"],
        ),
        (
            "phi3-longrope",
            |_, tensors| tensors.retain(|(tensor, _)| tensor.name != "rope_factors_long.weight"),
            &["rope_factors_short.weight", "\"rope_factors_long.weight\" as well"],
        ),
        (
            "llama2",
            |keys, _| keys.push(("llama.rope.scaling.type".into(), text("longrope"))),
            &["llama.rope.scaling.type", "rope_factors_long.weight", "neither of them"],
        ),
        (
            "llama2",
            |keys, _| keys.push(("llama.rope.scaling.type".into(), text("spiral"))),
            &["none, linear, yarn or longrope", "spiral"],
        ),
        (
            "gemma3",
            |keys, _| keys.push(("gemma3.attention.sliding_window_pattern".into(), GgufValue::U32(0))),
            &["sliding_window_pattern", "1 or more", "found 0"],
        ),
    ];
    for (golden, change, expected) in cases {
        let message = load_altered(golden, change).map(|_| ()).expect_err("the model must be rejected");
        for part in expected {
            assert!(message.contains(part), "{golden}: \"{message}\" does not name {part}");
        }
    }
    load_altered("llama2", |_, tensors| tensors.push(factors("rope_freqs.weight", 8))).expect("factors alone");
    load_altered("phi3-longrope", |keys, _| keys.push(("phi3.rope.scaling.type".into(), text("longrope"))))
        .expect("factors with their type");
}

#[test]
fn unsupported_keys_that_would_change_the_arithmetic_are_rejected() {
    use GgufValue::{Bool, F32, U32};
    let load = |golden: &str, key: &str, value: &GgufValue| {
        load_altered(golden, |keys, _| {
            keys.retain(|(known, _)| known != key);
            keys.push((key.to_owned(), value.clone()));
        })
    };
    let refused = [
        ("llama2", "llama.attention.causal", Bool(false)),
        ("llama2", "llama.attention.scale", F32(0.5)),
        ("llama2", "llama.logit_scale", F32(16.0)),
        ("llama2", "llama.residual_scale", F32(0.2)),
        ("llama2", "llama.embedding_scale", F32(12.0)),
        ("llama2", "llama.attn_logit_softcapping", F32(30.0)),
        ("llama2", "llama.rope.scaling.attn_factor", F32(1.2)),
        ("mixtral", "llama.expert_gating_func", U32(2)),
        ("mixtral", "llama.expert_shared_count", U32(1)),
        ("mixtral", "llama.expert_weights_norm", Bool(false)),
        ("qwen3-moe", "qwen3moe.expert_weights_scale", F32(2.5)),
        ("qwen2-yarn", "qwen2.rope.scaling.yarn_ext_factor", F32(0.0)),
        ("gemma3", "gemma3.embedding_scale", F32(1.0)),
        ("llama2", "llama.expert_weights_scale", text("2")),
    ];
    for (golden, key, value) in refused {
        let message = load(golden, key, &value).map(|_| ()).expect_err("the model must be rejected");
        assert!(message.starts_with(key) && message.contains("does not read it"), "{golden}: {message}");
    }
    let harmless = [
        ("llama2", "llama.attention.causal", Bool(true)),
        ("llama2", "llama.attention.scale", F32(0.25)),
        ("llama2", "llama.logit_scale", F32(1.0)),
        ("llama2", "llama.expert_shared_count", U32(0)),
        ("mixtral", "llama.expert_gating_func", U32(1)),
        ("mixtral", "llama.expert_weights_norm", Bool(true)),
        ("gemma2", "gemma2.attn_logit_softcapping", F32(4.0)),
        ("qwen2-yarn", "qwen2.rope.scaling.yarn_ext_factor", F32(1.0)),
    ];
    for (golden, key, value) in harmless {
        load(golden, key, &value).unwrap_or_else(|error| panic!("{golden}: {error}"));
    }
}

#[test]
fn layers_that_predict_further_tokens_are_left_out_by_name() {
    use GgufValue::{Array, U32};
    let (block_count, nextn) = ("qwen35.block_count", "qwen35.nextn_predict_layers");
    let mut recurrent = vec![true, true, false, true, false];
    let add = |names: &'static [&'static str], keys: &[(&str, u32)], recurrent: &[bool]| {
        load_altered("qwen35", |all, tensors| {
            let list = "qwen35.attention.recurrent_layers";
            all.retain(|(key, _)| key != list && keys.iter().all(|(changed, _)| key != changed));
            all.extend(keys.iter().map(|&(key, value)| (key.to_owned(), U32(value))));
            all.push((list.to_owned(), Array(pellucid_checkpoint::Array::Bool(recurrent.to_vec()))));
            tensors.extend(names.iter().map(|name| factors(name, 32)));
        })
    };
    let names = &["blk.4.attn_norm.weight", "blk.4.nextn.enorm.weight"];
    let loaded = add(names, &[(block_count, 5), (nextn, 1)], &recurrent).expect("a decoder without the last layer");
    assert_eq!(loaded.predicting_tensors(), names);
    assert_eq!(loaded.config().num_layers(), 4);
    let unused = add(names, &[(block_count, 4)], &recurrent[..4]).map(|_| ()).expect_err("unused tensors");
    assert!(unused.contains("blk.4.attn_norm.weight"), "{unused}");
    recurrent.pop();
    let short = add(names, &[(block_count, 5), (nextn, 1)], &recurrent).map(|_| ()).expect_err("a short list");
    assert!(short.contains("recurrent_layers") && short.contains("5 bools"), "{short}");
}

/// A device that has only the operations which every device has. A model that it lacks an operation for must be refused
/// before anything is allocated or computed.
#[derive(Debug)]
struct PlainDevice;

macro_rules! never_called {
    ($(fn $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $(_: $argument),*) -> Result<$result, pellucid_tensor::Error> {
            panic!(concat!("`", stringify!($name), "` was called"))
        })*
    };
}

impl Backend for PlainDevice {
    fn description(&self) -> String {
        "a plain device".into()
    }

    fn activation_dtype(&self) -> DType {
        DType::F32
    }

    fn free_memory(&self) -> Option<u64> {
        None
    }

    fn embed(&self, _: &Tensor, _: TableRows<'_>, _: f32, _: &mut Tensor) -> Result<(), pellucid_tensor::Error> {
        panic!("`embed` was called")
    }

    never_called! {
        fn read_bandwidth(usize) -> f64;
        fn zeros(DType, usize, usize) -> Tensor;
        fn resize_rows(&mut Tensor, usize) -> ();
        fn weight(HostWeight) -> Tensor;
        fn read(&Tensor, &mut [f32]) -> ();
        fn read_row(&Tensor, usize, &mut [f32]) -> ();
        fn copy_row(usize, usize, &mut Tensor) -> ();
        fn copy_rows(&Tensor, &[u32], &mut Tensor, usize) -> ();
        fn write(&[f32], &mut Tensor) -> ();
        fn gather_rows(&Tensor, &[u32], &mut Tensor) -> ();
        fn scatter_rows(&Tensor, &[u32], &mut Tensor) -> ();
        fn rms_norm(&Tensor, &Tensor, f32, &mut Tensor) -> ();
        fn layer_norm(&Tensor, &Tensor, &Tensor, f32, &mut Tensor) -> ();
        fn add(&Tensor, &mut Tensor) -> ();
        fn soft_cap(f32, &mut Tensor) -> ();
        fn linear(&Tensor, &Linear, &mut Tensor) -> ();
        fn activate(Activation, &mut Tensor) -> ();
        fn gate(Activation, &Tensor, &mut Tensor) -> ();
        fn expert_mlp(ExpertMlp<'_>, Output<'_>) -> ();
        fn rope_angles(&[u32], &[f32], f32, &mut Tensor) -> ();
        fn rope(Rope<'_>, &mut Tensor) -> ();
        fn store_kv(StoreKv<'_>, &mut KvLayer) -> ();
        fn attention(Attention<'_>, &mut Tensor) -> ();
    }
}

#[test]
fn a_device_without_an_operation_refuses_the_family_by_name() {
    let cases = [
        ("gpt-oss", "gpt-oss models need attention sinks"),
        ("glm4-moe", "glm4-moe models need a router with sigmoid scores"),
        ("minimax-m2", "minimax-m2 models need a router with sigmoid scores"),
        ("lfm2", "lfm2 models need short convolutions"),
        ("gemma4", "gemma4 models need layers with factors"),
        ("gemma4-moe", "gemma4 models need experts with factors"),
        ("gemma4-small", "gemma4 models need layers with inputs of their own"),
        ("lfm2-moe", "lfm2-moe models need"),
        ("deepseek2-lite", "deepseek2 models need multi-head latent attention"),
        ("deepseek3", "deepseek3 models need multi-head latent attention"),
        ("qwen3-next", "qwen3-next models need gated delta nets"),
        ("qwen35", "qwen35 models need gated delta nets"),
        ("qwen35-moe", "qwen35-moe models need gated delta nets"),
        ("granite-hybrid", "granite-hybrid models need Mamba-2 layers"),
        ("nemotron-h", "nemotron-h models need Mamba-2 layers"),
        ("nemotron-h-moe", "nemotron-h models need a router with sigmoid scores"),
    ];
    for (golden, expected) in cases {
        let checkpoint = Checkpoint::open(&goldens_folder().join(golden)).expect("a golden");
        let refused = Decoder::load(&checkpoint, Arc::new(PlainDevice), LoadOptions::default(), &mut |_, _| ());
        let message = refused.expect_err("an operation is missing").to_string();
        assert!(message.starts_with(expected) && message.contains("a plain device"), "{golden}: {message}");
        assert!(message.contains("--device cpu"), "{golden}: {message}");
    }
}
