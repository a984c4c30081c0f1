//! A folder's tokenizer, written as the keys of a GGUF file, gives the same ids, or notes how it differs.

use std::collections::HashMap;
use std::path::Path;

use pellucid_checkpoint::{Checkpoint, HuggingFace, Metadata, Source};
use pellucid_tokenizer::{Tokenizer, write_gguf};
use serde_json::{Value, json};

use crate::common;

/// Writes the keys and reads them back; returns the tokenizer, the keys and the notes.
fn written(folder: &HuggingFace, vocab_size: usize) -> Result<(Tokenizer, Metadata, Vec<String>), String> {
    let mut metadata = Metadata::default();
    let notes = write_gguf(folder, vocab_size, &mut metadata).map_err(|error| error.to_string())?;
    let tokenizer = Tokenizer::from_gguf(&metadata).map_err(|error| error.to_string())?;
    Ok((tokenizer, metadata, notes))
}

fn texts() -> Vec<String> {
    let path = format!("{}/fixtures/tokenizers/texts.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Whether a text contains a token with options that the keys cannot express; the notes name these tokens.
fn has_noted_token(text: &str) -> bool {
    ["<|lstrip|>", "<|rstrip|>", "day", "<mask>", "title", "pfel"].iter().any(|piece| text.contains(piece))
}

#[test]
fn written_keys_give_the_same_ids() {
    let mut compared = 0;
    for family in ["gpt2", "smollm", "llama3", "qwen2", "gpt-4o", "deepseek-v3", "gemma", "llama2"] {
        let folder = common::fixture(family);
        let original = Tokenizer::from_hugging_face(&folder).unwrap();
        let (file, _, notes) = written(&folder, original.vocab_size()).unwrap();
        assert!(notes.iter().any(|note| note.contains("of 3 tokens")), "{family}: {notes:?}");
        assert_eq!((file.prefix(), file.suffix()), (original.prefix(), original.suffix()), "{family}");
        for text in texts().iter().filter(|text| !has_noted_token(text)) {
            assert_eq!(file.encode(text), original.encode(text), "{family}: {text:?}");
            let ids = original.encode_special(text);
            assert_eq!(file.encode_special(text), ids, "{family}: {text:?}");
            assert_eq!(file.decode(&ids, false), original.decode(&ids, false), "{family}: {text:?}");
            compared += 1;
        }
    }
    assert!(compared > 500, "only {compared} texts were compared");
}

#[test]
fn a_folder_without_an_end_token_is_noted() {
    for (family, expected) in [("gpt2", "neither the folder nor the file"), ("llama2", "uses \"</s>\"")] {
        let mut folder = common::fixture(family);
        // The reader would recognize this piece as an end-of-turn token.
        folder.tokenizer = folder.tokenizer.map(|text| text.replace("<|end|>", "<|over|>"));
        let (_, _, notes) = written(&folder, 1000).unwrap();
        assert!(notes.iter().any(|note| note.contains(expected)), "{family}: {notes:?}");
    }
}

#[test]
fn a_space_before_the_first_text_alone_is_noted() {
    let folder = common::fixture("mistral");
    let original = Tokenizer::from_hugging_face(&folder).unwrap();
    let (file, _, notes) = written(&folder, original.vocab_size()).unwrap();
    assert!(notes.iter().any(|note| note.contains("at the beginning of a text")), "{notes:?}");
    assert_eq!(file.encode("Hello world"), original.encode("Hello world"));
}

#[test]
fn tokenizers_without_a_gguf_form_are_rejected() {
    let cases = [
        ("xglm", "Unigram"),
        ("foreign", "pre-tokenizer"),
        ("falcon", "pre-tokenizer"),
        ("gpt2-prefix-space", "inserts a space before every text"),
    ];
    for (family, expected) in cases {
        let error = written(&common::fixture(family), 2000).map(|_| ()).unwrap_err();
        assert!(error.contains("no GGUF form") && error.contains(expected), "{family}: {error}");
    }
}

#[test]
fn the_table_of_tokens_is_as_long_as_that_of_embeddings() {
    let folder = common::fixture("llama3");
    let original = Tokenizer::from_hugging_face(&folder).unwrap();
    let (longer, metadata, _) = written(&folder, original.vocab_size() + 5).unwrap();
    assert_eq!(longer.vocab_size(), original.vocab_size() + 5);
    let last = metadata.strings("tokenizer.ggml.tokens").unwrap().get(original.vocab_size() + 4);
    assert_eq!(last, Some(format!("[PAD{}]", original.vocab_size() + 4).as_str()));
    assert_eq!(
        longer.encode(&format!("[PAD{}]", original.vocab_size())),
        original.encode(&format!("[PAD{}]", original.vocab_size()))
    );
    let (shorter, _, notes) = written(&folder, original.vocab_size() - 1).unwrap();
    assert_eq!(shorter.vocab_size(), original.vocab_size() - 1);
    assert!(notes.iter().any(|note| note.contains("no embedding for 1 of its tokens")), "{notes:?}");
}

#[test]
fn ids_that_end_a_turn_and_the_template_are_kept() {
    let mut folder = common::fixture("llama3");
    let id = |name: &str| Tokenizer::from_hugging_face(&common::fixture("llama3")).unwrap().id_of(name).unwrap();
    folder.tokenizer_config = Some(json!({ "eos_token": "<|end|>", "bos_token": "<|start|>", "pad_token": "<|end|>" }));
    folder.generation_config = Some(json!({ "eos_token_id": [id("<|lstrip|>"), id("<|end|>")] }));
    folder.chat_template = Some("{{ messages[0].content }}<|end|>".into());
    let (file, metadata, _) = written(&folder, 2000).unwrap();
    assert_eq!(file.end_ids(), [id("<|end|>"), id("<|lstrip|>")]);
    assert_eq!((file.bos(), file.padding()), (Some(id("<|start|>")), Some(id("<|end|>"))));
    assert_eq!(metadata.opt_str("tokenizer.chat_template").unwrap(), folder.chat_template.as_deref());
}

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn cuts(patterns: &[&str]) -> Value {
    let split = |pattern: &&str| {
        let pattern = json!({ "Regex": pattern });
        json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false })
    };
    let mut steps: Vec<Value> = patterns.iter().map(split).collect();
    steps.push(json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false }));
    json!({ "type": "Sequence", "pretokenizers": steps })
}

