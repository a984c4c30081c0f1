//! The vocabulary of a model as the parser needs it: a trie over the bytes of the tokens, built once for each model.
//!
//! Tokens that mark structure have no bytes in the trie: control tokens, unused ids, and the tokens that the chat
//! template uses, such as `<tool_call>`. No grammar can produce them; their characters can still be spelled with other
//! tokens. End tokens are the exception: the parser allows them where the reply may end.

use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use pellucid_tokenizer::{TokenInfo, TokenKind, Tokenizer};

use crate::Error;
use crate::spelling::Characters;

/// Tokens of more bytes are left out of the trie, which has 10 bits for a depth.
const MAX_TOKEN_BYTES: usize = 1000;
/// Maximum bytes of all tokens together: the trie has 22 bits for the number of its nodes.
const MAX_VOCABULARY_BYTES: usize = 4_000_000;

/// Tokens of a model, and the tokenizer that splits forced text as the model expects it.
pub(crate) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    /// Whether every byte of UTF-8 is a token, so that any text can be spelled. Only then may the parser force text:
    /// it would go on behind forced text that has no tokens.
    spells_all: bool,
}

impl Vocabulary {
    /// `vocab_size` is the number of logits, which may exceed the number of tokens.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize) -> Result<Vocabulary, Error> {
        let end_ids: Vec<u32> = tokenizer.end_ids().iter().copied().filter(|&id| (id as usize) < vocab_size).collect();
        let Some(&first_end) = end_ids.first() else {
            return Err(Error::Vocabulary("it has no token that ends a reply".into()));
        };
        let words: Vec<Vec<u8>> =
            (0..vocab_size as u32).map(|id| text_of(&tokenizer, id).unwrap_or_default()).collect();
        let num_bytes: usize = words.iter().map(Vec::len).sum();
        if num_bytes > MAX_VOCABULARY_BYTES {
            let problem =
                format!("its tokens have {num_bytes} bytes, but at most {MAX_VOCABULARY_BYTES} are supported");
            return Err(Error::Vocabulary(problem));
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, first_end), &words).with_eos_tokens(&end_ids);
        let is_utf8 = |byte: &u8| !matches!(byte, 0xC0 | 0xC1 | 0xF5..);
        let spells_all = (0..=u8::MAX).filter(is_utf8).all(|byte| trie.token_id(&[byte]).is_some());
        Ok(Vocabulary { trie, tokenizer, spells_all })
    }

    /// Returns the characters, if they do not spell every text.
    pub(crate) fn characters(&self) -> Option<Characters> {
        Characters::new(&self.trie, self.spells_all)
    }

    pub(crate) fn shared(self) -> TokEnv {
        Arc::new(self)
    }

    fn spells(&self, ids: &[u32], text: &[u8]) -> bool {
        let mut rest = text;
        ids.iter().all(|&id| {
            let bytes = self.trie.token(id);
            let is_next = !bytes.is_empty() && rest.starts_with(bytes);
            rest = if is_next { &rest[bytes.len()..] } else { rest };
            is_next
        }) && rest.is_empty()
    }
}

/// Whether a token marks structure, so that a grammar produces it by its id only.
pub(crate) fn is_structure(tokenizer: &Tokenizer, id: u32) -> bool {
    let is_text =
        |token: TokenInfo<'_>| matches!(token.kind, TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte);
    !tokenizer.token(id).is_some_and(is_text) || tokenizer.is_guarded(id) || tokenizer.end_ids().contains(&id)
}

/// Returns the bytes that a token adds to a reply; `None` for a token that a grammar must not produce.
fn text_of(tokenizer: &Tokenizer, id: u32) -> Option<Vec<u8>> {
    let token = tokenizer.token(id)?;
    // The byte 0xFF occurs in no UTF-8 text, and the parser uses it to mark special tokens.
    let is_usable = !token.bytes.contains(&0xFF) && token.bytes.len() <= MAX_TOKEN_BYTES;
    (is_usable && !is_structure(tokenizer, id)).then(|| token.bytes.into_owned())
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Splits text that the grammar forces into tokens, as the tokenizer would.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        if let Ok(text) = std::str::from_utf8(bytes) {
            for ids in [Tokenizer::encode, Tokenizer::encode_within].map(|encode| encode(&self.tokenizer, text)) {
                if self.spells(&ids, bytes) {
                    return ids;
                }
            }
        }
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.spells_all
    }
}
