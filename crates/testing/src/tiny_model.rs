//! A tiny random model with a vocabulary of single characters, for tests that go from text to text.

use std::path::Path;

use serde_json::{Map, json};

const CHARACTERS: &str = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-+*/=%&#@$^~|_\n<>";

/// A chat template for it: turns between control tokens.
pub const TINY_TEMPLATE: &str = "{% for m in messages %}[turn]{{ m.role }}: {{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[turn]{% endif %}";

/// Makes a folder with the golden Llama's weights (96 tokens), a tokenizer, and optionally a chat template.
pub fn tiny_model(folder: &Path, template: Option<&str>) {
    let golden = crate::goldens_folder().join("llama2");
    std::fs::create_dir_all(folder).unwrap();
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
}
