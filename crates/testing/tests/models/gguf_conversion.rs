//! Hugging Face folders converted to GGUF: the same tensors and keys as llama.cpp's converter, and the same logits as
//! the folder.

use std::path::{Path, PathBuf};

use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Source, TensorView, write_converted};
use pellucid_model::{GgufModel, Model};
use pellucid_selftest::{Golden, Runner, goldens, goldens_folder};
use pellucid_tensor::{DType, RopeStyle, quant};
use pellucid_testing::{cpu, exact_isa};
use serde_json::{Value, json};

/// Maximum difference of a logit; `goldens.rs` gives the reason.
const TOLERANCE: f32 = 1e-4;

/// Copies a golden's folder, with the settings that llama.cpp's converter keeps.
fn as_converted(golden: &Golden, scratch: &Path) -> PathBuf {
    let read = |file: &str| -> Value {
        let text = std::fs::read_to_string(golden.folder.join(file)).expect("a readable golden");
        serde_json::from_str(&text).expect("valid JSON")
    };
    let folder = scratch.join(&golden.name);
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    let mut config = read("config.json");
    for (key, value) in read("golden.json")["gguf"]["differs_in"].as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a configuration");
    std::fs::copy(golden.folder.join("model.safetensors"), folder.join("model.safetensors")).expect("a copy");
    folder
}

/// Converts a folder to a GGUF file with the values that the folder's reference has.
fn convert(folder: &Path, scratch: &Path) -> PathBuf {
    let checkpoint = Checkpoint::open(folder).expect("a folder").with_reference_rounding();
    convert_checkpoint(&checkpoint, folder, scratch)
}

/// Converts a checkpoint to a GGUF file without changing the formats of its tensors. FP8, which GGUF does not have,
/// becomes F32.
fn convert_checkpoint(checkpoint: &Checkpoint, folder: &Path, scratch: &Path) -> PathBuf {
    let model = GgufModel::new(checkpoint).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let whole = model.checkpoint().expect("a model in memory");
    let tensors: Vec<NewTensor> = (whole.tensors().iter())
        .map(|tensor| {
            let dtype = if tensor.dtype == DType::F8_E4M3 { DType::F32 } else { tensor.dtype };
            NewTensor { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() }
        })
        .collect();
    let target = scratch.join("model.gguf");
    let file = std::fs::File::create(&target).expect("a file");
    write_converted(&model, model.metadata(), &tensors, 2, (&target, file), &mut |_| ()).expect("a written file");
    target
}

fn metadata(checkpoint: &Checkpoint) -> &Metadata {
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("a GGUF file") };
    metadata
}

fn values(tensor: &TensorView<'_>) -> Vec<f32> {
    let mut values = vec![0.0; tensor.info.num_elements()];
    quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
    values
}

