//! The tokenizer of a Hugging Face folder: tokenizer.json, with tokenizer_config.json for the names of special tokens.
//!
//! Vocabulary, merges and scores go into our own models, which keep text from becoming a control token. [`stages`]
//! reads the parts around them.

#[cfg(test)]
mod reference_tests;
mod stages;

use pellucid_checkpoint::HuggingFace;
use serde_json::Value;

use crate::added_tokens::{AddedToken, AddedTokens};
use crate::algorithms::bpe::{Bpe, BpeOptions};
use crate::algorithms::joinable_pairs::JoinablePairs;
use crate::algorithms::normalize::Normalizer;
use crate::algorithms::pipeline::{Model, Pipeline};
use crate::algorithms::unigram::Unigram;
use crate::algorithms::wordpiece::{MAX_WORD_CHARS, WordPiece};
use crate::error::Error;
use crate::tokenizer::{NamedIds, Tokenizer};
use crate::vocabulary::{CONTINUATION, MAX_TOKENS, Spelling, TokenKind, Vocabulary, parse_byte_piece};

const MODELS: &[&str] = &["BPE", "Unigram", "WordPiece"];

pub(crate) fn load(folder: &HuggingFace) -> Result<Tokenizer, Error> {
    Ok(read(folder)?.0)
}

