//! Models that must not load: each damaged in one place, refused with a message that names the place.

use std::path::{Path, PathBuf};

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_model::{Decoder, LoadOptions};
use pellucid_testing::{cpu, goldens_folder};
use serde_json::{Value, json};

/// A copy of a golden's folder with its configuration changed.
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

fn refusal(path: &Path, context_len: Option<usize>) -> String {
    let backend = cpu(Isa::Scalar, 1).expect("scalar is always there");
    let load = || -> Result<Decoder, String> {
        let checkpoint = Checkpoint::open(path).map_err(|error| error.to_string())?;
        let options = LoadOptions { context_len };
        Decoder::load(&checkpoint, backend, options, &mut |_, _| ()).map_err(|error| error.to_string())
    };
    load().map(|_| ()).expect_err("the model is refused")
}

#[test]
fn settings_that_cannot_be_are_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change, &[&str]); 16] = [
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
        ("mistral", "window", |c| c["sliding_window"] = json!(0), &["sliding window"]),
        ("mixtral", "experts", |c| c["num_experts_per_tok"] = json!(5), &["experts used", "1 to 4"]),
        ("gpt2", "switch", |c| c["scale_attn_weights"] = json!(false), &["scale_attn_weights"]),
    ];
    for (golden, name, change, expected) in cases {
        let message = refusal(&altered(golden, name, change), None);
        for part in expected {
            assert!(message.contains(part), "{golden}, {name}: \"{message}\" does not name {part}");
        }
    }
}

#[test]
fn a_longer_context_than_the_model_was_made_for_is_refused_with_both_numbers() {
    let message = refusal(&goldens_folder().join("llama2"), Some(257));
    assert!(message.contains("257") && message.contains("256"), "{message}");
}
