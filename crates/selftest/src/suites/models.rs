//! Whole models: the goldens against the reference implementation, and wide layers with random weights against
//! themselves.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::{Checkpoint, Source};
use pellucid_model::{BLOCK_LEN, Decoder, Error, KvMemory, LoadOptions, Model, Placement, QuantScheme, SyntheticModel};
use pellucid_tensor::{Backend, DType, RowDigest, RowQuery, quant};

use super::{digests, operations};
use crate::{Golden, Runner, TestSequence};

/// Maximum difference of a logit from the reference's; `testing/tests/models/goldens.rs` gives the reason.
const TOLERANCE: f32 = 1e-4;

/// Maximum median difference on a device that rounds activations to bf16. The rounding moves the median logit of these
/// models, which is of order one, by about 0.01; a mistake in an operation moves it by its own size.
const ROUNDED_TOLERANCE: f32 = 0.05;

/// Checks layers of a published model's shape with random weights: a prompt's logits have the same bits in one chunk,
/// token by token, and with two sequences at a time, which have one row each or up to 16.
pub(crate) fn wide_layers(backend: &Arc<dyn Backend>, shape: &str, scheme: &str) {
    let shape = SyntheticModel::named(shape).expect("a known shape").shallow();
    let scheme = QuantScheme::named(scheme).expect("a known quantization scheme");
    let checkpoint = shape.checkpoint(scheme, 1, &mut |_, _| ()).expect("names and shapes fit");
    for kv_dtype in [DType::F16, DType::Q8_0] {
        let mut runner = Runner::of(&checkpoint, backend.clone(), None, 32, kv_dtype);
        let has_state = runner.model.config().has_state();
        // Longer than the windows of the shapes, by more than a block.
        let prompt: Vec<u32> = (0..200).map(|i| i * 7 % 512).collect();
        let blocks = |first: u32| (first..first + 10).collect::<Vec<u32>>();
        let whole = runner.prompt(&prompt, &[prompt.len()], blocks(0));
        assert!(whole.iter().all(|logit| logit.is_finite()), "a logit is not finite");
        let expected = bits(&whole);
        assert!(bits(&runner.prompt(&prompt, &[1], blocks(10))) == expected, "token by token gives other bits");
        let mixed = runner.prompt(&prompt, &[3, 1, 9, 1, 40, 1, 2], blocks(20));
        assert!(bits(&mixed) == expected, "chunks give other bits");
        let mut pair = [10, 20].map(|first| TestSequence { blocks: blocks(first), len: 0 });
        for (i, id) in prompt.iter().enumerate() {
            let [a, b] = &mut pair;
            let rows = runner.step(&mut [(a, &[*id]), (b, &[*id])]);
            let row = &expected[i * rows[0].len()..][..rows[0].len()];
            assert!(rows.iter().all(|logits| bits(logits) == row), "two sequences at a time give other bits at {i}");
        }
        // As when drafted tokens are verified. From the third step on, a device may replay a recorded step.
        let vocab_size = expected.len() / prompt.len();
        for len in 2..=16 {
            let mut pair = [10, 20].map(|first| TestSequence { blocks: blocks(first), len: 0 });
            for start in (0..prompt.len() - len).step_by(len) {
                let [a, b] = &mut pair;
                // The second sequence has shorter chunks, and computes the last position of each again, as after a
                // rejected token.
                let (other, short) = (b.len, 1 + start / len % len);
                let chunks = &mut [(a, &prompt[start..start + len]), (b, &prompt[other..other + short])];
                let rows = runner.step(chunks).concat();
                let row = |position: usize| &expected[position * vocab_size..][..vocab_size];
                let positions = (start..start + len).chain(other..other + short);
                for (found, position) in rows.chunks_exact(vocab_size).zip(positions) {
                    assert!(bits(found) == row(position), "chunks of {len} and {short} give other bits at {position}");
                }
                // A state cannot go back to an earlier position.
                pair[1].len -= usize::from(short > 1 && !has_state);
            }
        }
    }
}

