//! A tiny encoder of the goldens, with a vocabulary of single letters.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::EmbeddingHandle;
use pellucid_generate::{LoadedEmbedder, ShorterVectors};
use pellucid_model::{Encoder, LoadOptions};
use pellucid_testing::cpu;
use pellucid_tokenizer::Tokenizer;

pub const VECTORS: &str = "vectors";
/// Values of a vector, and the only shorter length that is allowed.
pub const DIMENSIONS: usize = 48;
pub const SHORTER: usize = 16;

fn checkpoint() -> Checkpoint {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/encoders/bert");
    Checkpoint::open(&folder).unwrap()
}

/// Returns the tokenizer: a word has a token for each letter and digit.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_checkpoint(&checkpoint()).unwrap()
}

pub fn load(max_waiting: usize) -> LoadedEmbedder {
    let (checkpoint, options) = (checkpoint(), LoadOptions::default());
    let encoder = Encoder::load(&checkpoint, cpu(Isa::best(), 1).unwrap(), None, options, &mut |_, _| ()).unwrap();
    LoadedEmbedder {
        id: VECTORS.into(),
        aliases: vec!["text-embedding-3-small".into()],
        fingerprint: "pellucid-test-vectors".into(),
        tokenizer: Arc::new(tokenizer()),
        shorter: ShorterVectors::Listed(vec![SHORTER]),
        created: 1_700_000_000,
        handle: EmbeddingHandle::start(Box::new(encoder), max_waiting),
    }
}
