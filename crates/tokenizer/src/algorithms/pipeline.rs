//! From a fragment of normalized text to ids: the pre-tokenizer splits it into pieces, and the model encodes each
//! piece. Called by the tokenizer for every fragment between added tokens; it knows nothing of added or control tokens.

use std::borrow::Cow;
use std::collections::{HashMap, TryReserveError};

use crate::algorithms::bpe::{Bpe, Scratch};
use crate::algorithms::joinable_pairs::JoinablePairs;
use crate::algorithms::pretokenize::{Prepend, Stage, Step, run_steps, split_all};
use crate::algorithms::sentencepiece::SentencePieceBpe;
use crate::algorithms::unigram::Unigram;
use crate::algorithms::wordpiece::WordPiece;
use crate::vocabulary::{METASPACE, Vocabulary, byte_of_char, char_of_byte};

/// The treatment of spaces before the text is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpaceRule {
    Keep,
    /// A space is inserted before a fragment that does not begin with one (`ByteLevel` with `add_prefix_space`).
    Prefix,
    /// Spaces become U+2581. With `split`, each U+2581 starts a new piece.
    Metaspace {
        prepend: Prepend,
        split: bool,
    },
}

pub(crate) enum PreTokenizer {
    Ours {
        space: SpaceRule,
        stages: Vec<Stage>,
        /// Stages that run after bytes were spelled in GPT-2's alphabet, as in Falcon's tokenizer.json.
        spelled_stages: Vec<Stage>,
    },
    /// Any other list of steps.
    General {
        steps: Vec<Step>,
        /// Whether its pieces are spelled in GPT-2's alphabet.
        spelled: bool,
    },
}

pub(crate) enum Model {
    Bpe(Bpe),
    SentencePieceBpe(SentencePieceBpe),
    Unigram(Unigram),
    WordPiece(WordPiece),
}

pub(crate) struct Pipeline {
    pub(crate) pre_tokenizer: PreTokenizer,
    pub(crate) model: Model,
    /// Extra splits that change no id; `None` if the pre-tokenizer splits enough or more splits could change ids.
    pub(crate) joinable_pairs: Option<JoinablePairs>,
}

/// Minimum bytes of a fragment for which caching pays; shorter fragments repeat too few pieces.
const CACHE_FROM_BYTES: usize = 512;
/// Maximum bytes of a cached piece; longer pieces rarely repeat.
const CACHED_PIECE_BYTES: usize = 48;

/// Encodes pieces and caches those of the current fragment: the ids of a repeated piece are copied.
struct PieceEncoder<'p, 't> {
    model: &'p Model,
    vocabulary: &'p Vocabulary,
    seen: Option<HashMap<&'t [u8], (usize, usize)>>,
    scratch: Scratch,
    ids: &'p mut Vec<u32>,
    /// The first failure; the pieces after it are not encoded.
    result: Result<(), TryReserveError>,
}

impl<'t> PieceEncoder<'_, 't> {
    fn piece(&mut self, piece: &'t str) {
        self.cached(piece.as_bytes(), |this| this.encode(piece));
    }

    /// Encodes a piece without caching it.
    fn passing_piece(&mut self, piece: &str, is_spelled: bool) {
        if is_spelled {
            self.spelled_piece(piece);
        } else if self.result.is_ok() {
            self.result = self.encode(piece);
        }
    }

    fn encode(&mut self, piece: &str) -> Result<(), TryReserveError> {
        match self.model {
            Model::Bpe(bpe) => bpe.encode(self.vocabulary, piece, &mut self.scratch, self.ids),
            Model::SentencePieceBpe(spm) => spm.encode(self.vocabulary, piece, &mut self.scratch, self.ids),
            Model::Unigram(unigram) => unigram.encode(self.vocabulary, piece, self.ids),
            Model::WordPiece(words) => words.encode(self.vocabulary, piece, self.ids),
        }
    }

    /// Encodes a piece in GPT-2's alphabet. A character outside the alphabet did not come from bytes and is skipped.
    fn spelled_piece(&mut self, piece: &str) {
        let Model::Bpe(bpe) = self.model else { return };
        if self.result.is_ok() {
            let mut bytes = Vec::new();
            self.result = bytes.try_reserve(piece.len()).and_then(|()| {
                bytes.extend(piece.chars().filter_map(byte_of_char));
                bpe.encode_bytes(self.vocabulary, &bytes, &mut self.scratch, self.ids)
            });
        }
    }

    fn cached(&mut self, key: &'t [u8], encode: impl FnOnce(&mut Self) -> Result<(), TryReserveError>) {
        if self.result.is_err() {
            return;
        }
        if key.len() > CACHED_PIECE_BYTES {
            self.result = encode(self);
            return;
        }
        if let Some(&(start, end)) = self.seen.as_ref().and_then(|seen| seen.get(key)) {
            self.result = self.ids.try_reserve(end - start);
            if self.result.is_ok() {
                self.ids.extend_from_within(start..end);
            }
            return;
        }
        let start = self.ids.len();
        self.result = encode(self);
        let end = self.ids.len();
        // Without memory for the cache, the piece is encoded again the next time.
        if let Some(seen) = &mut self.seen
            && self.result.is_ok()
            && seen.try_reserve(1).is_ok()
        {
            seen.insert(key, (start, end));
        }
    }
}

