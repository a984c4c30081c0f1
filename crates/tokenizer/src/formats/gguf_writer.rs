//! Writes the tokenizer of a Hugging Face folder as the `tokenizer.ggml.*` keys of a GGUF file, which `gguf.rs` reads.
//!
//! The keys express less than a tokenizer.json. A tokenizer that they cannot express is rejected. The written keys are
//! read back and compared with the folder's tokenizer; each difference becomes a note for the user.

use std::collections::{HashMap, HashSet};

use pellucid_checkpoint::{Array, HuggingFace, Metadata, StringArray, Value};

use crate::added_tokens::AddedToken;
use crate::algorithms::bpe::Bpe;
use crate::algorithms::normalize::Rewrite;
use crate::algorithms::pipeline::{Model, PreTokenizer, SpaceRule};
use crate::algorithms::pretokenize::Prepend;
use crate::algorithms::pretokenize::{self, Stage};
use crate::error::Error;
use crate::formats::gguf::{ADD_BOS, ADD_EOS, CHAT_TEMPLATE, MERGES, MODEL, PRE, SCORES, SPACE_PREFIX, TOKENS, TYPES};
use crate::formats::tokenizer_json::{self, Merge};
use crate::tokenizer::{END_NAMES, Tokenizer};
use crate::vocabulary::{METASPACE, TokenKind, Vocabulary};

/// Adds the keys of the tokenizer and the chat template to the metadata of a model with `vocab_size` embeddings.
/// Returns notes for the user on differences between the folder's tokenizer and the file's.
pub fn write_gguf(folder: &HuggingFace, vocab_size: usize, metadata: &mut Metadata) -> Result<Vec<String>, Error> {
    let (tokenizer, merges) = tokenizer_json::read(folder)?;
    let mut writer = Writer { tokenizer: &tokenizer, vocab_size, metadata, notes: Vec::new() };
    match &tokenizer.pipeline.model {
        Model::Bpe(bpe) if bpe.is_byte_level() => writer.byte_level(bpe, &merges)?,
        Model::Bpe(bpe) => writer.sentencepiece(bpe, &merges)?,
        Model::SentencePieceBpe(_) | Model::Unigram(_) => return Err(Error::NoGgufForm("it is a Unigram model")),
        Model::WordPiece(_) => return Err(Error::NoGgufForm("it is a WordPiece model")),
    }
    writer.tokens();
    writer.named_ids();
    if let Some(template) = &folder.chat_template {
        writer.put(CHAT_TEMPLATE, Value::String(template.clone()));
    }
    writer.compare(&Tokenizer::from_gguf(writer.metadata)?);
    Ok(writer.notes)
}

struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    /// Rows of the embedding table; readers expect a token for each.
    vocab_size: usize,
    metadata: &'a mut Metadata,
    notes: Vec<String>,
}

