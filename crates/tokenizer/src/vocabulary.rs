//! The vocabulary: the piece, kind and bytes of every id, and the id of every piece.
//!
//! All encoders and the decoder look tokens up here. It knows how a piece spells bytes, and nothing about how text is
//! split.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::error::Error;

/// The purpose of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Marks structure (turns, beginning and end); never produced from untrusted text.
    Control,
    /// Text that is cut out before everything else, such as `<think>` or a run of spaces.
    UserDefined,
    /// One raw byte, written `<0xE2>`.
    Byte,
    /// Stands for text that the model cannot spell.
    Unknown,
    /// An id that no text is encoded to.
    Unused,
}

/// A token as returned by [`crate::Tokenizer::token`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenInfo<'v> {
    /// The piece as the model file spells it: `Ġhello`, `▁hello`, `<0x0A>`.
    pub piece: &'v str,
    /// The bytes that it stands for; not always whole characters.
    pub bytes: Cow<'v, [u8]>,
    pub kind: TokenKind,
}

/// The encoding of bytes in normal pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// One character per byte, in GPT-2's printable alphabet.
    ByteLevel,
    /// UTF-8, with U+2581 for a space.
    Metaspace,
    /// UTF-8, with `##` before a piece that continues a word. All others follow a space.
    WordPiece,
}

/// Maximum size of a vocabulary. The largest in use has 262,144 tokens; tables of this size still fit in memory.
pub(crate) const MAX_TOKENS: usize = 1 << 24;

const EMPTY_SLOT: u32 = u32::MAX;
pub(crate) const METASPACE: char = '\u{2581}';
/// Mark of a WordPiece token that continues a word.
pub(crate) const CONTINUATION: &str = "##";

pub(crate) struct Vocabulary {
    /// All pieces, concatenated; piece `id` ends at `ends[id]`.
    text: String,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Whether merging may produce this id; false for control tokens and for tokens that a chat template uses as
    /// structure.
    mergeable: Vec<bool>,
    /// Hash table of ids with open addressing; its size is a power of two, and it is at most half full.
    slots: Vec<u32>,
    spelling: Spelling,
    /// Bytes of the few tokens that stand for other text than their piece spells.
    other_bytes: HashMap<u32, Vec<u8>>,
}

impl Vocabulary {
    /// Builds the table from pieces in the order of their ids. Of equal pieces, [`Vocabulary::id_of`] finds the first.
    pub(crate) fn new<'p>(
        pieces: impl ExactSizeIterator<Item = (&'p str, TokenKind)>,
        spelling: Spelling,
    ) -> Result<Vocabulary, Error> {
        let count = pieces.len();
        if count == 0 || count > MAX_TOKENS {
            return Err(Error::invalid("tokens", format!("1 to {MAX_TOKENS} tokens"), count));
        }
        let mut vocabulary = Vocabulary {
            text: String::new(),
            ends: Vec::with_capacity(count),
            kinds: Vec::with_capacity(count),
            mergeable: Vec::with_capacity(count),
            slots: vec![EMPTY_SLOT; (count * 2).next_power_of_two()],
            spelling,
            other_bytes: HashMap::new(),
        };
        for (piece, kind) in pieces {
            vocabulary.push(piece, kind)?;
        }
        Ok(vocabulary)
    }

    fn push(&mut self, piece: &str, kind: TokenKind) -> Result<(), Error> {
        let id = self.ends.len() as u32;
        self.text.push_str(piece);
        let end = u32::try_from(self.text.len())
            .map_err(|_| Error::invalid("tokens", "less than 4 GiB of token text", self.text.len()))?;
        self.ends.push(end);
        self.kinds.push(kind);
        self.mergeable.push(matches!(kind, TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte));
        if !piece.is_empty() {
            let slot = self.slot(piece.as_bytes());
            if self.slots[slot] == EMPTY_SLOT {
                self.slots[slot] = id;
            }
        }
        Ok(())
    }

