//! A tiny random model with a vocabulary and a chat template, for tests from text to text: the weights of the golden
//! `llama2` (96 tokens), with a tokenizer that the golden does not have. Used by tests of the program, the server and
//! the library.

use std::path::Path;

use serde_json::{Map, Value, json};

const CHARACTERS: &str = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-+*/=%&#@$^~|_\n<>";
/// Pieces of many lengths, as in vocabularies of published models. No merge produces them: the model can generate them,
/// but text is never encoded to them.
const WORDS: &str = "▁a ▁of ▁in th er ing ▁to ▁the ▁was tion ▁from ment ▁which ▁there ▁under ▁between ▁another \
                     ▁question ▁national ▁important ▁different ▁government ▁information \
                     ▁particularly ▁administration ▁internationally";
const SPECIAL: [&str; 5] = ["<unk>", "<s>", "</s>", "[turn]", "[end]"];

/// A chat template for the tiny model: turns between control tokens.
pub const TINY_TEMPLATE: &str = "{% for m in messages %}[turn]{{ m.role }}: {{ m.content }}[end]{% endfor %}\
                                 {% if add_generation_prompt %}[turn]{% endif %}";

/// Writes the tiny model with default settings to a folder.
pub fn tiny_model(folder: &Path, template: Option<&str>) {
    TinyModel { template, ..TinyModel::default() }.write(folder).expect("a folder that can be written");
}

/// Settings of the tiny model.
#[derive(Debug, Clone, Copy, Default)]
pub struct TinyModel<'a> {
    pub template: Option<&'a str>,
    /// Context length instead of the golden's 256. Positions are rotations, so any length works.
    pub context_len: Option<usize>,
    /// Whether words replace the capital letters.
    pub has_words: bool,
    /// Whether the brackets of JSON replace other characters.
    pub has_brackets: bool,
    /// Whether control tokens that mark a gap replace `^`, `~` and `|`.
    pub fills_gaps: bool,
}

/// Control tokens that mark a gap, with the characters that they replace.
const GAP_TOKENS: [(char, &str); 3] = [('^', "<|fim_prefix|>"), ('~', "<|fim_suffix|>"), ('|', "<|fim_middle|>")];

impl TinyModel<'_> {
    /// Writes the model. Creates the folder if it does not exist.
    pub fn write(&self, folder: &Path) -> std::io::Result<()> {
        let golden = pellucid_selftest::goldens_folder().join("llama2");
        std::fs::create_dir_all(folder)?;
        for file in ["generation_config.json", "model.safetensors"] {
            std::fs::copy(golden.join(file), folder.join(file))?;
        }
        let mut config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json"))?)?;
        if let Some(context_len) = self.context_len {
            config["max_position_embeddings"] = json!(context_len);
        }
        std::fs::write(folder.join("config.json"), config.to_string())?;
        std::fs::write(folder.join("tokenizer.json"), self.tokenizer().to_string())?;
        if let Some(template) = self.template {
            std::fs::write(folder.join("chat_template.jinja"), template)?;
        }
        Ok(())
    }

    fn tokenizer(&self) -> Value {
        let mut words = WORDS.split(' ');
        let gap_token = |character: char| {
            let token = GAP_TOKENS.iter().find(|(replaced, _)| self.fills_gaps && *replaced == character);
            token.map(|(_, token)| (*token).to_owned())
        };
        let piece = |character: char| match character {
            _ if gap_token(character).is_some() => gap_token(character).unwrap_or_default(),
            '^' if self.has_brackets => "{".into(),
            '~' if self.has_brackets => "}".into(),
            '|' if self.has_brackets => "[".into(),
            '&' if self.has_brackets => "]".into(),
            'A'..='Z' if self.has_words => words.next().unwrap_or_default().to_owned(),
            _ => character.to_string(),
        };
        let pieces = SPECIAL.iter().map(|piece| piece.to_string()).chain(CHARACTERS.chars().map(piece));
        let vocabulary: Map<String, Value> = pieces.enumerate().map(|(id, piece)| (piece, json!(id))).collect();
        assert!(vocabulary.len() <= 96, "{} tokens for a model of 96", vocabulary.len());
        let gaps = CHARACTERS.chars().filter_map(gap_token).map(|content| (vocabulary[&content].clone(), content));
        let special = SPECIAL.iter().enumerate().map(|(id, content)| (json!(id), (*content).to_owned()));
        let added: Vec<_> = special
            .chain(gaps)
            .map(|(id, content)| {
                json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                        "normalized": false, "special": true })
            })
            .collect();
        let space = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": space(" ", "▁"), "pre_tokenizer": null, "post_processor": null,
            "decoder": { "type": "Sequence", "decoders": [space("▁", " "), { "type": "Fuse" }] },
            "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": vocabulary, "merges": [] },
        })
    }
}
