//! `inspect` and `tokenize` through the built program, on files made here and on the golden fixtures.

use crate::support::gguf::{Gguf, byte_vocabulary};
use crate::support::{Home, Ran};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A home with the byte-level vocabulary as `v.gguf`.
fn with_vocabulary() -> (Home, String) {
    let home = Home::new();
    let path = home.path().join("v.gguf");
    std::fs::write(&path, byte_vocabulary().bytes()).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (home, path)
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/goldens").join(name)
}

fn inspect_json(path: &Path, more: &[&str]) -> Value {
    let args = [&["inspect", path.to_str().unwrap(), "--json"], more].concat();
    serde_json::from_str(Home::new().run(&args).ok()).unwrap()
}

#[test]
fn ids_of_the_text_alone() {
    let (home, model) = with_vocabulary();
    let ids = |text: &str| home.run_with_input(&["tokenize", &model], text.as_bytes()).ok().to_owned();
    assert_eq!(ids("hello hello"), "259 260\n");
    assert_eq!(ids("hey\n"), "256 121 10\n");
    assert_eq!(ids("é"), "195 169\n");
    assert_eq!(ids(""), "\n");
    // A control token's name is plain text here, and nothing is prepended.
    assert_eq!(ids("<|end|>"), "60 124 101 110 100 124 62\n");
    let special = home.run_with_input(&["tokenize", &model, "--special"], b"hello<|end|>");
    assert_eq!(special.ok(), "261 259 262\n");
}

#[test]
fn tokens_in_json() {
    let (home, model) = with_vocabulary();
    let ran = home.run_with_input(&["tokenize", &model, "--json", "--special"], " hello\u{1f600}".as_bytes());
    let tokens: Value = serde_json::from_str(ran.ok()).unwrap();
    assert_eq!(tokens[0], json!({ "id": 261, "text": "<s>", "piece": "<s>", "bytes": b"<s>", "kind": "control" }));
    assert_eq!(
        tokens[1],
        json!({ "id": 260, "text": " hello", "piece": "Ġhello", "bytes": b" hello", "kind": "normal" })
    );
    let bytes: Vec<_> = (2..6).map(|index| tokens[index]["bytes"][0].as_u64().unwrap()).collect();
    assert_eq!(bytes, [0xf0, 0x9f, 0x98, 0x80]);
}

#[test]
fn decoding_gives_every_byte_back() {
    let (home, model) = with_vocabulary();
    let decode = |ids: &str| home.run_with_input(&["tokenize", &model, "--decode"], ids.as_bytes());
    let all: Vec<u8> = (0..=255).collect();
    let ids: Vec<_> = all.iter().map(u8::to_string).collect();
    assert_eq!(decode(&ids.join(" ")).stdout, all);
    assert_eq!(decode("[259, 260]\n").ok(), "hello hello");
    assert_eq!(decode("").ok(), "");
    let text = "A thé, 你好 🙂\r\n\t<|end|>  \0x";
    let ids = home.run_with_input(&["tokenize", &model], text.as_bytes());
    assert_eq!(decode(ids.ok()).ok(), text);
    assert!(decode("1 263").usage().contains("the id 263 is outside the vocabulary, which has 263 tokens"));
    assert!(decode("1 x").usage().contains("`x` is not a token id"));
}

#[test]
fn input_that_is_not_utf8_is_told_with_its_offset() {
    let (home, model) = with_vocabulary();
    let ran = home.run_with_input(&["tokenize", &model], b"ab\xc3\xa9\xff\xfe");
    assert!(ran.usage().contains("0xff at offset 4"), "{ran:?}");
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let (home, model) = with_vocabulary();
    for flag in ["--special", "--json"] {
        let mut child = home.command(&["tokenize", &model, flag]).stdin(Stdio::piped()).spawn().unwrap();
        // The program reads all of its input before it writes, so the reader is surely gone by then.
        drop(child.stdout.take());
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, &b"hey ".repeat(100_000)).unwrap();
        drop(stdin);
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!((ran.status, ran.stderr.as_str()), (Some(0), ""));
    }
}