    /// Returns the slot that holds this piece, or the empty slot for it.
    fn slot(&self, piece: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash_bytes(piece) as usize & mask;
        while self.slots[slot] != EMPTY_SLOT && self.piece_bytes(self.slots[slot]) != piece {
            slot = (slot + 1) & mask;
        }
        slot
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    fn range(&self, id: u32) -> std::ops::Range<usize> {
        let id = id as usize;
        let start = if id == 0 { 0 } else { self.ends[id - 1] as usize };
        start..self.ends[id] as usize
    }

    fn piece_bytes(&self, id: u32) -> &[u8] {
        &self.text.as_bytes()[self.range(id)]
    }

    /// Returns a token's piece. Panics past the vocabulary; callers check with [`Vocabulary::len`].
    pub(crate) fn piece(&self, id: u32) -> &str {
        &self.text[self.range(id)]
    }

    pub(crate) fn kind(&self, id: u32) -> TokenKind {
        self.kinds[id as usize]
    }

    pub(crate) fn id_of(&self, piece: &str) -> Option<u32> {
        let id = self.slots[self.slot(piece.as_bytes())];
        (id != EMPTY_SLOT).then_some(id)
    }

    /// Returns the id of a piece if ordinary text may become that token.
    pub(crate) fn mergeable(&self, piece: &str) -> Option<u32> {
        self.id_of(piece).filter(|&id| self.is_mergeable(id))
    }

    pub(crate) fn is_mergeable(&self, id: u32) -> bool {
        self.mergeable[id as usize]
    }

    /// From now on, only a match of the whole piece in trusted text produces this id.
    pub(crate) fn forbid_merging(&mut self, id: u32) {
        self.mergeable[id as usize] = false;
    }

    /// Returns the ids of the byte tokens `<0x00>` to `<0xFF>`, or `None` unless the vocabulary has all 256.
    pub(crate) fn byte_tokens(&self) -> Option<Box<[u32; 256]>> {
        let mut ids = Box::new([0; 256]);
        for (byte, id) in ids.iter_mut().enumerate() {
            *id = self.mergeable(&format!("<0x{byte:02X}>"))?;
        }
        Some(ids)
    }

    /// Sets the text that a token decodes to, if that differs from its piece: a token that matches normalized text
    /// decodes to normalized text.
    pub(crate) fn set_text(&mut self, id: u32, text: &str) {
        self.other_bytes.insert(id, text.replace(METASPACE, " ").into_bytes());
    }

    /// Returns the bytes that a token decodes to.
    pub(crate) fn bytes(&self, id: u32) -> Cow<'_, [u8]> {
        if let Some(bytes) = self.other_bytes.get(&id) {
            return Cow::Borrowed(bytes);
        }
        let piece = self.piece(id);
        match (self.kind(id), self.spelling) {
            (TokenKind::Byte, _) => match parse_byte_piece(piece) {
                Some(byte) => Cow::Owned(vec![byte]),
                None => Cow::Borrowed(piece.as_bytes()),
            },
            (TokenKind::Normal | TokenKind::Unused, Spelling::ByteLevel) => {
                // A piece with a character outside the alphabet is not byte-level: it decodes to itself.
                piece.chars().map(byte_of_char).collect::<Option<Vec<u8>>>().map_or(piece.as_bytes().into(), Cow::Owned)
            }
            (TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused, Spelling::Metaspace)
                if piece.contains(METASPACE) =>
            {
                Cow::Owned(piece.replace(METASPACE, " ").into_bytes())
            }
            (_, Spelling::WordPiece) => match piece.strip_prefix(CONTINUATION) {
                Some(rest) if !rest.is_empty() => Cow::Borrowed(rest.as_bytes()),
                _ => Cow::Owned(format!(" {piece}").into_bytes()),
            },
            _ => Cow::Borrowed(piece.as_bytes()),
        }
    }
}