/// Loads the tokenizer, and the merges of a BPE model in the order of their ranks, which the GGUF writer needs.
pub(crate) fn read(folder: &HuggingFace) -> Result<(Tokenizer, Vec<Merge>), Error> {
    let text = folder.tokenizer.as_deref().ok_or(Error::Missing("the folder has no tokenizer.json"))?;
    let root: Value = serde_json::from_str(text).map_err(|error| Error::invalid("tokenizer.json", "JSON", error))?;
    let no_config = Value::Null;
    let config = folder.tokenizer_config.as_ref().unwrap_or(&no_config);
    let (tokenizer, merges) = assemble(&root, config)?;
    let mut end_ids = Vec::new();
    for source in [folder.generation_config.as_ref(), Some(&folder.config)].into_iter().flatten() {
        match &source["eos_token_id"] {
            Value::Array(ids) => end_ids.extend(ids.iter().filter_map(as_id)),
            id => end_ids.extend(as_id(id)),
        }
    }
    Ok((tokenizer.finish(&end_ids), merges))
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn assemble(root: &Value, config: &Value) -> Result<(Tokenizer, Vec<Merge>), Error> {
    let model = &root["model"];
    let model_type = match model["type"].as_str() {
        Some(name) => name,
        // Old files omit the type.
        None if model.get("merges").is_some() => "BPE",
        None if model["vocab"].is_array() => "Unigram",
        None if model.get("max_input_chars_per_word").is_some() => "WordPiece",
        None => "",
    };
    let pre_tokenizer = stages::pre_tokenizer(&root["pre_tokenizer"], &root["normalizer"])?;
    let spelling = match model_type {
        "WordPiece" => Spelling::WordPiece,
        _ if pre_tokenizer.byte_level => Spelling::ByteLevel,
        _ => Spelling::Metaspace,
    };
    let (pieces, scores) = match model_type {
        "BPE" => (bpe_pieces(model)?, Vec::new()),
        "WordPiece" => (listed_pieces(model)?, Vec::new()),
        "Unigram" => unigram_pieces(model)?,
        found => return Err(Error::UnsupportedModel { found: found.to_owned(), supported: MODELS }),
    };
    let names = SpecialNames::read(config);
    let table = TokenTable::new(pieces, root, model, &names)?;
    let mut vocabulary = Vocabulary::new(table.pieces.iter().map(|(piece, kind)| (piece.as_str(), *kind)), spelling)?;
    let unknown = match model_type {
        "BPE" | "WordPiece" => model["unk_token"].as_str().and_then(|piece| vocabulary.id_of(piece)),
        _ => as_id(&model["unk_id"]).filter(|&id| (id as usize) < vocabulary.len()),
    };
    let merges = if model_type == "BPE" { merges(model)? } else { Vec::new() };
    let (model, joinable_pairs) = match model_type {
        "BPE" => bpe(model, &vocabulary, &merges, pre_tokenizer.byte_level, unknown)?,
        "WordPiece" => (word_piece(model, &vocabulary, unknown)?, None),
        _ => {
            let byte_fallback = model["byte_fallback"].as_bool().unwrap_or(false);
            (Model::Unigram(Unigram::new(&vocabulary, scores, unknown, byte_fallback)), None)
        }
    };
    let id = |name: &Option<String>| name.as_deref().and_then(|piece| vocabulary.id_of(piece));
    let named = NamedIds {
        bos: id(&names.bos),
        eos: id(&names.eos),
        padding: id(&names.padding),
        unknown,
        ..NamedIds::default()
    };
    let normalizer = stages::normalizer(&root["normalizer"])?;
    let (prefix, suffix) = match stages::configured_ends(config, &named) {
        Some(ends) => ends,
        None => stages::post_processor(&root["post_processor"], &vocabulary)?,
    };
    let (added, added_normalized) = table.added(&normalizer)?;
    for token in added_normalized.tokens() {
        if vocabulary.piece(token.id) != token.content {
            vocabulary.set_text(token.id, &token.content);
        }
    }
    let tokenizer = Tokenizer {
        added,
        added_normalized,
        guarded: Vec::new(),
        normalizer,
        pipeline: Pipeline { pre_tokenizer: pre_tokenizer.cuts, model, joinable_pairs },
        leading_space: stages::leading_space(&root["decoder"]),
        vocabulary,
        named,
        prefix,
        suffix,
        end_ids: Vec::new(),
        max_token_bytes: None,
    };
    Ok((tokenizer, merges))
}

fn bpe(
    model: &Value,
    vocabulary: &Vocabulary,
    merges: &[Merge],
    byte_level: bool,
    unknown: Option<u32>,
) -> Result<(Model, Option<JoinablePairs>), Error> {
    let options = BpeOptions {
        byte_level,
        byte_fallback: model["byte_fallback"].as_bool().unwrap_or(false),
        ignore_merges: model["ignore_merges"].as_bool().unwrap_or(false),
        unknown,
        fuse_unknown: model["fuse_unk"].as_bool().unwrap_or(false),
    };
    let pairs = merges.iter().map(|(left, right)| (left.as_str(), right.as_str()));
    let bpe = Bpe::new(vocabulary, pairs, options)?;
    let cut = !options.byte_level && !options.ignore_merges && !bpe.fuses_unknown();
    let joinable_pairs = cut.then(|| JoinablePairs::new(bpe.products().map(|id| vocabulary.piece(id))));
    Ok((Model::Bpe(bpe), joinable_pairs))
}

fn word_piece(model: &Value, vocabulary: &Vocabulary, unknown: Option<u32>) -> Result<Model, Error> {
    let mark = &model["continuing_subword_prefix"];
    if !mark.is_null() && mark.as_str() != Some(CONTINUATION) {
        return Err(wrong("model.continuing_subword_prefix", "\"##\"", mark));
    }
    let unknown = unknown.ok_or_else(|| wrong("model.unk_token", "a token of the vocabulary", &model["unk_token"]))?;
    let max_word_chars = match &model["max_input_chars_per_word"] {
        Value::Null => MAX_WORD_CHARS,
        // The time for a word grows with the square of its length.
        found => match found.as_u64() {
            Some(limit @ 1..=4096) => limit as usize,
            _ => return Err(wrong("model.max_input_chars_per_word", "1 to 4096", found)),
        },
    };
    Ok(Model::WordPiece(WordPiece::new(vocabulary, ["", CONTINUATION], unknown, max_word_chars)))
}

/// Two pieces that are joined.
pub(crate) type Merge = (String, String);

/// A piece and its id.
type Pieces = Vec<(String, usize)>;

fn bpe_pieces(model: &Value) -> Result<Pieces, Error> {
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[key].as_str().is_some_and(|affix| !affix.is_empty()) {
            return Err(Error::invalid(format!("model.{key}"), "none", &model[key]));
        }
    }
    listed_pieces(model)
}