#[test]
fn inspect_shows_kinds_of_layers_and_their_memory() {
    let number = |config: &Value, key: &str| config[key].as_u64().unwrap_or_else(|| panic!("{key} of {config}"));
    let config = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(golden(name).join("config.json")).unwrap()).unwrap()
    };
    let text = |name: &str| Home::new().run(&["inspect", golden(name).to_str().unwrap()]).ok().to_owned();
    let has_line = |text: &str, line: &str| assert!(text.lines().any(|found| found == line), "no {line:?} in\n{text}");

    // Delta nets: three positions of the convolution over queries, keys and values, and a matrix for each value head.
    let numbers = config("qwen35-text");
    let count = |kind: &str| numbers["layer_types"].as_array().unwrap().iter().filter(|layer| *layer == kind).count();
    let [attention, delta_nets] = ["full_attention", "linear_attention"].map(count);
    let of = |key: &str| number(&numbers, &format!("linear_{key}"));
    let (keys, values) = (of("num_key_heads") * of("key_head_dim"), of("num_value_heads") * of("value_head_dim"));
    let matrices = of("num_value_heads") * of("key_head_dim") * of("value_head_dim");
    let bytes = 4 * delta_nets as u64 * ((of("conv_kernel_dim") - 1) * (2 * keys + values) + matrices);
    let report = inspect_json(&golden("qwen35-text"), &[]);
    assert_eq!(report["state_bytes"], bytes);
    let kinds = json!([
        { "kind": "with attention", "layers": attention }, { "kind": "with a gated delta net", "layers": delta_nets }
    ]);
    assert_eq!(report["layer_kinds"], kinds);
    assert_eq!(report["latent_attention"], Value::Null);
    let shown = text("qwen35-text");
    has_line(&shown, &format!("                {delta_nets} with a gated delta net"));
    assert!(shown.contains("\nrecurrent state\n  a sequence    "), "{shown}");

    let numbers = config("deepseek3");
    let (rank, rotary) = (number(&numbers, "kv_lora_rank"), number(&numbers, "qk_rope_head_dim"));
    let report = inspect_json(&golden("deepseek3"), &[]);
    assert_eq!(report["latent_attention"]["row_size"], rank + rotary);
    assert_eq!((&report["state_bytes"], &report["layer_kinds"]), (&json!(0), &json!([])));
    assert_eq!(report["experts"], number(&numbers, "n_routed_experts"));
    let layers = number(&numbers, "num_hidden_layers");
    assert_eq!(report["kv_memory"]["bytes_per_token"], layers * (rank + rotary) * 2, "one row of F16 in each layer");
    let row = rank + rotary;
    has_line(
        &text("deepseek3"),
        &format!("latents         {row} values a token in a layer, {rotary} of them rotated, for all heads"),
    );

    // Models of these families without experts have a key for them, which is 0.
    let report = inspect_json(&golden("granite-hybrid"), &[]);
    assert_eq!(report["experts"], Value::Null);
    assert!(!text("granite-hybrid").contains("experts"));
}

#[test]
fn inspect_counts_windows_as_the_cpu_keeps_them() {
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("gemma3").join("config.json")).unwrap()).unwrap();
    let number = |key: &str| config[key].as_u64().unwrap();
    let layers = config["layer_types"].as_array().unwrap();
    let windowed = layers.iter().filter(|layer| *layer == "sliding_attention").count() as u64;
    let (window, context, batch) = (number("sliding_window"), number("sliding_window") + 40, 3);
    let of_layer = 2 * 2 * number("num_key_value_heads") * number("head_dim");
    let words = ["--context", &context.to_string(), "--batch", &batch.to_string()];
    let report = &inspect_json(&golden("gemma3"), &words)["kv_memory"];
    assert_eq!(report["bytes"], batch * of_layer * layers.len() as u64 * context);
    assert_eq!(report["windows"]["layers"], windowed);
    assert_eq!(report["windows"]["tokens"], window);
    let bytes = batch * of_layer * ((layers.len() as u64 - windowed) * context + windowed * window);
    assert_eq!(report["windows"]["bytes_on_cpu"], bytes);
    let text = Home::new().run(&["inspect", golden("gemma3").to_str().unwrap()]).ok().to_owned();
    let end = format!("{windowed} of {} layers keep their last {window} tokens", layers.len());
    assert!(text.lines().any(|line| line.starts_with("  on the CPU    ") && line.ends_with(&end)), "{end}\n{text}");
    assert_eq!(inspect_json(&golden("llama3"), &[])["kv_memory"]["windows"], Value::Null);
}

