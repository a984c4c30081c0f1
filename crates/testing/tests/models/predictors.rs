//! Layers that predict further tokens, against the reference implementation's, from both file formats.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::CpuBackend;
use pellucid_model::{
    BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Decoder, KvMemory, LoadOptions, Logits, Model, read_config,
    read_config_with,
};
use pellucid_selftest::goldens_folder;
use pellucid_tensor::{DType, StateSave};
use pellucid_testing::{cpu, exact_isa};

/// As for the logits of whole models.
const TOLERANCE: f32 = 1e-4;
const NAMES: [&str; 2] = ["glm4-moe", "qwen3-next"];
const WITH_PREDICTOR: LoadOptions = LoadOptions { context_len: None, predictor: true };

fn folder(name: &str) -> PathBuf {
    goldens_folder().with_file_name("predictors").join(name)
}

/// A model with memory for one sequence.
struct Sequence {
    model: Decoder,
    kv: KvMemory,
    blocks: Vec<u32>,
}

impl Sequence {
    fn load(path: &Path, backend: &Arc<CpuBackend>) -> Sequence {
        let checkpoint = Checkpoint::open(path).expect("a golden");
        let model = Decoder::load(&checkpoint, backend.clone(), WITH_PREDICTOR, &mut |_, _| ()).expect("it loads");
        let kv = KvMemory::new(model.config(), model.devices(), DType::F32, 4, BLOCK_LEN)
            .and_then(|kv| kv.with_states(model.config(), model.devices(), 4))
            .expect("memory");
        Sequence { model, kv, blocks: vec![3, 1] }
    }

    /// Computes rows of the model or of its predictor, and returns their logits.
    fn run(&mut self, ids: &[u32], first_position: usize, predicts: bool) -> Vec<Vec<f32>> {
        let save = StateSave { row: ids.len() as u32 - 1, slot: self.blocks[0] };
        let state = if predicts { ChunkState::default() } else { ChunkState::in_place(first_position, &save) };
        let (wanted, blocks, ids) = (0..ids.len(), &self.blocks[..], ChunkIds::Tokens(ids));
        let mut batch = Batch::default();
        batch.push(Chunk { ids, first_position, blocks, wanted, queries: &[], state }, BLOCK_LEN);
        let mut logits = Logits::default();
        let outcome = match predicts {
            true => self.model.predict(&batch, &mut self.kv, &mut logits),
            false => self.model.forward(&batch, &mut self.kv, &mut logits),
        };
        outcome.expect("a valid batch");
        (0..logits.num_rows()).map(|row| logits.row(row).to_vec()).collect()
    }
}

fn best(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a vocabulary") as u32
}

#[test]
fn predicted_logits_equal_the_references() {
    let backend = cpu(exact_isa(), 2).expect("an available instruction set");
    for name in NAMES {
        let text = std::fs::read_to_string(folder(name).join("predictor.json")).expect("a part of the repository");
        let golden: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
        let ids = |key: &str| -> Vec<u32> { serde_json::from_value(golden[key].clone()).expect("ids") };
        let (prompt, drafted) = (ids("prompt"), ids("drafted"));
        let bytes = std::fs::read(folder(name).join("logits.bin")).expect("a part of the repository");
        let expected: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        for path in [folder(name), folder(name).join("model.gguf")] {
            // However the prompt was cut into steps.
            for chunk_len in [prompt.len(), 7, 1] {
                let what = format!("{} in steps of {chunk_len}", path.display());
                let mut sequence = Sequence::load(&path, &backend);
                let mut first = 0;
                for (i, chunk) in prompt.chunks(chunk_len).enumerate() {
                    let rows = sequence.run(chunk, i * chunk_len, false);
                    first = best(rows.last().expect("a row"));
                }
                assert_eq!(u64::from(first), golden["first"].as_u64().expect("an id"), "{what}");
                // From the last row to the first: each leaves its own row in the place of the model's.
                let by_row = (0..prompt.len()).rev().map(|p| sequence.run(&prompt[p..=p], p, true).concat());
                let mut by_row: Vec<Vec<f32>> = by_row.collect();
                by_row.reverse();
                let differences = by_row.concat().into_iter().zip(&expected).map(|(a, b)| (a - b).abs());
                let worst = differences.fold(0.0, |worst: f32, d| if d.is_nan() { d } else { worst.max(d) });
                assert!(worst <= TOLERANCE, "{what}: differs by {worst}");

                let mut sequence = Sequence::load(&path, &backend);
                sequence.run(&prompt, 0, false);
                let (mut next, mut found) = (first, Vec::new());
                for position in prompt.len()..prompt.len() + drafted.len() {
                    next = best(&sequence.run(&[next], position, true)[0]);
                    found.push(next);
                }
                assert_eq!(found, drafted, "{what}: drafts of the reference");
            }
        }
    }
}

/// With the predictor, the model's own logits have the same bits.
#[test]
fn a_predictor_changes_no_logit_of_the_model() {
    let backend = cpu(exact_isa(), 2).expect("an available instruction set");
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 90).collect();
    for name in NAMES {
        let mut sequence = Sequence::load(&folder(name), &backend);
        let with = [sequence.run(&prompt[..30], 0, false), sequence.run(&prompt[30..], 30, false)].concat();
        let mut plain = pellucid_selftest::Runner::load(&folder(name), backend.clone(), None, 4);
        assert_eq!(plain.prompt(&prompt, &[40], vec![0, 1]), with.concat(), "{name}");
    }
}

#[test]
fn a_model_without_a_predictor_says_so() {
    for (name, tensor) in [("glm4-moe", "model.layers.3.eh_proj.weight"), ("qwen3-next", "mtp.fc.weight")] {
        let checkpoint = Checkpoint::open(&goldens_folder().join(name)).expect("a golden");
        let error = read_config_with(&checkpoint, WITH_PREDICTOR).unwrap_err().to_string();
        assert!(error.contains(tensor) && error.contains("--speculate mtp"), "{error}");
        let checkpoint = Checkpoint::open(&folder(name)).expect("a golden");
        let (with, without) =
            (read_config_with(&checkpoint, WITH_PREDICTOR).unwrap(), read_config(&checkpoint).unwrap());
        assert!(without.predictor.is_none() && with.num_layers() == without.num_layers());
        let bytes = |config| KvMemory::bytes_per_block(config, DType::F16, BLOCK_LEN).unwrap();
        // Keys and values of one more layer in F16, and rows in F32.
        let layer = 2 * 2 * with.key_heads(with.num_layers()).num_kv_heads * with.head_size;
        assert_eq!(bytes(&with) - bytes(&without), BLOCK_LEN * (layer + 4 * with.hidden_size), "{name}");
    }
}
