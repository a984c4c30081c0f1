//! A tokenizer with a token for every byte, and a model without weights behind a running engine.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::HuggingFace;
use pellucid_engine::{Engine, EngineHandle, EngineOptions, Overcommit, Request};
use pellucid_generate::LoadedModel;
use pellucid_sampling::SamplingParams;
use pellucid_tensor::DType;
use pellucid_testing::FakeModel;
use pellucid_tokenizer::{ChatTemplate, DateTime, Tokenizer};

pub(crate) const CONTEXT_LEN: usize = 2048;
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
     {% if add_generation_prompt %}assistant:{% endif %}";

/// The byte-level tokenizer of the tokenizer crate's tests.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    tokenizer_of("gpt2")
}

/// A tokenizer of the tokenizer crate's tests.
pub(crate) fn tokenizer_of(name: &str) -> Arc<Tokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tokenizer/fixtures/tokenizers");
    let path = folder.join(format!("{name}.json"));
    let folder = HuggingFace {
        config: serde_json::json!({}),
        generation_config: None,
        tokenizer: Some(std::fs::read_to_string(path).unwrap()),
        tokenizer_config: None,
        chat_template: None,
        ..HuggingFace::default()
    };
    Arc::new(Tokenizer::from_hugging_face(&folder).unwrap())
}

pub(crate) fn engine(vocab_size: usize) -> Engine {
    let model = FakeModel::new(vocab_size, CONTEXT_LEN);
    let backend = model.backend();
    let options = EngineOptions {
        num_blocks: 512,
        block_len: 16,
        kv_dtype: DType::F32,
        max_sequences: 4,
        step_tokens: 64,
        chunk_len: 64,
        max_waiting: 4,
        overcommit: Overcommit::Never,
        secret: [0; 32],
        snapshot_distance: None,
    };
    Engine::new(Box::new(model), backend, options).unwrap()
}

pub(crate) fn model() -> LoadedModel {
    let tokenizer = tokenizer();
    let vocab_size = tokenizer.vocab_size();
    LoadedModel {
        aliases: Vec::new(),
        id: "fake".into(),
        fingerprint: String::new(),
        template: Some(ChatTemplate::compile(TEMPLATE, &tokenizer).unwrap()),
        template_error: None,
        context_len: CONTEXT_LEN,
        vocab_size,
        sampling: Default::default(),
        details: Default::default(),
        created: 0,
        grammars: Default::default(),
        thinking: Default::default(),
        guards: Default::default(),
        calling: Default::default(),
        engine: EngineHandle::start(engine(vocab_size)),
        now: || DateTime { year: 2026, month: 11, day: 17, hour: 12, minute: 0, second: 0 },
        tokenizer,
    }
}

/// A request whose reply has `max_tokens` tokens: it has no end tokens.
pub(crate) fn request(model: &LoadedModel, text: &str, max_tokens: usize) -> Request {
    let sampling = SamplingParams { seed: 5, ..SamplingParams::default() };
    let ids = model.prompts().encode_text(text).unwrap();
    Request { max_tokens: Some(max_tokens), ..Request::new(ids, sampling) }
}