#[test]
fn inspect_shows_the_formula_and_what_it_comes_to() {
    let home = Home::new();
    let path = home.path().join("m.gguf");
    let model = byte_vocabulary()
        .str("general.name", "A \u{1b}[31mname")
        .str("tokenizer.chat_template", "{{ messages }}")
        .u32("llama.block_count", 3)
        .u32("llama.attention.head_count", 8)
        .u32("llama.attention.head_count_kv", 2)
        .u32("llama.embedding_length", 128)
        .u32("llama.context_length", 1000)
        .tensor("a", &[6, 5])
        .tensor("b", &[7]);
    std::fs::write(&path, model.bytes()).unwrap();
    let model = path.to_str().unwrap();

    let ran = home.run(&["inspect", model, "hello hello", "--tensors", "--batch", "4"]);
    let text = ran.ok();
    for line in [
        "name            A \\u{1b}[31mname",
        "architecture    llama",
        "parameters      37 (37)",
        "vocabulary      263 tokens",
        "context         1,000 tokens",
        "layers          3, 128 wide",
        "heads           8 query, 2 key/value, 16 values each",
        "chat template   yes",
        "special ids         261  begin        <s>",
        "prepended ids   261",
        "                = 2 x 3 layers x 2 heads x 16 numbers x 2 bytes",
        "  a token       384 bytes",
        "  in all        1.5 MB (1,536,000 bytes)",
        "                = 4 sequences of 1,000 tokens",
        "     259  hello                           68 65 6c 6c 6f",
        "     260  ␣hello                          20 68 65 6c 6c 6f",
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line:?} in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains('\u{1b}'));

    let json = inspect_json(&path, &["--context", "100", "--kv-type", "f32"]);
    assert_eq!(json["kv_memory"]["bytes_per_token"], 2 * 3 * 2 * 16 * 4);
    assert_eq!(json["kv_memory"]["bytes"], 2 * 3 * 2 * 16 * 4 * 100);
    assert_eq!(json["tensor_types"], json!([{ "type": "F32", "tensors": 2, "parameters": 37, "bytes": 148 }]));
    assert_eq!(json["special_ids"][1], json!({ "for": "end", "id": 262, "piece": "<|end|>" }));
    let ran = home.run(&["inspect", model, "--kv-type", "q8_0"]);
    assert!(ran.usage().contains("heads of a multiple of 32 values, but this model's have 16"), "{ran:?}");
    let ran = home.run(&["inspect", model, "--context", "18446744073709551615", "--batch", "2"]);
    assert!(ran.usage().contains("more than 2^64 bytes"), "{ran:?}");
}

#[test]
fn inspect_takes_a_vocabulary_alone_and_a_model_without_one() {
    let (home, model) = with_vocabulary();
    assert!(home.run(&["inspect", &model]).ok().contains("a vocabulary and no weights"));
    let path = home.path().join("bare.gguf");
    std::fs::write(&path, Gguf::default().str("general.architecture", "llama").tensor("a", &[2]).bytes()).unwrap();
    let path = path.to_str().unwrap();
    assert!(home.run(&["inspect", path]).ok().contains("parameters      2 (2)"));
    home.run(&["inspect", path, "some text"]).error();
    home.run_with_input(&["tokenize", path], b"x").error();
}

#[test]
fn both_formats_of_a_golden_model_read_alike() {
    for name in ["llama3", "qwen3-moe", "gpt2", "gemma2", "phi3"] {
        let folder = golden(name);
        let (tensors, gguf) = (inspect_json(&folder, &[]), inspect_json(&folder.join("model.gguf"), &[]));
        for key in
            ["context_tokens", "layers", "width", "heads", "kv_heads", "key_size", "value_size", "kv_memory", "experts"]
        {
            assert_eq!(tensors[key], gguf[key], "{name}: {key}");
        }
        assert!(tensors["kv_memory"]["bytes_per_token"].as_u64().unwrap() > 0, "{name}");
    }
}

