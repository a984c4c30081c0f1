//! `quantize` through the built program: folders and files in, GGUF files out.

use crate::support::Home;
use crate::support::tiny_model::{TEMPLATE, tiny_model};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/goldens").join(name)
}

/// The weights of a golden Llama (96 tokens) with a vocabulary of bytes, a few merges and a chat template.
fn byte_model(home: &Home) -> String {
    let folder = home.path().join("bytes");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama2").join(file), folder.join(file)).unwrap();
    }
    // Space, line end and most of ASCII: a piece for each embedding.
    let letters: String = ['Ġ', 'Ċ'].into_iter().chain('!'..='u').collect();
    let special = ["<s>", "</s>", "[turn]", "[end]"];
    let merges = [("h", "e"), ("Ġ", "t"), ("l", "l"), ("Ġt", "he"), ("ll", "o")];
    let pieces = special.iter().map(|piece| (*piece).to_owned()).chain(letters.chars().map(String::from));
    let pieces = pieces.chain(merges.iter().map(|(left, right)| format!("{left}{right}")));
    let vocabulary: Map<String, Value> = pieces.enumerate().map(|(id, piece)| (piece, json!(id))).collect();
    assert_eq!(vocabulary.len(), 96);
    let added = special.iter().enumerate();
    let added: Vec<Value> = added.map(|(id, piece)| json!({ "id": id, "content": piece, "special": true })).collect();
    let tokenizer = json!({
        "added_tokens": added, "normalizer": null, "post_processor": null, "decoder": { "type": "ByteLevel" },
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": merges.map(|(left, right)| [left, right]) },
    });
    let names = json!({ "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), names.to_string()).unwrap();
    folder.to_str().unwrap().to_owned()
}

fn path(home: &Home, name: &str) -> String {
    home.path().join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_folder_becomes_a_file_that_reads_and_answers_alike() {
    let home = Home::new();
    let (folder, file) = (byte_model(&home), path(&home, "bytes.gguf"));
    let ran = home.run(&["quantize", &folder, &file, "--type", "f32", "--json"]);
    let report: Value = serde_json::from_str(ran.ok()).unwrap();
    assert_eq!(report["notes"], json!([]), "{report}");
    assert!(ran.stderr.is_empty(), "{ran:?}");
    let tensors = report["tensors"].as_array().unwrap();
    let query = tensors.iter().find(|tensor| tensor["name"] == "blk.0.attn_q.weight").unwrap();
    assert_eq!((&query["from"], &query["to"]), (&json!("BF16"), &json!("F32")));
    assert!(tensors.iter().all(|tensor| tensor["relative_error"] == 0.0), "F32 holds every BF16: {report}");

    let inspect =
        |model: &str| -> Value { serde_json::from_str(home.run(&["inspect", model, "--json"]).ok()).unwrap() };
    let (before, after) = (inspect(&folder), inspect(&file));
    for key in ["context_tokens", "layers", "width", "heads", "kv_heads", "key_size", "vocabulary", "parameters"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    let ids =
        |model: &str| home.run_with_input(&["tokenize", model, "--special"], b"Hello the lot[end]").ok().to_owned();
    assert_eq!(ids(&folder), ids(&file));
    let reply =
        |model: &str| home.run(&["run", "Hello there", "-m", model, "-n", "30", "--temperature", "0"]).ok().to_owned();
    assert_eq!(reply(&folder), reply(&file));
}

/// A file samples as its folder does.
#[test]
fn the_recommended_sampling_options_are_written() {
    let home = Home::new();
    let (folder, file) = (byte_model(&home), path(&home, "sampled.gguf"));
    let config = json!({ "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "typical_p": 0.9 });
    std::fs::write(Path::new(&folder).join("generation_config.json"), config.to_string()).unwrap();
    let ran = home.run(&["quantize", &folder, &file, "--type", "f32", "--json"]);
    let report: Value = serde_json::from_str(ran.ok()).unwrap();
    assert_eq!(report["notes"], json!(["the recommended typical_p is not written to the file"]), "{report}");
    let chain = "[recommended by the model: repetition_penalty 1.1, temperature 0.6, top_k 20, top_p 0.95, draw]";
    let ran = home.run(&["run", "Hello there", "-m", &file, "-n", "3"]);
    assert!(ran.stderr.contains(chain), "{ran:?}");
}

#[test]
fn a_folder_without_a_tokenizer_is_written_and_told() {
    let home = Home::new();
    let file = path(&home, "out.gguf");
    let ran = home.run(&["quantize", golden("llama2").to_str().unwrap(), &file, "--type", "q8_0"]);
    let table = ran.ok();
    assert!(ran.stderr.starts_with("note: the folder has no tokenizer.json, so the file has no vocabulary"), "{ran:?}");
    for line in ["token_embd.weight", "blk.1.ffn_down.weight", "output.weight"] {
        assert!(table.lines().any(|found| found.starts_with(line)), "no line {line:?} in\n{table}");
    }
    assert!(table.contains("BF16 > Q8_0") && table.contains("BF16 > F32"), "{table}");
    assert!(home.run(&["run", "hi", "-m", &file]).error().contains("no tokenizer"));
    // Once more, from the file: in its norms nothing is left to round.
    let again = path(&home, "again.gguf");
    let ran = home.run(&["quantize", &file, &again, "--type", "q4_0"]);
    assert!(ran.usage().contains("use a model in F32, F16 or BF16, or --requantize"), "{ran:?}");
    home.run(&["quantize", &file, &again, "--type", "q4_0", "--requantize"]).ok();
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_nothing() {
    let home = Home::new();
    let taken = path(&home, "taken.gguf");
    std::fs::write(&taken, "mine").unwrap();
    let free = path(&home, "free.gguf");
    let letters = tiny_model(&home, None);
    let folder = |name: &str| golden(name).to_str().unwrap().to_owned();
    for (model, out, expected) in [
        (folder("xglm"), &free, "xglm models have no GGUF form"),
        (folder("gemma2"), &free, "the attention scale is 0.20412414, but would be read as 0.25"),
        (folder("deepseek2"), &free, "attention times 0.837195, but would be read as"),
        (folder("granite-hybrid-groups"), &free, "norms over 64, time steps"),
        (folder("gptq"), &free, "is Q4_0 already: use a model in F32, F16 or BF16, or --requantize"),
        (folder("gptq-act"), &free, "is GPTQ 8-bit already: use a model in F32, F16 or BF16, or --requantize"),
        (letters, &free, "the tokenizer has no GGUF form: it merges characters, and has no byte tokens"),
        (byte_model(&home), &taken, "exists already"),
    ] {
        let ran = home.run(&["quantize", &model, out, "--type", "q8_0"]);
        let is_usage = expected == "exists already" || expected.ends_with("--requantize");
        let message = if is_usage { ran.usage() } else { ran.error() };
        assert!(message.contains(expected), "{ran:?}");
    }
    assert!(!Path::new(&free).exists() && !Path::new(&free).with_extension("part").exists());
    // The integers and the scales of this folder are those of the format.
    home.run(&["quantize", &folder("gptq"), &free, "--type", "q4_0"]).ok();
    assert_eq!(std::fs::read_to_string(&taken).unwrap(), "mine");
}
