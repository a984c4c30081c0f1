//! Hugging Face folders converted to GGUF: the same tensors and keys as llama.cpp's converter, and the same logits as
//! the folder.

use std::path::{Path, PathBuf};

use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Source, TensorView, write_converted};
use pellucid_model::{GgufModel, Model};
use pellucid_selftest::{Golden, Runner, goldens, goldens_folder};
use pellucid_tensor::{RopeStyle, quant};
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

/// Converts a folder to a GGUF file without changing the formats of its tensors.
fn convert(folder: &Path, scratch: &Path) -> PathBuf {
    let checkpoint = Checkpoint::open(folder).expect("a folder");
    let model = GgufModel::new(&checkpoint).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let whole = model.checkpoint().expect("a model in memory");
    let tensors: Vec<NewTensor> = (whole.tensors().iter())
        .map(|tensor| NewTensor { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() })
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
    quant::decode(tensor.info.dtype, &tensor.bytes, &mut values);
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
            let slack = if tensor.name == "rope_freqs.weight" { 1e-6 } else { 0.0 };
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
                let style = match &runner.model.config().positions {
                    pellucid_model::Positions::Rope { style, .. } => Some(*style),
                    _ => None,
                };
                (runner.prompt(prompt, &[prompt.len()], vec![0, 1]), style)
            });
            let [(folder, _), (file, style)] = &mut logits;
            if *style == Some(RopeStyle::Interleaved) {
                // The values of a head are reordered, and so are the sums over them.
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
fn a_model_that_gguf_cannot_express_is_rejected_by_name() {
    let cases = [
        ("xglm", &["xglm", "no GGUF form"][..]),
        ("gemma2", &["gemma2", "the attention scale"]),
        ("gemma3-old", &["gemma3", "the attention scale"]),
        ("qwen2-window", &["qwen2", "the window of layer 1 is 8 positions", "read as none"]),
        ("qwen3-moe-mixed", &["qwen3-moe", "the MLP of layer 1 is one dense MLP"]),
        ("smollm3-list", &["smollm3", "the window of layer 0 is 8 positions", "read as none"]),
        ("glm4-moe-groups", &["glm4-moe", "expert_group_count", "does not read it"]),
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
