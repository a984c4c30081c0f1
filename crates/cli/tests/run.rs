//! `run` and `perplexity` through the built program, on a tiny random model with a vocabulary of single characters.

mod support;

use serde_json::{Map, json};
use std::path::Path;
use support::Home;

const CHARACTERS: &str = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-+*/=%&#@$^~|_\n<>";

/// A folder with the golden Llama's weights (96 tokens), a tokenizer, and optionally a chat template.
fn model(home: &Home, template: Option<&str>) -> String {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testing/fixtures/goldens/llama2");
    let folder = home.path().join("model");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(golden.join(file), folder.join(file)).unwrap();
    }
    let special = ["<unk>", "<s>", "</s>", "[turn]", "[end]"];
    let mut vocabulary = Map::new();
    let pieces = special.iter().map(|piece| piece.to_string()).chain(CHARACTERS.chars().map(String::from));
    for (id, piece) in pieces.enumerate() {
        vocabulary.insert(piece, json!(id));
    }
    assert!(vocabulary.len() <= 96, "{} tokens for a model of 96", vocabulary.len());
    let added: Vec<_> = (special.iter().enumerate())
        .map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    let space = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": space(" ", "▁"), "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [space("▁", " "), { "type": "Fuse" }] },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                   "vocab": vocabulary, "merges": [] },
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    if let Some(template) = template {
        std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    }
    folder.to_str().unwrap().to_owned()
}

const TEMPLATE: &str = "{% for m in messages %}[turn]{{ m.role }}: {{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[turn]{% endif %}";

#[test]
fn the_same_request_gives_the_same_reply_whatever_computes_it() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let run = |more: &[&str]| {
        let base = ["run", "Hello there", "--model", &model, "-n", "40", "--temperature", "1.5"];
        home.run(&[&base, more].concat()).ok().to_owned()
    };
    let first = run(&["--seed", "7"]);
    assert!(first.trim().len() > 1, "a reply: {first:?}");
    assert_eq!(first, run(&["--seed", "7", "--threads", "1"]));
    assert_eq!(first, run(&["--seed", "7", "--threads", "3"]));
    let others: Vec<String> = ["8", "9", "10"].iter().map(|seed| run(&["--seed", seed])).collect();
    assert!(others.iter().any(|other| *other != first), "other seeds give other replies");
}

#[test]
fn the_last_line_counts_and_times() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let ran = home.run(&["run", "Hi", "--model", &model, "-n", "5", "--temperature", "1", "--seed", "3"]);
    let line = ran.stderr.trim().to_owned();
    // [turn] user: Hi [end] [turn]: four control tokens would be wrong, and so would a missing one.
    assert!(line.starts_with("[11 prompt tokens, "), "{line}");
    assert!(line.contains(" output tokens, first ") && line.contains("seed 3"), "{line}");
}

#[test]
fn message_text_is_not_read_as_control_tokens() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let ran = home.run(&["run", "[end]", "--model", &model, "-n", "1"]);
    // Three control tokens of the template, "user: ", and five characters of the message, two of them unknown brackets.
    assert!(ran.stderr.starts_with("[14 prompt tokens, "), "{}", ran.stderr);
}

#[test]
fn the_prompt_may_come_from_a_pipe() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let piped = home.run_with_input(&["run", "--model", &model, "-n", "6"], b"Hello there");
    assert_eq!(piped.ok(), home.run(&["run", "Hello there", "--model", &model, "-n", "6"]).ok());
}

#[test]
fn without_a_template_the_reply_continues_the_prompt() {
    let home = Home::new();
    let model = model(&home, None);
    let ran = home.run(&["run", "Once upon", "--model", &model, "-n", "4"]);
    assert!(ran.ok().starts_with("Once upon"), "{ran:?}");
    assert!(ran.stderr.contains("no chat template"), "{ran:?}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let long = "a".repeat(300);
    let cases: [(&[&str], &str); 8] = [
        (&["run", "hi", "--temperature", "-1"], "temperature"),
        (&["run", "hi", "--temperature", "nan"], "temperature"),
        (&["run", "  "], "the prompt is empty"),
        (&["run", "hi", "--context", "9999"], "9999"),
        (&["run", &long], "256"),
        (&["run", "hi", "--cpu-isa", "mmx"], "mmx"),
        (&["run", "hi", "-n", "0"], "0"),
        (&["run", "hi", "--raw", "--system", "x"], "--system"),
    ];
    for (args, expected) in cases {
        let ran = home.run(&[args, &["--model", &model]].concat());
        assert!(ran.status != Some(0) && ran.stderr.contains(expected), "{args:?}: {ran:?}");
    }
}

#[test]
fn perplexity_of_a_text() {
    let home = Home::new();
    let model = model(&home, None);
    let text = "it was the best of times it was the worst of times ".repeat(4);
    let file = home.path().join("text.txt");
    std::fs::write(&file, &text).unwrap();
    let file = file.to_str().unwrap();
    let measure = |more: &[&str]| -> serde_json::Value {
        let args = [&["perplexity", &model, file, "--json", "--window", "64"], more].concat();
        serde_json::from_str(home.run(&args).ok()).unwrap()
    };
    let result = measure(&[]);
    assert_eq!((result["windows"].as_u64(), result["scored_tokens"].as_u64()), (Some(3), Some(3 * 63)));
    assert!(result["perplexity"].as_f64().unwrap() > 1.0);
    assert_eq!(result, measure(&["--threads", "1"]));
    let short = home.run(&["perplexity", &model, file, "--window", "250"]);
    assert!(short.error().contains("204 tokens, fewer than one window of 250"), "{short:?}");
}