#[test]
fn tensors_and_keys_equal_those_of_llama_cpps_converter() {
    let scratch = tempfile::tempdir().expect("a folder for the test");
    let mut compared = 0;
    for golden in goldens().iter().filter(|golden| golden.folder.join("model.gguf").exists()) {
        let ours = Checkpoint::open(&convert(&as_converted(golden, scratch.path()), scratch.path())).expect("a file");
        let theirs = Checkpoint::open(&golden.folder.join("model.gguf")).expect("a golden");
        assert_eq!(ours.tensors().len(), theirs.tensors().len(), "{}: number of tensors", golden.name);
        for tensor in theirs.tensors() {
            let (ours, theirs) = (ours.find_tensor(&tensor.name), theirs.tensor(&tensor.name).expect("its own"));
            let ours = ours.unwrap_or_else(|| panic!("{}: no {}", golden.name, tensor.name));
            assert_eq!(ours.info.shape, tensor.shape, "{}: {}", golden.name, tensor.name);
            let (ours, theirs) = (values(&ours), values(&theirs));
            // The RoPE factors of Llama 3 are computed, by llama.cpp in another order of operations.
            // So are the exponentials of decays, with the C library's function.
            let is_computed = tensor.name == "rope_freqs.weight" || tensor.name.ends_with(".ssm_a");
            let slack = if is_computed { 1e-6 } else { 0.0 };
            let same = |(ours, theirs): (&f32, &f32)| (ours - theirs).abs() <= slack * theirs.abs();
            assert!(ours.iter().zip(&theirs).all(same), "{}: values of {}", golden.name, tensor.name);
            compared += 1;
        }
        for (key, value) in metadata(&theirs).iter().filter(|(key, _)| !key.starts_with("tokenizer.")) {
            // Skip descriptions, two keys of Phi-3 that mean "none", one that states what readers assume, the keys for
            // images, and those of the queries' scale beyond the context that our reader allows.
            let ends_with = |endings: &[&str]| endings.iter().any(|ending| key.ends_with(ending));
            let of_images = ["rope.dimension_sections", "n_deepstack_layers"];
            let of_scale = ["context_length", "yarn_log_multiplier", "temperature_scale"];
            // Settings of a rotation that no layer has, a context that llama.cpp extends for lack of one, and keys of
            // experts that a dense model does not have.
            let of_rotation = ["rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned", "context_length"];
            let of_experts = ["expert_count", "expert_used_count", "expert_shared_feed_forward_length"];
            let is_hybrid = ["granite-hybrid", "nemotron-h"].iter().any(|family| golden.name.starts_with(family));
            let is_dense = golden.name == "granite-hybrid";
            if is_hybrid && ends_with(&of_rotation) || is_dense && ends_with(&of_experts) {
                continue;
            }
            // One group of experts is none, and no layers that predict are no key.
            let is_neutral = [0, 1].map(pellucid_checkpoint::Value::U32).contains(value);
            if is_neutral && ends_with(&["expert_group_count", "expert_group_used_count", "nextn_predict_layers"]) {
                continue;
            }
            if ends_with(&of_images) || (golden.name == "ministral3" && ends_with(&of_scale)) {
                continue;
            }
            let has_no_effect = key == "olmo2.rope.scaling.yarn_attn_factor"
                || key == "phi3.rope.scaling.original_context_length"
                    && ours.find_tensor("rope_factors_long.weight").is_none()
                || key == "phi3.attention.sliding_window" && *value == pellucid_checkpoint::Value::U32(0);
            if has_no_effect || (key.starts_with("general.") && key != "general.architecture") {
                continue;
            }
            assert_eq!(metadata(&ours).get(key), Some(value), "{}: {key}", golden.name);
        }
    }
    assert!(compared > 400, "only {compared} tensors were compared");
}

#[test]
fn a_converted_folder_gives_the_same_logits() {
    let Some(backend) = cpu(exact_isa(), 2) else { return };
    let scratch = tempfile::tempdir().expect("a folder for the test");
    let mut exact = 0;
    for golden in goldens() {
        let folder = &golden.folder;
        if GgufModel::new(&Checkpoint::open(folder).expect("a golden")).is_err() {
            // The next test lists the rejected models.
            continue;
        }
        let file = convert(folder, scratch.path());
        for prompt in &golden.prompts {
            let context_len = golden.context_len(prompt.len());
            let mut logits = [folder, &file].map(|path| {
                let mut runner = Runner::load(path, backend.clone(), context_len, 4);
                let config = runner.model.config();
                let is_interleaved =
                    matches!(config.positions, pellucid_model::Positions::Rope { style: RopeStyle::Interleaved, .. });
                let reorders =
                    ["qwen35", "granite-hybrid", "nemotron-h"].iter().any(|name| config.architecture.starts_with(name));
                // Kernels of FP8 and F32 add in another order.
                let reorders = is_interleaved || reorders || golden.name == "fp8";
                (runner.prompt(prompt, &[prompt.len()], vec![0, 1]), reorders)
            });
            let [(folder, _), (file, reorders)] = &mut logits;
            if *reorders {
                // The values of a head, or the heads of a delta net, are reordered, and so are the sums over them.
                let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE;
                let is_same = folder.len() == file.len() && folder.iter().zip(&*file).all(is_close);
                assert!(is_same, "{}: a logit differs by more than {TOLERANCE}", golden.name);
            } else {
                assert_eq!(folder, file, "{}: logits of the file", golden.name);
                exact += 1;
            }
        }
    }
    assert!(exact >= 8 * 3, "only {exact} prompts gave the same bits");
}

