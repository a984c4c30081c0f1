//! Parts that several targets share: inputs of several parts, files in memory, checks of an opened model, a small
//! tokenizer.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use pellucid_checkpoint::{Checkpoint, HuggingFace};
use pellucid_cpu::{CpuBackend, CpuOptions, Isa};
use pellucid_model::{Decoder, LoadOptions};
use pellucid_tokenizer::{TokenKind, Tokenizer};
use serde_json::{Value, json};

/// Maximum vocabulary and number of layers of a model that a target loads: loading is to be fuzzed, not arithmetic.
const MAX_LOADED_BYTES: usize = 1 << 16;

/// Divides an input at its first zero byte. The second part is empty if there is none.
pub fn two_parts(data: &[u8]) -> (&[u8], &[u8]) {
    match data.iter().position(|&byte| byte == 0) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &[]),
    }
}

/// A folder in memory that lasts as long as the process; a temporary one where the system has no `/dev/shm`.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let folder = parent.join(format!("pellucid-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for inputs");
    folder
});

/// Writes a file of the folder in memory and returns its path. A new file each time: the one before may be mapped.
pub fn file(name: &str, contents: &[u8]) -> PathBuf {
    let path = FOLDER.join(name);
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, contents).expect("a file of an input's size");
    path
}

pub fn folder() -> &'static Path {
    &FOLDER
}

/// Checks everything that an accepted checkpoint promises, then reads its configuration and loads it.
pub fn check_checkpoint(checkpoint: &Checkpoint, file_bytes: usize) {
    let (mut first, mut last) = (usize::MAX, 0);
    for info in checkpoint.tensors() {
        let view = checkpoint.tensor(&info.name).expect("a listed tensor is found by its name");
        assert!(!info.shape.contains(&0), "{} has a dimension of zero", info.name);
        let cols = info.shape.last().copied().unwrap_or(1);
        let row = info.dtype.bytes_for(cols).expect("whole blocks in a row");
        let bytes = view.bytes();
        assert_eq!(bytes.len(), row * (info.num_elements() / cols), "{}: size", info.name);
        // Reads every byte: one beyond the file would be a signal.
        std::hint::black_box(bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)));
        // The values of an encoded tensor are not in the file.
        if info.encoding().is_none() {
            first = first.min(bytes.as_ptr() as usize);
            last = last.max(bytes.as_ptr() as usize + bytes.len());
        }
    }
    if last > 0 {
        assert!(last - first <= file_bytes, "tensors span {} bytes of a file of {file_bytes}", last - first);
    }
    let Ok(config) = pellucid_model::read_config(checkpoint) else { return };
    assert!(config.vocab_size > 0 && config.context_len > 0, "{config:?}");
    if file_bytes <= MAX_LOADED_BYTES {
        let backend: Arc<CpuBackend> = BACKEND.clone();
        let options = LoadOptions { context_len: Some(config.context_len.min(64)), ..LoadOptions::default() };
        let _ = Decoder::load(checkpoint, backend, options, &mut |_, _| ());
    }
}

static BACKEND: LazyLock<Arc<CpuBackend>> =
    LazyLock::new(|| Arc::new(CpuBackend::new(CpuOptions { num_threads: 1, isa: Isa::best() }).expect("a processor")));

/// Checks a tokenizer on a text: ids, their bounds, and the text that they decode to.
pub fn check_tokenizer(tokenizer: &Tokenizer, text: &str) {
    let ids = tokenizer.encode_within(text);
    let size = tokenizer.vocab_size() as u32;
    assert!(ids.iter().all(|&id| id < size), "an id beyond {size} in {ids:?}");
    assert!(tokenizer.min_ids(text.len()) <= ids.len(), "{} ids are fewer than the lower bound", ids.len());
    for &id in &ids {
        let token = tokenizer.token(id).expect("an id of the vocabulary");
        // Text that is not in the vocabulary becomes the token that the file declares for it, whichever that is.
        let is_unknown = token.kind == TokenKind::Unknown || tokenizer.unknown() == Some(id);
        assert!(!tokenizer.is_guarded(id) || is_unknown, "text became {:?}", token.piece);
    }
    let whole = tokenizer.decode(&ids, true);
    let mut stream = tokenizer.stream(true);
    let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
    streamed.push_str(&stream.finish());
    assert_eq!(streamed, whole, "the stream of {ids:?}");
}

/// A control token whose characters no template of the seeds contains: see the target `chat_template`.
pub const CONTROL: &str = "⟦§⟧";

/// A tokenizer of bytes and letters, with control tokens.
pub static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let pieces = ["<unk>", "<s>", "</s>", CONTROL].map(str::to_owned).into_iter();
    let pieces = pieces.chain((0..=255).map(|byte| format!("<0x{byte:02X}>"))).chain(('a'..='z').map(String::from));
    let vocabulary: serde_json::Map<String, Value> = pieces.enumerate().map(|(id, piece)| (piece, json!(id))).collect();
    let added: Vec<Value> = ["<unk>", "<s>", "</s>", CONTROL]
        .iter()
        .enumerate()
        .map(|(id, piece)| {
            json!({ "id": id, "content": piece, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, { "type": "Fuse" }] },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
                   "vocab": vocabulary, "merges": [] },
    });
    let config = json!({ "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>" });
    Tokenizer::from_hugging_face(&hugging_face(tokenizer.to_string(), Some(config))).expect("a tokenizer")
});

/// Returns a model folder's files with this `tokenizer.json`.
pub fn hugging_face(tokenizer: String, tokenizer_config: Option<Value>) -> HuggingFace {
    HuggingFace {
        config: json!({ "model_type": "llama" }),
        generation_config: None,
        tokenizer: Some(tokenizer),
        tokenizer_config,
        chat_template: None,
        pooling_config: None,
        sentence_config: None,
    }
}