/// Returns the byte of a piece such as `<0xE2>`.
pub(crate) fn parse_byte_piece(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Maps a byte to GPT-2's printable alphabet: a printable byte to itself, the others to U+0100 and up, in order.
pub(crate) fn char_of_byte(byte: u8) -> char {
    match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => byte as char,
        // 33 bytes up to the space, then 0x7F to 0xA0, then 0xAD.
        0x00..=0x20 => char::from_u32(0x100 + byte as u32).unwrap_or(' '),
        0x7F..=0xA0 => char::from_u32(0x121 + (byte - 0x7F) as u32).unwrap_or(' '),
        0xAD => '\u{143}',
    }
}

/// The inverse of [`char_of_byte`].
pub(crate) fn byte_of_char(c: char) -> Option<u8> {
    match c as u32 {
        point @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(point as u8),
        point @ 0x100..=0x120 => Some((point - 0x100) as u8),
        point @ 0x121..=0x142 => Some((point - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Random keys of [`hash_bytes`], chosen once per process: the author of a model file cannot know which pieces collide,
/// and so cannot make loading slow. No result depends on them.
static HASH_KEYS: LazyLock<[u64; 2]> = LazyLock::new(|| {
    let random = RandomState::new();
    [random.hash_one(0), random.hash_one(1)]
});

fn folded_product(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b | 1);
    product as u64 ^ (product >> 64) as u64
}

/// Hashes two ids packed into one number.
pub(crate) fn hash_pair(pair: u64) -> u64 {
    let [start, factor] = *HASH_KEYS;
    folded_product(start ^ pair, factor)
}

/// A folded-multiply hash: for keys as short as pieces, much cheaper than the hash of the standard library.
pub(crate) fn hash_bytes(bytes: &[u8]) -> u64 {
    let [start, factor] = *HASH_KEYS;
    let fold = |hash: u64, word: u64| folded_product(hash ^ word, factor);
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
    let chunks = bytes.chunks_exact(8);
    let tail = word(chunks.remainder());
    let hash = chunks.fold(start ^ bytes.len() as u64, |hash, chunk| fold(hash, word(chunk)).rotate_left(23));
    fold(fold(hash, tail), start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut seen = std::collections::HashSet::new();
        for byte in 0..=255u8 {
            let c = char_of_byte(byte);
            assert!(seen.insert(c));
            assert_eq!(byte_of_char(c), Some(byte));
        }
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(byte_of_char(' '), None);
    }

    #[test]
    fn pieces_are_found_and_spelled() {
        let pieces = [
            ("Ġa", TokenKind::Normal),
            ("<0x0A>", TokenKind::Byte),
            ("<s>", TokenKind::Control),
            ("中", TokenKind::Normal),
        ];
        let vocabulary = Vocabulary::new(pieces.into_iter(), Spelling::ByteLevel).unwrap();
        assert_eq!(vocabulary.id_of("<s>"), Some(2));
        assert_eq!(vocabulary.mergeable("<s>"), None);
        assert_eq!(vocabulary.id_of("b"), None);
        assert_eq!(&*vocabulary.bytes(0), b" a");
        assert_eq!(&*vocabulary.bytes(1), b"\n");
        assert_eq!(&*vocabulary.bytes(3), "中".as_bytes());
    }

    /// Without random keys, these pieces of eight bytes would all hash to one slot: they invert the multiplication.
    #[test]
    fn crafted_pieces_do_not_collide() {
        const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
        let inverse = (0..6).fold(FACTOR, |x, _| x.wrapping_mul(2u64.wrapping_sub(FACTOR.wrapping_mul(x))));
        let piece = |high: u64| {
            let before_tail = (high << 32 | high).wrapping_mul(inverse).rotate_right(23);
            (before_tail.wrapping_mul(inverse) ^ 8u64.rotate_left(23)).to_le_bytes()
        };
        let slots: std::collections::HashSet<u64> =
            (0..1000u64).map(|n| hash_bytes(&piece(n * 0x9_E377)) & 0xFFFF).collect();
        assert!(slots.len() > 900, "1000 pieces in {} of 65536 slots", slots.len());
    }
}