/// Returns the pieces of a vocabulary that is an object of pieces and ids.
fn listed_pieces(model: &Value) -> Result<Pieces, Error> {
    let vocab = model["vocab"].as_object().ok_or_else(|| wrong("model.vocab", "an object", &model["vocab"]))?;
    vocab
        .iter()
        .map(|(piece, id)| match id.as_u64() {
            Some(id) if id < MAX_TOKENS as u64 => Ok((piece.clone(), id as usize)),
            _ => Err(wrong(&format!("model.vocab[{piece:?}]"), "an id below 2^24", id)),
        })
        .collect()
}

fn unigram_pieces(model: &Value) -> Result<(Pieces, Vec<f64>), Error> {
    let vocab = model["vocab"].as_array().ok_or_else(|| wrong("model.vocab", "an array", &model["vocab"]))?;
    let mut pieces = Vec::with_capacity(vocab.len());
    let mut scores = Vec::with_capacity(vocab.len());
    for (id, entry) in vocab.iter().enumerate() {
        let (Some(piece), Some(score)) = (entry[0].as_str(), entry[1].as_f64()) else {
            return Err(wrong(&format!("model.vocab[{id}]"), "a piece and a score", entry));
        };
        pieces.push((piece.to_owned(), id));
        scores.push(score);
    }
    Ok((pieces, scores))
}

fn merges(model: &Value) -> Result<Vec<Merge>, Error> {
    let merges = model["merges"].as_array().ok_or_else(|| wrong("model.merges", "an array", &model["merges"]))?;
    let pair = |merge: &'_ Value| -> Option<Merge> {
        match merge {
            Value::String(text) => text.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())),
            merge => Some((merge[0].as_str()?.to_owned(), merge[1].as_str()?.to_owned())),
        }
    };
    if let Some((rank, bad)) = merges.iter().enumerate().find(|(_, merge)| pair(merge).is_none()) {
        return Err(wrong(&format!("model.merges[{rank}]"), "two pieces", bad));
    }
    Ok(merges.iter().filter_map(pair).collect())
}

pub(crate) fn wrong(key: &str, expected: &str, found: &Value) -> Error {
    let mut found = found.to_string();
    if let Some((cut, _)) = found.char_indices().nth(80) {
        found.truncate(cut);
    }
    Error::invalid(format!("tokenizer.json: {key}"), expected, found)
}

/// The special tokens that tokenizer_config.json names.
#[derive(Default)]
struct SpecialNames {
    bos: Option<String>,
    eos: Option<String>,
    padding: Option<String>,
    others: Vec<String>,
}

impl SpecialNames {
    fn read(config: &Value) -> SpecialNames {
        // A name is a string, or an object that describes the token.
        let content = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
        let list = |key: &str| config[key].as_array().into_iter().flatten().filter_map(content).collect::<Vec<_>>();
        let mut others = list("additional_special_tokens");
        others.extend(list("extra_special_tokens"));
        SpecialNames {
            bos: content(&config["bos_token"]),
            eos: content(&config["eos_token"]),
            padding: content(&config["pad_token"]),
            others,
        }
    }

    fn contains(&self, piece: &str) -> bool {
        let named = [&self.bos, &self.eos, &self.padding];
        named.iter().any(|name| name.as_deref() == Some(piece)) || self.others.iter().any(|name| name == piece)
    }
}

/// All tokens of the file by id, and the added tokens with their matching options.
struct TokenTable {
    pieces: Vec<(String, TokenKind)>,
    /// Each with whether it matches normalized text.
    added: Vec<(AddedToken, bool)>,
    /// Ids are below this bound: they may have gaps, but a small file must not make a large table.
    id_bound: usize,
}

