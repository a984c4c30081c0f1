//! A compiler for the tiny model's vocabulary, and replies that are sampled at random from the masks of a grammar.

#![allow(dead_code, unreachable_pub)] // Each test and the example use a part of it.

use std::sync::{Arc, LazyLock};

use pellucid_checkpoint::Checkpoint;
use pellucid_grammar::{CompiledGrammar, Error, GrammarCompiler, GrammarSource};
use pellucid_sampling::{TokenConstraint, TokenMatcher};
use pellucid_tokenizer::Tokenizer;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pellucid/models/tiny.gguf");

pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let checkpoint = Checkpoint::open(TINY.as_ref()).unwrap();
    Arc::new(Tokenizer::from_checkpoint(&checkpoint).unwrap())
});

pub static COMPILER: LazyLock<GrammarCompiler> =
    LazyLock::new(|| GrammarCompiler::new(TOKENIZER.clone(), TOKENIZER.vocab_size()).unwrap());

pub fn compile(source: GrammarSource) -> Result<CompiledGrammar, Error> {
    COMPILER.compile(&source)
}

pub fn words() -> Vec<u32> {
    vec![0; TOKENIZER.vocab_size().div_ceil(32)]
}

pub fn allowed(words: &[u32]) -> Vec<u32> {
    (0..TOKENIZER.vocab_size() as u32).filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

pub fn mask(matcher: &mut dyn TokenMatcher) -> Vec<u32> {
    let mut words = words();
    matcher.mask(&mut words).unwrap();
    allowed(&words)
}

/// Generates numbers from a seed (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// Whether a reply ends within `max_tokens` if it closes what is open: it ends as soon as it may, and otherwise prefers
/// the tokens of one byte that close a string, an object or an array.
pub fn reaches_end(matcher: &mut dyn TokenMatcher, random: &mut Random, max_tokens: usize) -> bool {
    for _ in 0..max_tokens {
        if matcher.is_complete() || matcher.may_end() {
            return true;
        }
        let tokens = mask(matcher);
        assert!(!tokens.is_empty(), "a grammar that goes on allows a token");
        let closes = |id: &u32| matches!(&*TOKENIZER.token(*id).unwrap().bytes, b"\"" | b"}" | b"]");
        let token = tokens.iter().copied().find(closes).unwrap_or_else(|| tokens[random.below(tokens.len())]);
        matcher.accept(token).unwrap();
    }
    false
}

/// A reply that was sampled at random.
#[derive(Debug)]
pub struct Reply {
    pub text: String,
    /// Whether the grammar allowed the end, or the reply was cut off.
    pub is_complete: bool,
}

/// Samples a reply. Every second token is one that closes something, so that most replies end.
pub fn sample(grammar: &CompiledGrammar, random: &mut Random, max_tokens: usize) -> Reply {
    let mut matcher = grammar.matcher();
    let mut ids = Vec::new();
    let is_closing = |id: u32| {
        let token = TOKENIZER.token(id).unwrap();
        TOKENIZER.end_ids().contains(&id) || matches!(token.bytes.first(), Some(b'"' | b'}' | b']'))
    };
    for _ in 0..max_tokens {
        if matcher.is_complete() {
            break;
        }
        let tokens = mask(&mut *matcher);
        assert!(!tokens.is_empty(), "a grammar that goes on allows a token");
        let closing: Vec<u32> = tokens.iter().copied().filter(|&id| is_closing(id)).collect();
        let from = if random.below(2) == 0 && !closing.is_empty() { &closing } else { &tokens };
        let token = from[random.below(from.len())];
        if TOKENIZER.end_ids().contains(&token) {
            assert!(matcher.may_end(), "an end token is allowed only where the reply may end");
            matcher.accept(token).unwrap();
            break;
        }
        matcher.accept(token).unwrap();
        ids.push(token);
    }
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| TOKENIZER.token(id).unwrap().bytes.into_owned()).collect();
    Reply { text: String::from_utf8_lossy(&bytes).into_owned(), is_complete: matcher.is_complete() }
}