impl Writer<'_> {
    fn put(&mut self, key: &str, value: Value) {
        assert!(self.metadata.insert(key.into(), value), "{key} is written once");
    }

    fn put_strings<S: AsRef<str>>(&mut self, key: &str, strings: impl Iterator<Item = S>) {
        self.put(key, Value::Array(Array::Strings(strings.collect::<StringArray>())));
    }

    fn put_text(&mut self, key: &str, text: &str) {
        self.put(key, Value::String(text.into()));
    }

    fn byte_level(&mut self, bpe: &Bpe, merges: &[Merge]) -> Result<(), Error> {
        let stages = match &self.tokenizer.pipeline.pre_tokenizer {
            PreTokenizer::Ours { space: SpaceRule::Keep, stages, spelled_stages } if spelled_stages.is_empty() => {
                stages
            }
            PreTokenizer::Ours { space: SpaceRule::Prefix, .. } => {
                return Err(Error::NoGgufForm("it inserts a space before every text"));
            }
            _ => return Err(Error::NoGgufForm("GGUF files have no name for its pre-tokenizer")),
        };
        let nfc = match self.tokenizer.normalizer.rewrites[..] {
            [] => false,
            [Rewrite::Nfc] => true,
            _ => return Err(Error::NoGgufForm("its normalizer is neither absent nor NFC")),
        };
        let pre = self.name_cuts(stages, bpe.ignores_merges(), nfc)?;
        self.put_text(MODEL, "gpt2");
        self.put_text(PRE, pre);
        let kept = merges.iter().filter(|merge| self.product(merge).is_some());
        let kept: Vec<String> = kept.map(|(left, right)| format!("{left} {right}")).collect();
        self.put_strings(MERGES, kept.iter());
        Ok(())
    }

    fn name_cuts(&mut self, stages: &[Stage], ignore_merges: bool, nfc: bool) -> Result<&'static str, Error> {
        let (pre, named) = pretokenize::name_of(stages, ignore_merges, nfc)
            .ok_or(Error::NoGgufForm("GGUF files have no name for its pre-tokenizer"))?;
        let does = |it_does: bool| if it_does { "does" } else { "does not" };
        if named.nfc != nfc {
            let (folder, file) = (does(nfc), does(named.nfc));
            self.notes.push(format!("the tokenizer {folder} normalize text to NFC, but pre-tokenizer {pre:?} {file}"));
        }
        if named.ignore_merges != ignore_merges {
            let (folder, file) = (does(ignore_merges), does(named.ignore_merges));
            self.notes.push(format!("the tokenizer {folder} use words that are tokens whole, but {pre:?} {file}"));
        }
        Ok(pre)
    }

    /// Writes merges over characters as scores of the merged pieces. A reader joins two pieces if the joined text is a
    /// token, best score first; the first merge that produces a piece determines its score.
    fn sentencepiece(&mut self, bpe: &Bpe, merges: &[Merge]) -> Result<(), Error> {
        if !bpe.falls_back_to_bytes() {
            return Err(Error::NoGgufForm("it merges characters, and has no byte tokens for unknown characters"));
        }
        if bpe.ignores_merges() {
            return Err(Error::NoGgufForm("it merges characters, and uses words that are tokens whole"));
        }
        let space_prefix = self.space_prefix()?;
        self.put_text(MODEL, "llama");
        self.put_text(PRE, "default");
        let mut scores = vec![-(merges.len() as f32); self.vocab_size];
        for (rank, merge) in merges.iter().enumerate().rev() {
            if let Some(id) = self.product(merge) {
                scores[id as usize] = -(rank as f32);
            }
        }
        self.put(SCORES, Value::Array(Array::F32(scores)));
        self.put(SPACE_PREFIX, Value::Bool(space_prefix));
        if has_joins_without_merges(&self.tokenizer.vocabulary, merges) {
            let note = "the tokenizer joins some pieces in one order only, the file in any order: rare texts may get \
                        other ids";
            self.notes.push(note.into());
        }
        Ok(())
    }

    /// Whether a space is inserted before a text.
    fn space_prefix(&mut self) -> Result<bool, Error> {
        let odd = Error::NoGgufForm("GGUF files cannot express how it treats spaces");
        let PreTokenizer::Ours { space, stages, .. } = &self.tokenizer.pipeline.pre_tokenizer else { return Err(odd) };
        if !stages.is_empty() {
            return Err(odd);
        }
        let is_mark = |text: &str| text.chars().eq([METASPACE]);
        match (&self.tokenizer.normalizer.rewrites[..], space) {
            ([Rewrite::Replace { from, to }], SpaceRule::Keep) if from == " " && is_mark(to) => Ok(false),
            ([Rewrite::Prepend(mark), Rewrite::Replace { from, to }], SpaceRule::Keep)
                if is_mark(mark) && from == " " && is_mark(to) =>
            {
                Ok(true)
            }
            ([], SpaceRule::Metaspace { prepend: Prepend::Never, split: false }) => Ok(false),
            ([], SpaceRule::Metaspace { prepend, split: false }) => {
                let place = if *prepend == Prepend::First { "at the beginning" } else { "after every control token" };
                self.notes.push(format!(
                    "the tokenizer inserts a space {place} of a text unless there is one, but a reader of the file \
                     always does"
                ));
                Ok(true)
            }
            _ => Err(odd),
        }
    }

    /// Returns the id that a merge produces, if the model has an embedding for it.
    fn product(&self, (left, right): &Merge) -> Option<u32> {
        self.tokenizer.vocabulary.id_of(&format!("{left}{right}")).filter(|&id| (id as usize) < self.vocab_size)
    }

    fn tokens(&mut self) {
        let (vocabulary, vocab_size) = (&self.tokenizer.vocabulary, self.vocab_size);
        let named = |id: usize| id < vocabulary.len() && !vocabulary.piece(id as u32).is_empty();
        let piece = |id| if named(id) { vocabulary.piece(id as u32).to_owned() } else { format!("[PAD{id}]") };
        let kind = |id| if named(id) { number(vocabulary.kind(id as u32)) } else { number(TokenKind::Unused) };
        self.put_strings(TOKENS, (0..vocab_size).map(piece));
        self.put(TYPES, Value::Array(Array::I32((0..vocab_size).map(kind).collect())));
        if vocabulary.len() > vocab_size {
            let (dropped, example) = (vocabulary.len() - vocab_size, vocabulary.piece(vocab_size as u32));
            self.notes
                .push(format!("the model has no embedding for {dropped} of its tokens, such as {example:?}: omitted"));
        }
    }

    fn named_ids(&mut self) {
        let Tokenizer { named, prefix, suffix, end_ids, vocabulary, .. } = self.tokenizer;
        let within = |id: &u32| (*id as usize) < self.vocab_size;
        let bos = named.bos.or(prefix.first().copied()).filter(within);
        let eos = named.eos.or(suffix.first().copied()).or(end_ids.first().copied()).filter(within);
        // Readers recognize some end-of-turn tokens by their pieces; the others need a key.
        let by_name =
            |id: &u32| vocabulary.kind(*id) == TokenKind::Control && END_NAMES.contains(&vocabulary.piece(*id));
        let mut others = end_ids.iter().copied().filter(|id| within(id) && Some(*id) != eos && !by_name(id));
        let ids = [
            ("bos", bos),
            ("eos", eos),
            ("eot", others.next()),
            ("eom", others.next()),
            ("unknown", named.unknown.filter(within)),
            ("padding", named.padding.filter(within)),
        ];
        let begins = bos.is_some() && prefix.first() == bos.as_ref();
        let ends = eos.is_some() && suffix.first() == eos.as_ref();
        for (name, id) in ids {
            if let Some(id) = id {
                self.put(&format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
            }
        }
        self.put(ADD_BOS, Value::Bool(begins));
        self.put(ADD_EOS, Value::Bool(ends));
    }

    /// Adds a note for each difference between the folder's tokenizer and the file's.
    fn compare(&mut self, file: &Tokenizer) {
        let folder = self.tokenizer;
        let pieces = |ids: &[u32]| -> Vec<String> {
            ids.iter().map(|&id| format!("{:?}", folder.vocabulary.piece(id))).collect()
        };
        for (place, ours, theirs) in [("before", &folder.prefix, &file.prefix), ("after", &folder.suffix, &file.suffix)]
        {
            if ours != theirs {
                let (ours, theirs) = (pieces(ours).join(" "), pieces(theirs).join(" "));
                self.notes
                    .push(format!("{place} a text, the tokenizer adds [{ours}], but a reader of the file [{theirs}]"));
            }
        }
        let without = |all: &[u32], others: &[u32]| -> Vec<u32> {
            all.iter().copied().filter(|id| !others.contains(id)).collect()
        };
        let lost = without(&folder.end_ids, &file.end_ids);
        if !lost.is_empty() {
            self.notes.push(format!("the file has no key for these end-of-turn tokens: {}", pieces(&lost).join(", ")));
        }
        let gained = without(&file.end_ids, &folder.end_ids);
        if !gained.is_empty() {
            let gained = pieces(&gained).join(", ");
            self.notes.push(format!("the folder names no end-of-sequence token; a reader of the file uses {gained}"));
        }
        if file.end_ids.is_empty() {
            self.notes.push("neither the folder nor the file names an end-of-sequence token".into());
        }
        self.compare_added(file);
    }

    fn compare_added(&mut self, file: &Tokenizer) {
        let folder = self.tokenizer;
        let theirs: HashMap<u32, &AddedToken> = file.added.tokens().iter().map(|token| (token.id, token)).collect();
        let options = |token: &AddedToken| (token.lstrip, token.rstrip, token.single_word);
        let differs = |token: &&AddedToken| theirs.get(&token.id).is_some_and(|their| options(their) != options(token));
        let ours = || folder.added.tokens().iter().chain(folder.added_normalized.tokens());
        if let Some(token) = ours().find(differs) {
            let (count, example) = (ours().filter(differs).count(), folder.vocabulary.piece(token.id));
            self.notes.push(format!(
                "the file cannot express lstrip, rstrip or single_word of {count} tokens, such as {example:?}"
            ));
        }
        if let Some(token) = folder.added_normalized.tokens().first().filter(|_| !folder.normalizer.rewrites.is_empty())
        {
            let (count, example) = (folder.added_normalized.tokens().len(), folder.vocabulary.piece(token.id));
            self.notes.push(format!(
                "{count} tokens, such as {example:?}, match normalized text, but a reader of the file matches the \
                 original text"
            ));
        }
    }
}

/// Returns the number of a kind of token in GGUF files.
fn number(kind: TokenKind) -> i32 {
    match kind {
        TokenKind::Normal => 1,
        TokenKind::Unknown => 2,
        TokenKind::Control => 3,
        TokenKind::UserDefined => 4,
        TokenKind::Unused => 5,
        TokenKind::Byte => 6,
    }
}

/// Whether there are two pieces that do not join although their joined text is a token. Tokenizers converted from
/// SentencePiece have none.
fn has_joins_without_merges(vocabulary: &Vocabulary, merges: &[Merge]) -> bool {
    let known: HashSet<(&str, &str)> = merges.iter().map(|(left, right)| (left.as_str(), right.as_str())).collect();
    let is_piece = |text: &str| vocabulary.mergeable(text).is_some_and(|id| vocabulary.kind(id) == TokenKind::Normal);
    let joins_without = |piece: &str| {
        let cuts = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
        cuts.filter(|(left, right)| is_piece(left) && is_piece(right)).any(|pair| !known.contains(&pair))
    };
    let normal = (0..vocabulary.len() as u32).filter(|&id| vocabulary.kind(id) == TokenKind::Normal);
    normal.map(|id| vocabulary.piece(id)).any(joins_without)
}
