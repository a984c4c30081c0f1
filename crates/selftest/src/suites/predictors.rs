//! Layers that predict further tokens (`--speculate mtp`), against the reference implementation's.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_model::{BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Decoder, KvMemory, LoadOptions, Logits, Model};
use pellucid_tensor::{Backend, DType, StateSave};

/// As for the logits of whole models.
const TOLERANCE: f32 = 1e-4;

/// A model with its predictor, and memory for one sequence.
#[derive(Debug)]
pub struct PredictedSequence {
    model: Decoder,
    kv: KvMemory,
    blocks: Vec<u32>,
}

/// Loads a model from a file or folder together with its predictor.
pub fn load(path: &Path, backend: &Arc<dyn Backend>) -> Decoder {
    let checkpoint = Checkpoint::open(path).expect("a golden");
    let options = LoadOptions { context_len: None, predictor: true };
    Decoder::load(&checkpoint, backend.clone(), options, &mut |_, _| ()).expect("it loads")
}

impl PredictedSequence {
    pub fn load(path: &Path, backend: &Arc<dyn Backend>) -> PredictedSequence {
        let model = load(path, backend);
        let kv = KvMemory::new(model.config(), model.devices(), DType::F32, 4, BLOCK_LEN)
            .and_then(|kv| kv.with_states(model.config(), model.devices(), 4))
            .expect("memory");
        PredictedSequence { model, kv, blocks: vec![3, 1] }
    }

    /// Computes rows of the model, or of its predictor, and returns their logits.
    pub fn run(&mut self, ids: &[u32], first_position: usize, predicts: bool) -> Vec<Vec<f32>> {
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

/// Checks the logits of a predictor at every position of a prompt, and the drafts after it, however the prompt was cut
/// into steps. `folder` has the reference's results, `path` is the model.
pub fn predictions_equal_the_references(path: &Path, folder: &Path, backend: &Arc<dyn Backend>) {
    let text = std::fs::read_to_string(folder.join("predictor.json")).expect("a part of the golden");
    let golden: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let ids = |key: &str| -> Vec<u32> { serde_json::from_value(golden[key].clone()).expect("ids") };
    let (prompt, drafted) = (ids("prompt"), ids("drafted"));
    let bytes = std::fs::read(folder.join("logits.bin")).expect("a part of the golden");
    let expected: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    for chunk_len in [prompt.len(), 7, 1] {
        let what = format!("{} in steps of {chunk_len}", path.display());
        let mut sequence = PredictedSequence::load(path, backend);
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

        let mut sequence = PredictedSequence::load(path, backend);
        sequence.run(&prompt, 0, false);
        let (mut next, mut found) = (first, Vec::new());
        for position in prompt.len()..prompt.len() + drafted.len() {
            next = best(&sequence.run(&[next], position, true)[0]);
            found.push(next);
        }
        assert_eq!(found, drafted, "{what}: drafts of the reference");
    }
}
