//! Byte-pair encoding by ranked merges: over bytes (GPT-2, Llama 3, Qwen) or over characters (Gemma's and Llama 2's
//! tokenizer.json). Called by the pipeline for each piece from the pre-tokenizer.

use std::collections::{HashMap, TryReserveError};
use std::hash::{BuildHasherDefault, Hasher};

use crate::algorithms::merge_loop::{Join, Pairs, Symbol, merge};
use crate::error::Error;
use crate::vocabulary::{Vocabulary, char_of_byte};

/// Hashes a pair of ids, each below 2^24, by one multiplication with random keys, so that a file cannot be built to
/// collide.
#[derive(Default)]
pub(crate) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        self.0 = crate::vocabulary::hash_bytes(bytes);
    }
    fn write_u64(&mut self, pair: u64) {
        self.0 = crate::vocabulary::hash_pair(pair);
    }
}

type MergeTable = HashMap<u64, Join, BuildHasherDefault<PairHasher>>;

fn pair_key(left: u32, right: u32) -> u64 {
    (left as u64) << 32 | right as u64
}

/// The symbols before any merge.
enum Alphabet {
    /// The id of each byte's token; `None` if the vocabulary lacks it.
    Bytes(Box<[Option<u32>; 256]>),
    /// Characters of the vocabulary. A character outside it is spelled in byte tokens, if there are any.
    Characters { byte_tokens: Option<Box<[u32; 256]>> },
}

pub(crate) struct Bpe {
    alphabet: Alphabet,
    merges: MergeTable,
    ignore_merges: bool,
    unknown: Option<u32>,
    fuse_unknown: bool,
}

/// The options of a BPE model beside its vocabulary and merges.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BpeOptions {
    /// Whether symbols are bytes in GPT-2's alphabet; otherwise they are characters.
    pub(crate) byte_level: bool,
    /// Whether characters outside the vocabulary are spelled in byte tokens.
    pub(crate) byte_fallback: bool,
    /// Whether a piece that is a token is used whole, without merging.
    pub(crate) ignore_merges: bool,
    /// The id for a symbol that has no token. Without one the symbol is dropped, as the reference does.
    pub(crate) unknown: Option<u32>,
    /// Whether a run of unknown symbols becomes one id.
    pub(crate) fuse_unknown: bool,
}

