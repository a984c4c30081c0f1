//! The goldens made by the reference implementation, and a plain way to run a model on them. For tests, and for `pellucid selftest`, which
//! checks a device on a machine that has no compiler; nothing else of the product comes here.
//!
//! See `fixtures/README.md` for how the goldens are made and how far two correct implementations differ.

pub mod ahead_suite;
pub mod backend_suite;
mod collected;
mod digest_suite;
mod fake_model;
pub mod fused_suite;
pub mod products;
pub mod row_suite;
pub mod selftest;
mod subjects;
mod tiny_model;

pub use collected::{Collected, Outcome};
pub use fake_model::{FakeModel, digest_of, digest_query};
pub use subjects::{Subject, subjects};
pub use tiny_model::{TINY_TEMPLATE, TinyModel, tiny_model};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::{CpuBackend, CpuOptions, Isa, Unusable};
use pellucid_model::{BLOCK_LEN, Batch, Chunk, Decoder, KvMemory, LoadOptions, Logits, Model};
use pellucid_tensor::{Backend, DType, RowQuery};

/// One golden: a tiny model, prompts, and the reference's logits at every position.
#[derive(Debug)]
pub struct Golden {
    pub name: String,
    pub folder: PathBuf,
    pub prompts: Vec<Vec<u32>>,
    /// The reference's greedy continuation of each prompt.
    pub greedy: Vec<Vec<u32>>,
    vocab_size: usize,
    /// The file that a GGUF is compared with, when there is a GGUF: the format cannot carry every setting.
    gguf_logits: Option<String>,
    /// LongRoPE's factors change past this length.
    original_context_len: Option<usize>,
}

/// The folder of all goldens.
pub fn goldens_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/goldens")
}

/// Every golden, by name.
pub fn goldens() -> Vec<Golden> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(goldens_folder())
        .expect("the goldens are part of the repository")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.join("golden.json").exists())
        .collect();
    folders.sort();
    folders.iter().map(|folder| Golden::read(folder)).collect()
}

fn ids(value: &serde_json::Value) -> Vec<Vec<u32>> {
    serde_json::from_value(value.clone()).expect("a list of lists of ids")
}

impl Golden {
    fn read(folder: &Path) -> Golden {
        let read = |file: &str| -> serde_json::Value {
            let text = std::fs::read_to_string(folder.join(file)).expect("a readable golden");
            serde_json::from_str(&text).expect("valid JSON")
        };
        let (golden, config) = (read("golden.json"), read("config.json"));
        Golden {
            name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            folder: folder.to_owned(),
            prompts: ids(&golden["prompts"]),
            greedy: ids(&golden["greedy"]),
            vocab_size: golden["shape"][0][1].as_u64().expect("a vocabulary size") as usize,
            gguf_logits: golden["gguf"]["logits"].as_str().map(str::to_owned),
            original_context_len: config["original_max_position_embeddings"].as_u64().map(|len| len as usize),
        }
    }

    /// Where the model's files are, and the logits to compare with: the Hugging Face folder, and the GGUF when there is one.
    pub fn sources(&self) -> Vec<(PathBuf, Vec<Vec<f32>>)> {
        let mut sources = vec![(self.folder.clone(), self.logits("logits.bin"))];
        if let Some(file) = &self.gguf_logits {
            sources.push((self.folder.join("model.gguf"), self.logits(file)));
        }
        sources
    }

    /// For each prompt, `[position][vocabulary]` flattened.
    fn logits(&self, file: &str) -> Vec<Vec<f32>> {
        let bytes = std::fs::read(self.folder.join(file)).expect("a readable golden");
        let mut values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
        let logits: Vec<Vec<f32>> = (self.prompts.iter())
            .map(|prompt| values.by_ref().take(prompt.len() * self.vocab_size).collect())
            .collect();
        assert_eq!(values.next(), None, "{file} holds one row for each position");
        logits
    }

    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The context to load for when a prompt of `len` tokens is compared: the reference chooses LongRoPE's factors by that length.
    pub fn context_len(&self, len: usize) -> Option<usize> {
        self.original_context_len.filter(|&original| len <= original)
    }
}