/// Returns the stages around a published model's vocabulary, as in its tokenizer.json.
fn published_parts(name: &str) -> Option<Value> {
    let gpt2 = json!({ "type": "ByteLevel", "add_prefix_space": false });
    let digits = json!({ "type": "Digits", "individual_digits": true });
    Some(match name {
        "gpt-2" => json!({ "pre_tokenizer": gpt2 }),
        "mpt" => json!({ "pre_tokenizer": gpt2, "normalizer": { "type": "NFC" } }),
        "llama-bpe" => json!({ "pre_tokenizer": cuts(&[LLAMA3]), "ignore_merges": true }),
        "qwen2" => json!({ "pre_tokenizer": cuts(&[QWEN2]), "normalizer": { "type": "NFC" } }),
        "starcoder" | "refact" => {
            json!({ "pre_tokenizer": { "type": "Sequence", "pretokenizers": [digits, gpt2] } })
        }
        "deepseek-coder" => {
            json!({ "pre_tokenizer": cuts(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", r"\p{N}"]) })
        }
        "llama-spm" => json!({ "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] } }),
        _ => return None,
    })
}

/// Rebuilds the tokenizer.json of a vocabulary of the conformance data, as far as it affects ids.
fn as_folder(metadata: &Metadata, parts: Value) -> HuggingFace {
    let tokens: Vec<&str> = metadata.strings("tokenizer.ggml.tokens").unwrap().iter().collect();
    let kinds = metadata.i32s("tokenizer.ggml.token_type").unwrap();
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, piece)| ((*piece).to_owned(), json!(id))).collect();
    let added: Vec<Value> = (0..tokens.len())
        .filter(|&id| matches!(kinds[id], 2..=4))
        .map(|id| json!({ "id": id, "content": tokens[id], "special": kinds[id] != 4, "normalized": false }))
        .collect();
    let mut model = json!({ "type": "BPE", "vocab": vocab, "ignore_merges": parts["ignore_merges"] });
    if metadata.str("tokenizer.ggml.model").unwrap() == "llama" {
        model["byte_fallback"] = json!(true);
        model["unk_token"] = json!("<unk>");
        model["merges"] = sentencepiece_merges(&tokens, &kinds, &metadata.f32s("tokenizer.ggml.scores").unwrap());
    } else {
        let merges = metadata.strings("tokenizer.ggml.merges").unwrap();
        model["merges"] = merges.iter().map(Value::from).collect();
    }
    let root = json!({ "model": model, "added_tokens": added, "pre_tokenizer": parts["pre_tokenizer"],
                       "normalizer": parts["normalizer"] });
    let piece = |key: &str| metadata.opt_u32(key).unwrap().map(|id| tokens[id as usize]);
    let named =
        json!({ "bos_token": piece("tokenizer.ggml.bos_token_id"), "eos_token": piece("tokenizer.ggml.eos_token_id") });
    HuggingFace {
        config: json!({}),
        generation_config: None,
        tokenizer: Some(root.to_string()),
        tokenizer_config: Some(named),
        chat_template: None,
        ..HuggingFace::default()
    }
}

/// Returns every way to join two pieces into a third, best piece first, as in tokenizer.json files converted from
/// SentencePiece.
fn sentencepiece_merges(tokens: &[&str], kinds: &[i32], scores: &[f32]) -> Value {
    let normal: HashMap<&str, usize> =
        (0..tokens.len()).filter(|&id| kinds[id] == 1).map(|id| (tokens[id], id)).collect();
    let mut products: Vec<usize> = normal.values().copied().collect();
    products.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let mut merges = Vec::new();
    for piece in products.into_iter().map(|id| tokens[id]) {
        let pairs = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
        let known = pairs.filter(|(left, right)| normal.contains_key(left) && normal.contains_key(right));
        merges.extend(known.map(|(left, right)| json!([left, right])));
    }
    Value::from(merges)
}

/// Checks the ids of the conformance data after a conversion to tokenizer.json and back to keys.
fn check(vocabulary: &Path, parts: Value) -> usize {
    let read = |suffix: &str| std::fs::read_to_string(format!("{}{suffix}", vocabulary.display())).unwrap();
    let checkpoint = Checkpoint::open(vocabulary).unwrap();
    let Source::Gguf(original) = checkpoint.source() else { panic!("a GGUF file") };
    let num_tokens = original.strings("tokenizer.ggml.tokens").unwrap().len();
    let (file, metadata, notes) = written(&as_folder(original, parts), num_tokens).unwrap();
    assert_eq!(notes, [""; 0], "{}", vocabulary.display());
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"] {
        assert!(metadata.get(key) == original.get(key), "{}: {key}", vocabulary.display());
    }
    let (texts, expected) = (read(".inp"), read(".out"));
    let texts = texts.split("\n__ggml_vocab_test__\n");
    for (text, expected) in texts.zip(expected.lines()) {
        let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(file.encode(text), expected, "{}: {text:?}", vocabulary.display());
    }
    expected.lines().count()
}

#[test]
fn published_vocabularies_keep_the_ids_of_the_reference_tokenizers() {
    let Some(folder) = common::conformance("tokenizers") else { return };
    let mut checked = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let name = name.strip_prefix("ggml-vocab-").and_then(|name| name.strip_suffix(".gguf"));
        if let Some(parts) = name.and_then(published_parts) {
            assert!(check(&path, parts) > 20, "{}", path.display());
            checked += 1;
        }
    }
    assert!(checked >= 3, "only {checked} vocabularies");
}