#[test]
fn integers_of_a_folder_are_kept_in_the_file() {
    let Some(backend) = cpu(exact_isa(), 2) else { return };
    for (name, format) in [("gptq", DType::Q4_0), ("awq", DType::Q5_0), ("int8", DType::Q8_0)] {
        let scratch = tempfile::tempdir().expect("a folder for the test");
        let all = goldens();
        let golden = all.iter().find(|golden| golden.name == name).expect("a golden");
        let folder = Checkpoint::open(&golden.folder).expect("a golden");
        let file = Checkpoint::open(&convert_checkpoint(&folder, &golden.folder, scratch.path())).expect("a file");
        assert!(file.tensors().iter().any(|tensor| tensor.dtype == format), "{name}: {format}");
        let prompt = &golden.prompts[0];
        let run = |checkpoint: &Checkpoint| {
            let mut runner = Runner::of(checkpoint, backend.clone(), golden.context_len(prompt.len()), 4, DType::F32);
            runner.prompt(prompt, &[prompt.len()], vec![0, 1])
        };
        let [folder, file] = [&folder, &file].map(run);
        // A family whose heads are reordered in a GGUF file adds in another order.
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE;
        assert!(folder.iter().zip(&file).all(is_close), "{name}: logits of the file");
    }
}

#[test]
fn a_model_that_gguf_cannot_express_is_rejected_by_name() {
    let cases = [
        ("xglm", &["xglm", "no GGUF form"][..]),
        ("gemma2", &["gemma2", "the attention scale"]),
        ("gemma3-old", &["gemma3", "the attention scale"]),
        ("qwen2-window", &["qwen2", "the window of layer 1 is 8 positions", "read as none"]),
        ("qwen3-moe-mixed", &["qwen3-moe", "the MLP of layer 1 is one dense MLP"]),
        ("smollm3-list", &["smollm3", "the window of layer 0 is 8 positions", "read as none"]),
        ("lfm2-bias", &["lfm2", "the short convolution is over 4 positions with biases", "without biases"]),
        ("glm4-moe-groups", &["glm4-moe", "expert_group_count", "does not read it"]),
        ("deepseek2", &["deepseek2", "the way of positions", "attention times 0.837", "attention times 1"]),
        ("granite-hybrid-groups", &["granite-hybrid", "the Mamba-2 layers", "norms over 64", "norms over 32"]),
        ("nemotron-h-groups", &["nemotron-h-moe", "expert_group_count", "does not read it"]),
        ("qwen3-moe-step", &["qwen3-moe", "the mixture of experts", "unnormalised weights, but"]),
    ];
    let refused: Vec<(String, String)> = (goldens().iter())
        .filter_map(|golden| {
            let checkpoint = Checkpoint::open(&golden.folder).expect("a golden");
            GgufModel::new(&checkpoint).err().map(|error| (golden.name.clone(), error.to_string()))
        })
        .collect();
    assert_eq!(refused.len(), cases.len(), "{refused:#?}");
    for (name, expected) in cases {
        let (_, message) = refused.iter().find(|(golden, _)| golden == name).expect("a refusal");
        for part in expected {
            assert!(message.contains(part), "{name}: \"{message}\" does not say {part}");
        }
    }
}

