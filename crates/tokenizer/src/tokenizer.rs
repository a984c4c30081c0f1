//! The tokenizer: text to ids and back. The server and the CLI call it; the engine never sees it.
//!
//! Encoding has three steps for every kind of model. Added tokens are cut out, and this file decides which of them a
//! text may contain. The fragments between them are normalized. The pipeline turns each fragment into ids.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::TryReserveError;
use std::ops::Range;

use pellucid_checkpoint::{Checkpoint, HuggingFace, Metadata, Source};

use crate::added_tokens::{Accept, AddedTokens, Fragment};
use crate::algorithms::bpe::append;
use crate::algorithms::normalize::{Normalizer, Origins};
use crate::algorithms::pipeline::Pipeline;
use crate::chat::Segment;
use crate::error::Error;
use crate::text_stream::TextStream;
use crate::vocabulary::{TokenInfo, TokenKind, Vocabulary};

/// Treatment of a space at the very beginning of decoded text, where encoding inserted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeadingSpace {
    Keep,
    /// One space is removed.
    StripOne,
    /// All spaces of the first token are removed.
    DropInFirst,
}

/// Ids of special tokens that model files name. Each is a valid id.
#[derive(Debug, Clone, Default)]
pub(crate) struct NamedIds {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) eot: Option<u32>,
    pub(crate) eom: Option<u32>,
    pub(crate) unknown: Option<u32>,
    pub(crate) padding: Option<u32>,
}

/// Text to ids and back, for one model. Immutable in use: share it by reference or in an `Arc`.
pub struct Tokenizer {
    pub(crate) vocabulary: Vocabulary,
    /// Added tokens that are matched on the text before normalization.
    pub(crate) added: AddedTokens,
    /// Added tokens that are matched on normalized text.
    pub(crate) added_normalized: AddedTokens,
    /// By id: whether untrusted text must not become this token.
    pub(crate) guarded: Vec<bool>,
    pub(crate) normalizer: Normalizer,
    pub(crate) pipeline: Pipeline,
    pub(crate) leading_space: LeadingSpace,
    pub(crate) named: NamedIds,
    pub(crate) prefix: Vec<u32>,
    pub(crate) suffix: Vec<u32>,
    pub(crate) end_ids: Vec<u32>,
    /// Maximum bytes of text that one id can stand for; `None` if there is no bound.
    pub(crate) max_token_bytes: Option<usize>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocabulary.len())
    }
}

/// Pieces that end a turn in some model family, if the vocabulary has them as control tokens.
pub(crate) const END_NAMES: [&str; 11] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|call|>",
];

/// Expectation of callers that do not handle a lack of memory.
const ENOUGH_MEMORY: &str = "memory for the ids of a text";

/// Decides which added tokens a text may contain.
enum Permission<'p> {
    /// No control token and no unknown token.
    Plain(&'p Vocabulary),
    All,
    /// Guarded tokens only if they lie wholly within one of these ranges, which are sorted and do not touch.
    Trusted {
        ranges: &'p [Range<usize>],
        guarded: &'p [bool],
    },
}

impl Accept for Permission<'_> {
    fn accept(&self, id: u32, at: Range<usize>) -> bool {
        match self {
            Permission::Plain(vocabulary) => !matches!(vocabulary.kind(id), TokenKind::Control | TokenKind::Unknown),
            Permission::All => true,
            Permission::Trusted { ranges, guarded } => {
                !guarded[id as usize] || {
                    let after = ranges.partition_point(|range| range.start <= at.start);
                    after > 0 && at.end <= ranges[after - 1].end
                }
            }
        }
    }
}

/// A permission applied to normalized text: positions are traced back to the text before normalization.
struct BeforeNormalizing<'p> {
    permission: &'p Permission<'p>,
    normalizer: &'p Normalizer,
    /// The fragment before normalization.
    fragment: &'p str,
    /// Byte offset of the fragment in the whole text.
    offset: usize,
    guarded: &'p [bool],
    /// Computed once for all tokens of the fragment: each of many tokens would take time for the whole fragment.
    origins: OnceCell<Origins>,
}