impl Bpe {
    /// Builds the merge table from `merges` in the order of their ranks. A merge that names a piece outside the
    /// vocabulary is an error. A merge that would produce a control token is ignored, so that no text can be merged
    /// into one.
    pub(crate) fn new<'m>(
        vocabulary: &Vocabulary,
        merges: impl Iterator<Item = (&'m str, &'m str)>,
        options: BpeOptions,
    ) -> Result<Bpe, Error> {
        let mut table = MergeTable::default();
        let mut joined = String::new();
        for (rank, (left, right)) in merges.enumerate() {
            let rank = u32::try_from(rank).map_err(|_| Error::invalid("merges", "fewer than 2^32 merges", rank))?;
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let find = |piece: &str| {
                vocabulary.id_of(piece).ok_or_else(|| {
                    Error::invalid(format!("merge {rank}"), "pieces of the vocabulary", format!("{piece:?}"))
                })
            };
            let (left, right, id) = (find(left)?, find(right)?, find(&joined)?);
            if vocabulary.is_mergeable(id) {
                table.entry(pair_key(left, right)).or_insert(Join { rank, id });
            }
        }
        let alphabet = if options.byte_level {
            let mut ids = Box::new([None; 256]);
            for (byte, id) in ids.iter_mut().enumerate() {
                let mut buffer = [0; 4];
                *id = vocabulary.mergeable(char_of_byte(byte as u8).encode_utf8(&mut buffer));
            }
            Alphabet::Bytes(ids)
        } else {
            let byte_tokens = options.byte_fallback.then(|| vocabulary.byte_tokens()).flatten();
            Alphabet::Characters { byte_tokens }
        };
        Ok(Bpe {
            alphabet,
            merges: table,
            ignore_merges: options.ignore_merges,
            unknown: options.unknown,
            fuse_unknown: options.fuse_unknown,
        })
    }

    /// Whether symbols are bytes in GPT-2's alphabet; otherwise they are characters.
    pub(crate) fn is_byte_level(&self) -> bool {
        matches!(self.alphabet, Alphabet::Bytes(_))
    }

    /// Whether a piece that is a token is used whole.
    pub(crate) fn ignores_merges(&self) -> bool {
        self.ignore_merges
    }

    /// Whether a character without a token is spelled in byte tokens.
    pub(crate) fn falls_back_to_bytes(&self) -> bool {
        matches!(self.alphabet, Alphabet::Characters { byte_tokens: Some(_) })
    }

    /// Returns the ids that merges produce.
    pub(crate) fn products(&self) -> impl Iterator<Item = u32> {
        self.merges.values().map(|join| join.id)
    }

    /// Whether adjacent symbols without a token are fused into one id, so that a piece must not be split further.
    pub(crate) fn fuses_unknown(&self) -> bool {
        self.fuse_unknown && !matches!(self.alphabet, Alphabet::Characters { byte_tokens: Some(_) })
    }

    /// Whether every symbol has at least one id, possibly the unknown one.
    pub(crate) fn covers_all_text(&self) -> bool {
        let is_covered = match &self.alphabet {
            Alphabet::Bytes(ids) => ids.iter().all(Option::is_some),
            Alphabet::Characters { byte_tokens } => byte_tokens.is_some(),
        };
        is_covered || (self.unknown.is_some() && !self.fuse_unknown)
    }

    pub(crate) fn forbid_merging(&mut self, id: u32) {
        self.merges.retain(|_, join| join.id != id);
    }

    /// Appends the ids of one piece. Fails if there is no memory for them.
    pub(crate) fn encode(
        &self,
        vocabulary: &Vocabulary,
        piece: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        let Alphabet::Characters { byte_tokens } = &self.alphabet else {
            return self.encode_bytes(vocabulary, piece.as_bytes(), scratch, ids);
        };
        if self.ignore_merges
            && let Some(id) = vocabulary.mergeable(piece)
        {
            return append(ids, [id]);
        }
        let symbols = &mut scratch.symbols;
        symbols.clear();
        symbols.try_reserve(piece.len())?;
        for (start, c) in piece.char_indices() {
            let len = c.len_utf8();
            match (vocabulary.mergeable(&piece[start..start + len]), byte_tokens) {
                (None, Some(tokens)) => {
                    for (at, &byte) in piece.as_bytes()[start..start + len].iter().enumerate() {
                        self.push_symbol(symbols, Some(tokens[byte as usize]), start + at, 1);
                    }
                }
                (id, _) => self.push_symbol(symbols, id, start, len),
            }
        }
        merge(symbols, self)?;
        append(ids, symbols.iter().map(|symbol| symbol.id))
    }

    /// Appends the ids of one piece of a byte-level model. A piece may end within a character. Fails if there is no
    /// memory for them.
    pub(crate) fn encode_bytes(
        &self,
        vocabulary: &Vocabulary,
        piece: &[u8],
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        let Alphabet::Bytes(table) = &self.alphabet else { return Ok(()) };
        if self.ignore_merges {
            scratch.spelled.clear();
            // A byte is a character of at most two bytes.
            scratch.spelled.try_reserve(2 * piece.len())?;
            scratch.spelled.extend(piece.iter().copied().map(char_of_byte));
            if let Some(id) = vocabulary.mergeable(&scratch.spelled) {
                return append(ids, [id]);
            }
        }
        let symbols = &mut scratch.symbols;
        symbols.clear();
        symbols.try_reserve(piece.len())?;
        for (start, &byte) in piece.iter().enumerate() {
            self.push_symbol(symbols, table[byte as usize], start, 1);
        }
        merge(symbols, self)?;
        append(ids, symbols.iter().map(|symbol| symbol.id))
    }

    fn push_symbol(&self, symbols: &mut Vec<Symbol>, id: Option<u32>, start: usize, len: usize) {
        let Some(id) = id.or(self.unknown) else { return };
        if self.fuse_unknown
            && Some(id) == self.unknown
            && let Some(last) = symbols.last_mut().filter(|last| last.id == id)
        {
            last.len += len as u32;
            return;
        }
        symbols.push(Symbol { id, start: start as u32, len: len as u32 });
    }
}

impl Pairs for Bpe {
    #[inline]
    fn join(&self, left: Symbol, right: Symbol) -> Option<Join> {
        self.merges.get(&pair_key(left.id, right.id)).copied()
    }
}

/// Appends ids; fails if there is no memory for them.
pub(crate) fn append(
    ids: &mut Vec<u32>,
    more: impl IntoIterator<Item = u32, IntoIter: ExactSizeIterator>,
) -> Result<(), TryReserveError> {
    let more = more.into_iter();
    ids.try_reserve(more.len())?;
    ids.extend(more);
    Ok(())
}

/// Buffers that the encoders reuse from piece to piece.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) symbols: Vec<Symbol>,
    pub(crate) spelled: String,
}