/// Returns a GGUF file as converters wrote it until 2025: keys and values of latents in one matrix, lengths of heads.
fn old_file_of_latents(golden: &Golden, dtype: DType) -> Checkpoint {
    let file = Checkpoint::open(&golden.folder.join("model.gguf")).expect("a golden");
    let folder = Checkpoint::open(&golden.folder).expect("a golden");
    let mut keys = Metadata::default();
    let is_new = |key: &str| {
        ["key_length_mla", "value_length_mla", "attention.key_length", "attention.value_length"]
            .iter()
            .any(|ending| key.ends_with(ending))
    };
    for (key, value) in metadata(&file).iter() {
        if !is_new(key) {
            keys.insert(key.into(), value.clone());
        } else if let Some(old) = key.strip_suffix("_mla") {
            keys.insert(old.into(), value.clone());
        }
    }
    let mut tensors = Vec::new();
    for tensor in file.tensors().iter().filter(|tensor| !tensor.name.contains("attn_v_b")) {
        let layer = tensor.name.strip_suffix(".attn_k_b.weight").and_then(|layer| layer.strip_prefix("blk."));
        let (name, source) = match layer {
            Some(layer) => {
                let joint = format!("model.layers.{layer}.self_attn.kv_b_proj.weight");
                (format!("blk.{layer}.attn_kv_b.weight"), folder.tensor(&joint).expect("a matrix"))
            }
            None => (tensor.name.clone(), file.tensor(&tensor.name).expect("its own")),
        };
        let shape = source.info.shape.clone();
        if layer.is_some() && dtype != source.info.dtype {
            let mut bytes = vec![0; dtype.bytes_for(source.info.num_elements()).expect("whole blocks")];
            quant::encode(dtype, &values(&source), &mut bytes);
            tensors.push((NewTensor { name, dtype, shape }, bytes.into()));
        } else {
            tensors.push((NewTensor { name, dtype: source.info.dtype, shape }, source.bytes()));
        }
    }
    Checkpoint::in_memory("an old file", keys, tensors).expect("a model")
}

#[test]
fn old_files_of_latent_attention_give_the_same_logits() {
    let Some(backend) = cpu(exact_isa(), 2) else { return };
    for name in ["deepseek2-lite", "deepseek3"] {
        let all = goldens();
        let golden = all.iter().find(|golden| golden.name == name).expect("a golden");
        let prompt = &golden.prompts[1];
        let run = |checkpoint: &Checkpoint| {
            let mut runner = Runner::of(checkpoint, backend.clone(), None, 4, DType::F32);
            runner.prompt(prompt, &[prompt.len()], vec![0, 1])
        };
        let new = run(&Checkpoint::open(&golden.folder.join("model.gguf")).expect("a golden"));
        let old = run(&old_file_of_latents(golden, DType::BF16));
        assert_eq!(old, new, "{name}: logits of the old file");
        if name == "deepseek2-lite" {
            // Only the rounding of the matrix differs. Wrong maps would change logits as much as they vary.
            let old = run(&old_file_of_latents(golden, DType::Q8_0));
            let [differences, all] = [0.0, 1.0].map(|kept| {
                old.iter().zip(&new).map(|(old, new)| (old * (1.0 - kept) - new).powi(2)).sum::<f32>().sqrt()
            });
            assert!(differences > 0.0 && differences < 0.1 * all, "{differences} of {all}");
        }
    }
}

/// Copies a golden's folder, with one more tensor of one element.
fn with_tensor(golden: &str, name: &str, scratch: &Path) -> PathBuf {
    let (source, folder) = (goldens_folder().join(golden), scratch.join(name));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    std::fs::copy(source.join("config.json"), folder.join("config.json")).expect("a copy");
    let file = std::fs::read(source.join("model.safetensors")).expect("a golden");
    let header_len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let (header, data) = (&file[8..8 + header_len], &file[8 + header_len..]);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    header[name] = json!({ "dtype": "F32", "shape": [1], "data_offsets": [data.len(), data.len() + 4] });
    let header = header.to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data, &[0; 4]].concat();
    std::fs::write(folder.join("model.safetensors"), file).expect("a file");
    folder
}

#[test]
fn an_unused_tensor_is_reported_or_rejected() {
    let scratch = tempfile::tempdir().expect("a folder for the test");
    let known = "model.layers.0.self_attn.rotary_emb.inv_freq";
    let checkpoint = Checkpoint::open(&with_tensor("llama2", known, scratch.path())).expect("a folder");
    assert_eq!(GgufModel::new(&checkpoint).expect("a known tensor").left_out(), [known]);
    let checkpoint =
        Checkpoint::open(&with_tensor("llama2", "model.adapter.weight", scratch.path())).expect("a folder");
    let message = GgufModel::new(&checkpoint).expect_err("an unknown tensor").to_string();
    assert!(message.contains("model.adapter.weight"), "{message}");
}