#[test]
fn numbers_have_other_names_in_other_families() {
    // XGLM says num_layers, attention_heads and d_model.
    let (report, config) =
        (inspect_json(&golden("xglm"), &[]), std::fs::read(golden("xglm").join("config.json")).unwrap());
    let config: Value = serde_json::from_slice(&config).unwrap();
    for (ours, theirs) in [("layers", "num_layers"), ("heads", "attention_heads"), ("width", "d_model")] {
        assert!(
            report[ours].is_u64() && report[ours] == config[theirs],
            "{ours}: {} and {}",
            report[ours],
            config[theirs]
        );
    }
}

#[test]
fn damaged_files_are_sentences() {
    let (home, model) = with_vocabulary();
    let whole = std::fs::read(&model).unwrap();
    let path = home.path().join("cut.gguf");
    for len in [0, 3, 8, 20, 100, whole.len() / 2] {
        std::fs::write(&path, &whole[..len]).unwrap();
        for command in ["inspect", "tokenize"] {
            assert!(home.run(&[command, path.to_str().unwrap()]).error().contains("cut.gguf"), "{command} at {len}");
        }
    }
    // Numbers that no model has must not become memory or a wrong product.
    for key in ["llama.block_count", "llama.attention.head_count", "llama.attention.key_length"] {
        let absurd = byte_vocabulary().u32("llama.embedding_length", 64).u32(key, u32::MAX).bytes();
        std::fs::write(&path, absurd).unwrap();
        let ran = home.run(&["inspect", path.to_str().unwrap()]);
        assert!(matches!(ran.status, Some(0 | 1)) && !ran.stderr.contains("error: internal error"), "{key}: {ran:?}");
    }
    let zero = byte_vocabulary().u32("llama.embedding_length", 64).u32("llama.attention.head_count", 0).bytes();
    std::fs::write(&path, zero).unwrap();
    home.run(&["inspect", path.to_str().unwrap()]).ok();
}

#[test]
fn usage_errors_and_help() {
    let home = Home::new();
    for args in
        [&[][..], &["fly"], &["inspect"], &["tokenize", "m", "--decode", "--json"], &["inspect", "m", "--batch", "0"]]
    {
        let ran = home.run(args);
        assert_eq!(ran.status, Some(2), "{args:?}: {ran:?}");
        assert!(ran.stdout.is_empty(), "{args:?}");
    }
    assert_eq!(home.run(&["--version"]).ok(), format!("pellucid {}\n", env!("CARGO_PKG_VERSION")));
    for command in ["", "run", "pull", "list", "rm", "inspect", "tokenize", "perplexity", "explain", "quantize"] {
        for flag in ["-h", "--help"] {
            let args: Vec<_> = [command, flag].into_iter().filter(|word| !word.is_empty()).collect();
            let help = home.run(&args);
            assert!(help.ok().contains("Usage: pellucid"), "{help:?}");
            assert!(help.ok().lines().all(|line| line.chars().count() <= 80), "{}", help.ok());
        }
    }
}

#[test]
fn tokens_are_shown_as_text_and_not_as_letters_of_byte_pairs() {
    let (home, model) = with_vocabulary();
    let table = home.run(&["inspect", &model, " hello\u{1f600}\n"]).ok().to_owned();
    assert!(table.contains("     260  ␣hello ") && table.contains("  \\xf0 "), "{table}");
    assert!(table.contains("  ⏎ ") && !table.contains(['Ġ', 'Ċ', 'ð']), "{table}");
}

#[test]
fn encoders_say_what_they_compute() {
    let encoder = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/encoders").join(name);
    for name in ["bert", "modern-bert", "nomic-bert"] {
        let report = inspect_json(&encoder(name), &[]);
        assert!(report["computes"].as_str().unwrap().starts_with("vectors of 48 values"), "{report}");
        assert_eq!((&report["cannot_run"], &report["kv_memory"]), (&Value::Null, &Value::Null));
        let path = encoder(name);
        let text = Home::new().run(&["inspect", path.to_str().unwrap()]).ok().to_owned();
        assert!(text.contains("computes        vectors of 48 values") && !text.contains("KV memory"), "{text}");
    }
}
