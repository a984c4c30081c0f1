//! Writes the tokenizer of a Hugging Face folder as the `tokenizer.ggml.*` keys of a GGUF file, which `gguf.rs` reads.
//!
//! The keys say less than a tokenizer.json. What they cannot say at all is refused; what they say almost is written, read back and
//! compared, and the difference is told in a note.

use std::collections::{HashMap, HashSet};

use pellucid_checkpoint::{Array, HuggingFace, Metadata, StringArray, Value};

use crate::added_tokens::AddedToken;
use crate::algorithms::bpe::Bpe;
use crate::algorithms::normalize::Rewrite;
use crate::algorithms::pipeline::{Model, PreTokenizer, Prepend, SpaceRule};
use crate::algorithms::pretokenize::{self, Stage};
use crate::error::Error;
use crate::formats::gguf::{ADD_BOS, ADD_EOS, CHAT_TEMPLATE, MERGES, MODEL, PRE, SCORES, SPACE_PREFIX, TOKENS, TYPES};
use crate::formats::tokenizer_json::{self, Merge};
use crate::tokenizer::{END_NAMES, Tokenizer};
use crate::vocabulary::{METASPACE, TokenKind, Vocabulary};

/// Adds the tokenizer's keys to those of a model with `vocab_size` embeddings, and its chat template. Returns notes for the user: what the
/// folder's tokenizer does and a reader of the file will not.
pub fn write_gguf(folder: &HuggingFace, vocab_size: usize, metadata: &mut Metadata) -> Result<Vec<String>, Error> {
    let (tokenizer, merges) = tokenizer_json::read(folder)?;
    let mut writer = Writer { tokenizer: &tokenizer, vocab_size, metadata, notes: Vec::new() };
    match &tokenizer.pipeline.model {
        Model::Bpe(bpe) if bpe.is_byte_level() => writer.byte_level(bpe, &merges)?,
        Model::Bpe(bpe) => writer.sentencepiece(bpe, &merges)?,
        Model::SentencePieceBpe(_) | Model::Unigram(_) => return Err(Error::NoGgufForm("it is a Unigram model")),
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
    /// Rows of the embedding table: readers want a token for each.
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
                return Err(Error::NoGgufForm("it puts a space before every text"));
            }
            _ => return Err(Error::NoGgufForm("its pre-tokenizer is none that GGUF files have a name for")),
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
            .ok_or(Error::NoGgufForm("its pre-tokenizer is none that GGUF files have a name for"))?;
        let said = |is: bool| if is { "does" } else { "does not" };
        if named.nfc != nfc {
            let (folder, file) = (said(nfc), said(named.nfc));
            self.notes.push(format!("the tokenizer {folder} normalize text to NFC, and pre-tokenizer {pre:?} {file}"));
        }
        if named.ignore_merges != ignore_merges {
            let (folder, file) = (said(ignore_merges), said(named.ignore_merges));
            self.notes.push(format!("the tokenizer {folder} take words that are tokens whole, and {pre:?} {file}"));
        }
        Ok(pre)
    }

    /// Merges over characters become scores of their products: a reader joins two pieces where the joined text is a token, best score
    /// first, and the first merge that makes a piece gives its score.
    fn sentencepiece(&mut self, bpe: &Bpe, merges: &[Merge]) -> Result<(), Error> {
        if !bpe.falls_back_to_bytes() {
            return Err(Error::NoGgufForm("it spells characters, and has no byte tokens for those that it lacks"));
        }
        if bpe.ignores_merges() {
            return Err(Error::NoGgufForm("it spells characters, and takes words that are tokens whole"));
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
            let note = "some pieces of the tokenizer join only in one way, and by the file in any: rare texts may get other ids";
            self.notes.push(note.into());
        }
        Ok(())
    }

    /// Whether a space is put before a text.
    fn space_prefix(&mut self) -> Result<bool, Error> {
        let odd = Error::NoGgufForm("its way with spaces is none that GGUF files can say");
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
                let place = if *prepend == Prepend::First { "at its very beginning" } else { "after every marker" };
                self.notes.push(format!(
                    "the tokenizer puts a space before text {place} unless there is one, and a reader of the file always"
                ));
                Ok(true)
            }
            _ => Err(odd),
        }
    }

    /// The id that a merge makes, when the model has an embedding for it.
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
                .push(format!("the model has no embedding for {dropped} of its tokens, such as {example:?}: left out"));
        }
    }

    fn named_ids(&mut self) {
        let Tokenizer { named, prefix, suffix, end_ids, vocabulary, .. } = self.tokenizer;
        let within = |id: &u32| (*id as usize) < self.vocab_size;
        let bos = named.bos.or(prefix.first().copied()).filter(within);
        let eos = named.eos.or(suffix.first().copied()).or(end_ids.first().copied()).filter(within);
        // Readers know some ids that end a turn by their pieces; the others need a key.
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

    /// Notes what a reader of the file does otherwise.
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
                    .push(format!("{place} a text the tokenizer writes [{ours}], and a reader of the file [{theirs}]"));
            }
        }
        let without = |all: &[u32], others: &[u32]| -> Vec<u32> {
            all.iter().copied().filter(|id| !others.contains(id)).collect()
        };
        let lost = without(&folder.end_ids, &file.end_ids);
        if !lost.is_empty() {
            self.notes.push(format!("the file has no key for these ends of a turn: {}", pieces(&lost).join(", ")));
        }
        let gained = without(&file.end_ids, &folder.end_ids);
        if !gained.is_empty() {
            let gained = pieces(&gained).join(", ");
            self.notes
                .push(format!("the folder names no end of a text, and a reader of the file takes {gained} for it"));
        }
        if file.end_ids.is_empty() {
            self.notes.push("neither the folder nor the file names a token that ends a text".into());
        }
        self.compare_added(file);
    }

    fn compare_added(&mut self, file: &Tokenizer) {
        let folder = self.tokenizer;
        let theirs: HashMap<u32, &AddedToken> = file.added.tokens().iter().map(|token| (token.id, token)).collect();
        let habits = |token: &AddedToken| (token.lstrip, token.rstrip, token.single_word);
        let differs = |token: &&AddedToken| theirs.get(&token.id).is_some_and(|their| habits(their) != habits(token));
        let ours = || folder.added.tokens().iter().chain(folder.added_normalized.tokens());
        if let Some(token) = ours().find(differs) {
            let (count, example) = (ours().filter(differs).count(), folder.vocabulary.piece(token.id));
            self.notes.push(format!(
                "the file cannot say what {count} tokens make of the text beside them, such as {example:?}"
            ));
        }
        if let Some(token) = folder.added_normalized.tokens().first().filter(|_| !folder.normalizer.rewrites.is_empty())
        {
            let (count, example) = (folder.added_normalized.tokens().len(), folder.vocabulary.piece(token.id));
            self.notes.push(format!(
                "{count} tokens, such as {example:?}, are looked for in normalized text, and by a reader of the file in the text as it is"
            ));
        }
    }
}

/// The number by which GGUF files know a kind of token.
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

/// Whether two pieces whose joined text is a token may not join. Tokenizers that were made from SentencePiece's have none.
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