/// Rewrites a folder with every tensor as f32. Quantized tensors are decoded.
pub(crate) fn widen(folder: &Path) {
    let checkpoint = Checkpoint::open(folder).expect("a golden").with_reference_rounding();
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for tensor in checkpoint.tensors() {
        let bytes = checkpoint.tensor(&tensor.name).expect("a tensor of the list").bytes();
        let mut wide = vec![0f32; tensor.num_elements()];
        quant::decode(tensor.dtype, &bytes, &mut wide);
        let mut shape = tensor.shape.clone();
        // Stacks of experts have their inputs first, except in MXFP4.
        if let (DType::MXFP4, &[_, rows, cols]) = (tensor.dtype, &tensor.shape[..]) {
            let transposed = |matrix: &[f32]| -> Vec<f32> {
                (0..cols).flat_map(|col| matrix.iter().skip(col).step_by(cols)).copied().collect()
            };
            wide = wide.chunks_exact(rows * cols).flat_map(transposed).collect();
            shape.swap(1, 2);
        }
        let start = data.len();
        data.extend(wide.iter().flat_map(|value| value.to_le_bytes()));
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(tensor.name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    let Source::HuggingFace(source) = checkpoint.source() else { panic!("a folder") };
    let mut config = source.config.clone();
    config.as_object_mut().expect("an object").remove("quantization_config");
    drop(checkpoint);
    std::fs::write(folder.join("model.safetensors"), file).expect("a file that can be written");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a file that can be written");
}

/// The sentence with which a device refuses a golden, if it lacks something that the model needs.
pub(crate) fn refusal(backend: &Arc<dyn Backend>, golden: &Golden) -> Option<String> {
    let checkpoint = Checkpoint::open(&golden.folder).ok()?;
    match Decoder::load(
        &checkpoint,
        backend.clone(),
        LoadOptions { context_len: None, ..LoadOptions::default() },
        &mut |_, _| (),
    ) {
        Err(error @ Error::NotOnDevice { .. }) => Some(error.to_string()),
        // Another error is found, and told, by the checks.
        _ => None,
    }
}

/// Checks a golden with its weights widened to f32: every device has to agree with the reference to the rounding of
/// f32.
pub(crate) fn matches_golden_in_f32(backend: &Arc<dyn Backend>, golden: &Golden, keeps_bits: bool) {
    widen(&golden.folder);
    matches_golden(backend, golden, TOLERANCE, keeps_bits);
}

/// Checks a golden with its weights as stored: a device that rounds activations, to the weights' 16 bits or to 8 for
/// weights in blocks, is allowed the effect of that rounding.
pub(crate) fn matches_golden_as_stored(backend: &Arc<dyn Backend>, golden: &Golden, keeps_bits: bool) {
    let checkpoint = Checkpoint::open(&golden.folder).expect("a golden").with_reference_rounding();
    let is_in_blocks = checkpoint.tensors().iter().any(|tensor| tensor.dtype.is_quantized());
    let rounds = is_in_blocks || operations::rounds_activations(&**backend);
    matches_golden(backend, golden, if rounds { ROUNDED_TOLERANCE } else { TOLERANCE }, keeps_bits);
}

/// Checks that logits at every position are within `tolerance` and have the same bits in chunks of any size. With the
/// smallest tolerance, the greedy continuation must be equal too.
fn matches_golden(backend: &Arc<dyn Backend>, golden: &Golden, tolerance: f32, keeps_bits: bool) {
    let (path, expected) = (golden.folder.clone(), golden.logits("logits.bin"));
    for ((prompt, expected), greedy) in golden.prompts.iter().zip(&expected).zip(&golden.greedy) {
        let context_len = golden.context_len(prompt.len());
        let mut runner = Runner::load(&path, backend.clone(), context_len, 8);
        let whole = runner.prompt(prompt, &[prompt.len()], vec![0, 1]);
        assert_eq!(whole.len(), expected.len());
        // NaN counts as infinitely wrong; a comparison would ignore it.
        let distance = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
        let mut distances: Vec<f32> = whole.iter().zip(expected).map(distance).collect();
        distances.sort_by(f32::total_cmp);
        if tolerance <= TOLERANCE {
            let worst = distances[distances.len() - 1];
            assert!(worst <= tolerance, "a logit differs from the reference by {worst}");
        } else {
            // With rounded activations, a router may select another expert and change a whole row, so the median
            // counts.
            let median = distances[distances.len() / 2];
            assert!(median <= tolerance, "the median logit differs from the reference by {median}");
        }
        // Token by token: from the third step on, a device may replay a recorded step.
        let single = runner.prompt(prompt, &[1], vec![3, 2]);
        assert!(!keeps_bits || bits(&single) == bits(&whole), "token by token gives other bits than the whole prompt");
        let mixed = runner.prompt(prompt, &[5, 1, 1, 17, 2, 30], vec![5, 4]);
        assert!(!keeps_bits || bits(&mixed) == bits(&whole), "chunks give other bits than the whole prompt");
        if tolerance <= TOLERANCE && context_len.is_none_or(|len| prompt.len() + greedy.len() <= len) {
            assert_eq!(&continuation(&mut runner, prompt, greedy.len()), greedy, "greedy continuation");
        }
    }
}

/// Checks that a model whose parts are in segments, as if on two devices, has the bits of the whole.
pub(crate) fn parts_on_two_devices(backend: &Arc<dyn Backend>, golden: &Golden) {
    let prompt = &golden.prompts[0];
    let context_len = golden.context_len(prompt.len());
    let checkpoint = Checkpoint::open(&golden.folder).expect("a golden").with_reference_rounding();
    let chunks = [5, 1, 1, 17, 1, 1, 1, 30];
    let mut whole = Runner::of(&checkpoint, backend.clone(), context_len, 2, DType::F32);
    let expected = bits(&whole.prompt(prompt, &chunks, vec![1, 0]));
    let num_layers = whole.model.config().num_layers();
    let on_one = || vec![0; num_layers];
    let placements = [
        Placement::of_layers(&[num_layers - 1, 1]),
        Placement { mixers: on_one(), mlps: vec![1; num_layers], output: 0 },
        Placement { mixers: on_one(), mlps: on_one(), output: 1 },
    ];
    for placement in placements {
        let (devices, options) = (vec![backend.clone(); 2], LoadOptions { context_len, ..LoadOptions::default() });
        let name = format!("{placement:?}");
        let model = match Decoder::load_on(&checkpoint, devices, placement, options, &mut |_, _| ()) {
            Ok(model) => model,
            Err(Error::SharedAcrossDevices { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        let kv = KvMemory::new(model.config(), model.devices(), DType::F32, 2, BLOCK_LEN)
            .and_then(|kv| kv.with_states(model.config(), model.devices(), 2))
            .expect("enough memory for a tiny model");
        let several = Runner::with_kv(model, kv).prompt(prompt, &chunks, vec![1, 0]);
        assert!(bits(&several) == expected, "{name}: other bits than the whole model on one device");
    }
}

/// Checks digests at the end of steps. Of two sequences with the same tokens, one gets its whole row and the other a
/// digest, which must be that of the row; queries differ in every step. A third sequence is alone in its batch. Then
/// chunks of several rows, each with a query of its own.
pub(crate) fn digests_of_steps(backend: &Arc<dyn Backend>, golden: &Golden) {
    let prompt = &golden.prompts[0];
    let mut runner = Runner::load(&golden.folder, backend.clone(), golden.context_len(prompt.len()), 8);
    let sequence = |blocks: [u32; 2]| TestSequence { blocks: blocks.to_vec(), len: 0 };
    let (mut first, mut second, mut alone) = (sequence([0, 1]), sequence([3, 2]), sequence([5, 4]));
    let query = |seed: u64, position: usize| RowQuery {
        temperature: 0.5 + 0.1 * position as f64,
        race: Some((seed, position as u32 + 1)).filter(|_| position % 5 != 4),
        shortlist: None,
    };
    let same = |seed: u64, position: usize, row: &[f32], digest: Option<&RowDigest>| {
        let what = format!("position {position}, seed {seed}");
        let num_top = backend.digest_len(row.len()).expect("it digests short rows");
        let digest = digest.expect("a digest was asked for");
        digests::assert_same_digest(&what, row, &query(seed, position), num_top, digest);
    };
    for (position, token) in prompt.iter().enumerate() {
        let ids = std::slice::from_ref(token);
        let queries = [7, 8].map(|seed| [query(seed, position)]);
        let logits = runner.step_with_queries(&mut [(&mut first, ids), (&mut second, ids)], &[&[], &queries[0]]);
        let row = logits.row(0);
        assert!(logits.digest(0).is_none(), "a row that was wanted whole");
        same(7, position, row, logits.digest(1));
        same(8, position, row, runner.step_with_queries(&mut [(&mut alone, ids)], &[&queries[1]]).digest(0));
    }
    for len in [2, 5, 16] {
        let (mut first, mut second) = (sequence([0, 1]), sequence([3, 2]));
        for ids in prompt.chunks(len) {
            let start = first.len;
            let queries: Vec<RowQuery> = (0..ids.len()).map(|row| query(9, start + row)).collect();
            let logits = runner.step_with_queries(&mut [(&mut first, ids), (&mut second, ids)], &[&[], &queries]);
            for row in 0..ids.len() {
                same(9, start + row, logits.row(row), logits.digest(ids.len() + row));
            }
        }
    }
}

fn continuation(runner: &mut Runner, prompt: &[u32], len: usize) -> Vec<u32> {
    let mut sequence = TestSequence { blocks: vec![7, 6], len: 0 };
    let mut next = prompt.to_vec();
    let mut found = Vec::new();
    while found.len() < len {
        let logits = runner.step(&mut [(&mut sequence, &next)]);
        let last = logits.last().expect("a row of logits");
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]).then(b.cmp(&a)));
        next = vec![best.expect("a vocabulary") as u32];
        found.push(next[0]);
    }
    found
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}