impl Pipeline {
    /// Appends the ids of a normalized fragment; `first` is true for the first fragment of the text. Fails if there is
    /// no memory for them.
    pub(crate) fn encode(
        &self,
        vocabulary: &Vocabulary,
        fragment: &str,
        first: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        if fragment.is_empty() {
            return Ok(());
        }
        let spaced = match &self.pre_tokenizer {
            PreTokenizer::Ours { space, .. } => apply_space_rule(*space, fragment, first)?,
            PreTokenizer::General { .. } => Cow::Borrowed(fragment),
        };
        let seen = (spaced.len() >= CACHE_FROM_BYTES).then(HashMap::new);
        let scratch = Scratch::default();
        let mut encoder = PieceEncoder { model: &self.model, vocabulary, seen, scratch, ids, result: Ok(()) };
        match &self.pre_tokenizer {
            PreTokenizer::Ours { space, stages, spelled_stages } => {
                let mut cut = |piece| match &self.joinable_pairs {
                    Some(joinable_pairs) => joinable_pairs.split(piece, &mut |part| encoder.piece(part)),
                    None if spelled_stages.is_empty() => encoder.piece(piece),
                    None => {
                        let spelled: String = piece.bytes().map(char_of_byte).collect();
                        split_all(spelled_stages, &spelled, &mut |part| encoder.spelled_piece(part));
                    }
                };
                match space {
                    SpaceRule::Metaspace { split: true, .. } => {
                        split_before_marks(&spaced, &mut |piece| split_all(stages, piece, &mut cut))
                    }
                    _ => split_all(stages, &spaced, &mut cut),
                }
            }
            PreTokenizer::General { steps, spelled } => {
                // These pieces may live no longer than one call, so they are not cached.
                let done = run_steps(steps, fragment, first, &mut |piece| encoder.passing_piece(piece, *spelled));
                encoder.result = encoder.result.and(done);
            }
        }
        encoder.result
    }

    /// Whether every character has at least one id: none is dropped, and no run shares an unknown token.
    pub(crate) fn covers_all_text(&self) -> bool {
        let covers_all_text = match &self.model {
            Model::Bpe(bpe) => bpe.covers_all_text(),
            Model::SentencePieceBpe(spm) => spm.covers_all_text(),
            Model::Unigram(unigram) => unigram.covers_all_text(),
            // A whole word may share one unknown token.
            Model::WordPiece(_) => false,
        };
        covers_all_text && matches!(self.pre_tokenizer, PreTokenizer::Ours { .. })
    }

    pub(crate) fn forbid_merging(&mut self, id: u32) {
        if let Model::Bpe(bpe) = &mut self.model {
            bpe.forbid_merging(id);
        }
    }
}

fn apply_space_rule(rule: SpaceRule, fragment: &str, first: bool) -> Result<Cow<'_, str>, TryReserveError> {
    Ok(match rule {
        SpaceRule::Keep => Cow::Borrowed(fragment),
        SpaceRule::Prefix if fragment.starts_with(' ') => Cow::Borrowed(fragment),
        SpaceRule::Prefix => {
            let mut prefixed = String::new();
            prefixed.try_reserve(1 + fragment.len())?;
            prefixed.push(' ');
            prefixed.push_str(fragment);
            Cow::Owned(prefixed)
        }
        SpaceRule::Metaspace { prepend, .. } => {
            let num_spaces = fragment.bytes().filter(|byte| *byte == b' ').count();
            let mut marked = String::new();
            marked.try_reserve(fragment.len() + (num_spaces + 1) * METASPACE.len_utf8())?;
            let wanted = match prepend {
                Prepend::Always => true,
                Prepend::First => first,
                Prepend::Never => false,
            };
            if wanted && !fragment.starts_with([' ', METASPACE]) {
                marked.push(METASPACE);
            }
            marked.extend(fragment.chars().map(|c| if c == ' ' { METASPACE } else { c }));
            Cow::Owned(marked)
        }
    })
}

fn split_before_marks<'t>(text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let mut start = 0;
    for (at, _) in text.match_indices(METASPACE).filter(|(at, _)| *at > 0) {
        emit(&text[start..at]);
        start = at;
    }
    emit(&text[start..]);
}