/// A CPU backend, or `None` with a word on stderr when the machine lacks the instruction set.
pub fn cpu(isa: Isa, num_threads: usize) -> Option<Arc<CpuBackend>> {
    match CpuBackend::new(CpuOptions { num_threads, isa }) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(why @ Unusable::Isa(_)) => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

/// The fastest instruction set that multiplies activations as they are with BF16 weights, which most goldens have: all but AMX.
pub fn exact_isa() -> Isa {
    let mut exact = Isa::ALL.into_iter().filter(|&isa| isa != Isa::Amx && isa.is_available());
    exact.next_back().expect("scalar is always available")
}

/// A loaded model with KV memory of its own, driven chunk by chunk.
#[derive(Debug)]
pub struct Runner {
    pub model: Decoder,
    pub kv: KvMemory,
}

/// One sequence: its blocks in any order, and how many positions are stored.
#[derive(Debug, Clone)]
pub struct TestSequence {
    pub blocks: Vec<u32>,
    pub len: usize,
}

impl Runner {
    /// With keys and values in f32, as the reference has them.
    pub fn load(path: &Path, backend: Arc<dyn Backend>, context_len: Option<usize>, num_blocks: usize) -> Runner {
        Runner::load_with(path, backend, context_len, num_blocks, DType::F32)
    }

    pub fn load_with(
        path: &Path,
        backend: Arc<dyn Backend>,
        context_len: Option<usize>,
        num_blocks: usize,
        kv_dtype: DType,
    ) -> Runner {
        let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Runner::of(&checkpoint, backend, context_len, num_blocks, kv_dtype)
    }

    /// A model that need not be in a file.
    pub fn of(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        context_len: Option<usize>,
        num_blocks: usize,
        kv_dtype: DType,
    ) -> Runner {
        let model = Decoder::load(checkpoint, backend.clone(), LoadOptions { context_len }, &mut |_, _| ())
            .unwrap_or_else(|error| panic!("{error}"));
        let kv = KvMemory::new(model.config(), &*backend, kv_dtype, num_blocks, BLOCK_LEN)
            .expect("enough memory for a tiny model, in a format that fits its heads");
        Runner { model, kv }
    }

    /// Runs one step of several chunks and gives all their logits, row after row.
    pub fn step(&mut self, chunks: &mut [(&mut TestSequence, &[u32])]) -> Vec<Vec<f32>> {
        let logits = self.step_asking(chunks, &vec![None; chunks.len()]);
        (0..logits.num_rows()).map(|row| logits.row(row).to_vec()).collect()
    }

    /// The same, with what will do in place of the row of each chunk.
    pub fn step_asking(&mut self, chunks: &mut [(&mut TestSequence, &[u32])], queries: &[Option<RowQuery>]) -> Logits {
        let mut batch = Batch::default();
        for ((sequence, ids), &query) in chunks.iter_mut().zip(queries) {
            let (first_position, blocks, wanted) = (sequence.len, &sequence.blocks, 0..ids.len());
            batch.push(Chunk { ids, first_position, blocks, wanted, query }, BLOCK_LEN);
            sequence.len += ids.len();
        }
        let mut logits = Logits::default();
        self.model.forward(&batch, &mut self.kv, &mut logits).expect("the batch is valid");
        logits
    }

    /// Logits at every position of a prompt, computed in chunks of the given sizes (the last one repeats).
    pub fn prompt(&mut self, prompt: &[u32], chunk_sizes: &[usize], blocks: Vec<u32>) -> Vec<f32> {
        let mut sequence = TestSequence { blocks, len: 0 };
        let mut logits = Vec::new();
        let mut sizes =
            chunk_sizes.iter().copied().chain(std::iter::repeat(*chunk_sizes.last().expect("a chunk size")));
        while sequence.len < prompt.len() {
            let size = sizes.next().expect("endless").min(prompt.len() - sequence.len);
            let ids = &prompt[sequence.len..sequence.len + size];
            logits.extend(self.step(&mut [(&mut sequence, ids)]).concat());
        }
        logits
    }
}