impl Accept for BeforeNormalizing<'_> {
    fn accept(&self, id: u32, at: Range<usize>) -> bool {
        if !matches!(self.permission, Permission::Trusted { .. }) || !self.guarded[id as usize] {
            return self.permission.accept(id, at);
        }
        // A token whose origin is unknown is not trusted.
        let origins = self.origins.get_or_init(|| self.normalizer.origins(self.fragment));
        origins
            .of(at)
            .is_some_and(|origin| self.permission.accept(id, origin.start + self.offset..origin.end + self.offset))
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a model from GGUF metadata, or from tokenizer.json and tokenizer_config.json.
    ///
    /// User-defined tokens that the model's chat template uses as structure are guarded (see [`Tokenizer::guard`]).
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Tokenizer, Error> {
        match checkpoint.source() {
            Source::Gguf(metadata) => Tokenizer::from_gguf(metadata),
            Source::HuggingFace(folder) => Tokenizer::from_hugging_face(folder),
        }
    }

    /// Loads the tokenizer from the metadata of a GGUF file; see [`Tokenizer::from_checkpoint`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, Error> {
        let mut tokenizer = crate::formats::gguf::load(metadata)?;
        if let Some(template) = metadata.opt_str(crate::formats::gguf::CHAT_TEMPLATE)? {
            tokenizer.guard(template);
        }
        Ok(tokenizer)
    }

    /// Loads the tokenizer from the files of a Hugging Face folder; see [`Tokenizer::from_checkpoint`].
    pub fn from_hugging_face(folder: &HuggingFace) -> Result<Tokenizer, Error> {
        let mut tokenizer = crate::formats::tokenizer_json::load(folder)?;
        if let Some(template) = &folder.chat_template {
            tokenizer.guard(template);
        }
        Ok(tokenizer)
    }

    /// Collects the ids that end a turn and guards the control tokens. Every loader calls it last.
    pub(crate) fn finish(mut self, more_end_ids: &[u32]) -> Tokenizer {
        let count = self.vocabulary.len() as u32;
        self.guarded =
            (0..count).map(|id| matches!(self.vocabulary.kind(id), TokenKind::Control | TokenKind::Unknown)).collect();
        let is_control = |id: &u32| self.vocabulary.kind(*id) == TokenKind::Control;
        let named = [self.named.eos, self.named.eot, self.named.eom];
        let well_known = END_NAMES.iter().filter_map(|name| self.vocabulary.id_of(name)).filter(is_control);
        let all = named.into_iter().flatten().chain(more_end_ids.iter().copied()).chain(well_known);
        let mut end_ids: Vec<u32> = Vec::new();
        for id in all.filter(|&id| id < count) {
            if !end_ids.contains(&id) {
                end_ids.push(id);
            }
        }
        // In the "harmony" format `<|end|>` ends a message, not the turn; `<|return|>` and `<|call|>` end the turn.
        let harmony = ["<|return|>", "<|call|>"].iter().all(|name| self.vocabulary.id_of(name).is_some());
        if harmony && let Some(end) = self.vocabulary.id_of("<|end|>") {
            end_ids.retain(|&id| id != end);
        }
        self.end_ids = end_ids;
        self.max_token_bytes = self.find_max_token_bytes();
        self
    }

    fn find_max_token_bytes(&self) -> Option<usize> {
        let added = || self.added.tokens().iter().chain(self.added_normalized.tokens());
        // A stripping token absorbs white space of any length.
        if !self.pipeline.covers_all_text() || added().any(|token| token.lstrip || token.rstrip) {
            return None;
        }
        let ids = 0..self.vocabulary.len() as u32;
        let spelled = ids.map(|id| self.vocabulary.piece(id).len().max(self.vocabulary.bytes(id).len()));
        // An unknown character has up to four bytes.
        let longest = spelled.chain(added().map(|token| token.content.len())).max()?.max(4);
        longest.checked_mul(self.normalizer.max_shrink_factor()?)
    }

    /// Returns a lower bound for the number of ids of a text of `num_bytes` bytes, without encoding it.
    pub fn min_ids(&self, num_bytes: usize) -> usize {
        self.max_token_bytes.map_or(0, |most| num_bytes.div_ceil(most))
    }

    /// Guards every user-defined token that occurs in a chat template's source, such as `<tool_call>` or `<think>`:
    /// [`Tokenizer::encode_segments`] no longer produces them from untrusted text. Control tokens are always guarded.
    /// Pieces that consist of letters, digits and white space alone count as text, not as structure.
    ///
    /// [`Tokenizer::from_checkpoint`] does this for the model's own template; call it for a template from elsewhere.
    pub fn guard(&mut self, template: &str) {
        for added in [&self.added, &self.added_normalized] {
            for token in added.tokens() {
                let piece = self.vocabulary.piece(token.id);
                let is_mark = |c: char| !c.is_alphanumeric() && !c.is_whitespace();
                if piece.contains(is_mark) && template.contains(piece) {
                    self.guarded[token.id as usize] = true;
                }
            }
        }
        for id in (0..self.guarded.len() as u32).filter(|&id| self.guarded[id as usize]) {
            if self.vocabulary.is_mergeable(id) {
                self.vocabulary.forbid_merging(id);
                self.pipeline.forbid_merging(id);
            }
        }
    }

    /// Whether untrusted segments can never produce this id by spelling its piece. The unknown token is guarded as
    /// well, but still stands for characters that the model cannot spell.
    pub fn is_guarded(&self, id: u32) -> bool {
        self.guarded.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns the number of tokens, gaps included.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Encodes a text: nothing is prepended, and control tokens in it are treated as ordinary text.
    /// User-defined tokens are recognized, as the reference tokenizers do.
    ///
    /// # Panics
    ///
    /// If there is no memory for the ids; [`Tokenizer::try_encode`] returns an error then.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.try_encode(text).expect(ENOUGH_MEMORY)
    }

    /// Encodes a text as [`Tokenizer::encode`] does; fails with [`Error::OutOfMemory`] if there is no memory for it.
    pub fn try_encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, &Permission::Plain(&self.vocabulary))
    }

    /// Encodes a text as part of a longer one: without the space that some tokenizers insert before every text.
    pub fn encode_within(&self, text: &str) -> Vec<u32> {
        let before = self.encode("x");
        let whole = self.encode(&format!("x{text}"));
        match whole.strip_prefix(&before[..]) {
            Some(ids) if !ids.is_empty() => ids.to_vec(),
            _ => self.encode(text),
        }
    }

    /// Encodes a trusted text in which control tokens are recognized; nothing is prepended.
    pub fn encode_special(&self, text: &str) -> Vec<u32> {
        self.encode_with(text, &Permission::All).expect(ENOUGH_MEMORY)
    }

    /// Encodes a rendered conversation.
    ///
    /// The segments are one text: their boundaries split no token, so the ids equal those of the reference tokenizer
    /// for the joined text, with one exception. A guarded token is recognized only if it lies wholly within trusted
    /// text (adjacent trusted segments count as one); anywhere else its characters are ordinary text.
    ///
    /// # Panics
    ///
    /// If there is no memory for the ids; [`Tokenizer::try_encode_segments`] returns an error then.
    pub fn encode_segments(&self, segments: &[Segment]) -> Vec<u32> {
        self.try_encode_segments(segments).expect(ENOUGH_MEMORY)
    }

    /// Encodes a conversation as [`Tokenizer::encode_segments`] does; fails with [`Error::OutOfMemory`] if there is no
    /// memory for it.
    pub fn try_encode_segments(&self, segments: &[Segment]) -> Result<Vec<u32>, Error> {
        let bytes = segments.iter().map(|segment| segment.text.len()).sum();
        let mut text = String::new();
        text.try_reserve_exact(bytes).map_err(|_| Error::OutOfMemory { bytes })?;
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for segment in segments.iter().filter(|segment| !segment.text.is_empty()) {
            let start = text.len();
            text.push_str(&segment.text);
            if segment.trusted {
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = text.len(),
                    _ => {
                        ranges.try_reserve(1).map_err(|_| Error::OutOfMemory { bytes })?;
                        ranges.push(start..text.len());
                    }
                }
            }
        }
        self.encode_with(&text, &Permission::Trusted { ranges: &ranges, guarded: &self.guarded })
    }

    fn encode_with(&self, text: &str, permission: &Permission<'_>) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        let mut result = ids.try_reserve(text.len() / 3);
        self.added.split(text, permission, &mut |fragment| {
            if result.is_ok() {
                result = match fragment {
                    Fragment::Token(id) => append(&mut ids, [id]),
                    Fragment::Text(range) => self.encode_fragment(text, range, permission, &mut ids),
                };
            }
        });
        result.map(|()| ids).map_err(|_| Error::OutOfMemory { bytes: text.len() })
    }

    fn encode_fragment(
        &self,
        text: &str,
        range: Range<usize>,
        permission: &Permission<'_>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        let fragment = &text[range.clone()];
        let first = range.start == 0;
        let normalized = self.normalizer.apply(fragment)?;
        if self.added_normalized.is_empty() {
            return self.pipeline.encode(&self.vocabulary, &normalized, first, ids);
        }
        let accept = BeforeNormalizing {
            permission,
            normalizer: &self.normalizer,
            fragment,
            offset: range.start,
            guarded: &self.guarded,
            origins: OnceCell::new(),
        };
        let mut result = Ok(());
        self.added_normalized.split(&normalized, &accept, &mut |part| {
            if result.is_ok() {
                result = match part {
                    Fragment::Token(id) => append(ids, [id]),
                    Fragment::Text(part) => {
                        self.pipeline.encode(&self.vocabulary, &normalized[part.clone()], first && part.start == 0, ids)
                    }
                };
            }
        });
        result
    }

    /// Returns the ids that the model expects before the text: usually a beginning-of-sequence token, or nothing.
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// Returns the ids that the model expects after the text; most models expect none.
    pub fn suffix(&self) -> &[u32] {
        &self.suffix
    }

    /// Returns a token's piece, bytes and kind; `None` past the vocabulary.
    pub fn token(&self, id: u32) -> Option<TokenInfo<'_>> {
        ((id as usize) < self.vocabulary.len()).then(|| TokenInfo {
            piece: self.vocabulary.piece(id),
            bytes: self.vocabulary.bytes(id),
            kind: self.vocabulary.kind(id),
        })
    }

    /// Returns the id of a piece, spelled as in the model file.
    pub fn id_of(&self, piece: &str) -> Option<u32> {
        self.vocabulary.id_of(piece)
    }

    /// Decodes ids to bytes. Ids past the vocabulary produce nothing. The space that encoding inserts before a text is
    /// removed, as the reference does.
    ///
    /// # Panics
    ///
    /// If there is no memory for the bytes.
    pub fn decode_bytes(&self, ids: &[u32], skip_control: bool) -> Vec<u8> {
        self.try_decode_bytes(ids, skip_control).expect(ENOUGH_MEMORY)
    }

    fn try_decode_bytes(&self, ids: &[u32], skip_control: bool) -> Result<Vec<u8>, TryReserveError> {
        let mut bytes = Vec::new();
        let mut start = true;
        for &id in ids {
            let token = self.decode_token(id, skip_control, &mut start);
            bytes.try_reserve(token.len())?;
            bytes.extend_from_slice(&token);
        }
        Ok(bytes)
    }

    /// Decodes ids as [`Tokenizer::decode`] does; fails with [`Error::OutOfMemory`] if there is no memory for the text.
    pub fn try_decode(&self, ids: &[u32], skip_control: bool) -> Result<String, Error> {
        let decode = || {
            let bytes = match String::from_utf8(self.try_decode_bytes(ids, skip_control)?) {
                Ok(text) => return Ok(text),
                Err(error) => error.into_bytes(),
            };
            let mut text = String::new();
            for chunk in bytes.utf8_chunks() {
                let replacement = if chunk.invalid().is_empty() { "" } else { "\u{FFFD}" };
                text.try_reserve(chunk.valid().len() + replacement.len())?;
                text.push_str(chunk.valid());
                text.push_str(replacement);
            }
            Ok(text)
        };
        decode().map_err(|_: TryReserveError| Error::OutOfMemory { bytes: size_of_val(ids) })
    }

    /// Decodes ids to text, with U+FFFD for bytes that are not UTF-8.
    pub fn decode(&self, ids: &[u32], skip_control: bool) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids, skip_control)).into_owned()
    }

    /// Returns the bytes that a token adds to a text, those of control tokens included. `at_start` is
    /// [`TextStream::is_at_start`] before the token: the space that encoding inserts before a text is removed there.
    pub fn shown_bytes(&self, id: u32, mut at_start: bool) -> Cow<'_, [u8]> {
        self.decode_token(id, false, &mut at_start)
    }

    /// Decodes one token. `start` is true at the beginning of the text, and is cleared at the first token that has
    /// bytes.
    pub(crate) fn decode_token(&self, id: u32, skip_control: bool, start: &mut bool) -> Cow<'_, [u8]> {
        if id as usize >= self.vocabulary.len()
            || (skip_control && matches!(self.vocabulary.kind(id), TokenKind::Control | TokenKind::Unknown))
        {
            return Cow::Borrowed(&[]);
        }
        let bytes = self.vocabulary.bytes(id);
        if !*start || bytes.is_empty() {
            return bytes;
        }
        *start = false;
        match self.leading_space {
            LeadingSpace::StripOne if bytes.starts_with(b" ") => Cow::Owned(bytes[1..].to_vec()),
            LeadingSpace::DropInFirst if self.vocabulary.kind(id) != TokenKind::Control => {
                Cow::Owned(bytes.iter().copied().filter(|&byte| byte != b' ').collect())
            }
            _ => bytes,
        }
    }

    /// Returns a stream that decodes ids one at a time.
    pub fn stream(&self, skip_control: bool) -> TextStream<&Tokenizer> {
        TextStream::new(self, skip_control)
    }

    /// Returns the beginning-of-sequence id.
    pub fn bos(&self) -> Option<u32> {
        self.named.bos
    }

    /// Returns the end-of-sequence id.
    pub fn eos(&self) -> Option<u32> {
        self.named.eos
    }

    /// Returns the end-of-turn id, if the model file names one beside [`Tokenizer::eos`].
    pub fn eot(&self) -> Option<u32> {
        self.named.eot
    }

    /// Returns the id that stands for text the model cannot spell.
    pub fn unknown(&self) -> Option<u32> {
        self.named.unknown
    }

    /// Returns the padding id.
    pub fn padding(&self) -> Option<u32> {
        self.named.padding
    }

    /// Returns every id that ends a reply.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }
}