impl TokenTable {
    fn new(model_pieces: Pieces, root: &Value, model: &Value, names: &SpecialNames) -> Result<TokenTable, Error> {
        let byte_fallback = model["byte_fallback"].as_bool().unwrap_or(false);
        let mut table = TokenTable { pieces: Vec::new(), added: Vec::new(), id_bound: 0 };
        let num_added = root["added_tokens"].as_array().map_or(0, Vec::len);
        table.id_bound = (model_pieces.len() + num_added) * 4 + 65_536;
        for (piece, id) in model_pieces {
            let kind =
                if byte_fallback && parse_byte_piece(&piece).is_some() { TokenKind::Byte } else { TokenKind::Normal };
            table.place(id, piece, kind)?;
        }
        let no_tokens = Vec::new();
        let unknown = match model["unk_token"].as_str() {
            Some(name) => Some(name.to_owned()),
            None => model["unk_id"].as_u64().and_then(|id| table.pieces.get(id as usize)).map(|(p, _)| p.clone()),
        };
        for (index, token) in root["added_tokens"].as_array().unwrap_or(&no_tokens).iter().enumerate() {
            let key = format!("added_tokens[{index}]");
            let flag = |name: &str| token[name].as_bool().unwrap_or(false);
            let (Some(content), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) else {
                return Err(wrong(&key, "a content and an id", token));
            };
            if id >= MAX_TOKENS as u64 {
                return Err(wrong(&key, "an id below 2^24", &token["id"]));
            }
            let kind = match flag("special") || names.contains(content) {
                true if unknown.as_deref() == Some(content) => TokenKind::Unknown,
                true => TokenKind::Control,
                false => TokenKind::UserDefined,
            };
            table.place(id as usize, content.to_owned(), kind)?;
            let token = AddedToken {
                id: id as u32,
                content: content.to_owned(),
                lstrip: flag("lstrip"),
                rstrip: flag("rstrip"),
                single_word: flag("single_word"),
            };
            table.added.push((token, root["added_tokens"][index]["normalized"].as_bool().unwrap_or(false)));
        }
        table.name_special_pieces(names, unknown.as_deref());
        Ok(table)
    }

    /// Marks tokens as special that only tokenizer_config.json names.
    fn name_special_pieces(&mut self, names: &SpecialNames, unknown: Option<&str>) {
        for (id, (piece, kind)) in self.pieces.iter_mut().enumerate() {
            if *kind == TokenKind::Normal
                && !piece.is_empty()
                && names.contains(piece)
                && unknown != Some(piece.as_str())
            {
                *kind = TokenKind::Control;
                self.added.push((AddedToken::plain(id as u32, piece), false));
            } else if *kind == TokenKind::Normal && unknown == Some(piece.as_str()) {
                *kind = TokenKind::Unknown;
            }
        }
    }

    fn place(&mut self, id: usize, piece: String, kind: TokenKind) -> Result<(), Error> {
        if id >= self.id_bound {
            return Err(Error::invalid(
                format!("tokenizer.json: id of {piece:?}"),
                format!("an id below {}", self.id_bound),
                id,
            ));
        }
        if id >= self.pieces.len() {
            self.pieces.resize(id + 1, (String::new(), TokenKind::Unused));
        }
        self.pieces[id] = (piece, kind);
        Ok(())
    }

    /// Returns the added tokens that match the original text, and those that match normalized text.
    fn added(self, normalizer: &Normalizer) -> Result<(AddedTokens, AddedTokens), Error> {
        let (normalized, plain): (Vec<_>, Vec<_>) = self.added.into_iter().partition(|(_, normalized)| *normalized);
        let normalized = normalized.into_iter().map(|(mut token, _)| {
            let bytes = token.content.len();
            let content = normalizer.apply(&token.content).map_err(|_| Error::OutOfMemory { bytes })?;
            token.content = content.into_owned();
            Ok(token)
        });
        let normalized = AddedTokens::new(normalized.collect::<Result<_, Error>>()?);
        Ok((AddedTokens::new(plain.into_iter().map(|(token, _)| token).collect()), normalized))
    }
}
