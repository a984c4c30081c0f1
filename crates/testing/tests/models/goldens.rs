//! Every architecture against the reference implementation's logits, from both file formats, on every instruction set.

use std::path::Path;

use pellucid_checkpoint::{Checkpoint, TensorInfo};
use pellucid_cpu::Isa;
use pellucid_model::{AttentionQuery, Model, ProbeQuery};
use pellucid_selftest::{Runner, TestSequence, goldens, goldens_folder};
use pellucid_tensor::DType;
use pellucid_testing::{cpu, exact_isa};

/// Maximum difference of a logit. Two correct f32 implementations differ by rounding alone: the reference differs from
/// its own f64 result by up to 2e-5 on these models (`selftest/fixtures/README.md`), and ours sums in another order. Of
/// the mistakes that were tried on purpose, the smallest, GELU's tanh form instead of the exact one, changes a logit by
/// 1.1e-3.
const TOLERANCE: f32 = 1e-4;

/// Maximum of the median relative error of a position's logits on AMX. AMX rounds activations to bf16 before it
/// multiplies them with BF16 weights, as llama.cpp and oneDNN do: each is off by up to 2^-9, and the errors add up over
/// all layers, so a bound on single logits could not tell them from a mistake. It is a median because a router that
/// selects another expert at one position changes all logits of that position, and by attention some later ones.
/// Measured were 0.0015 to 0.016, and 0.022 with delta nets, whose states carry errors from token to token. The other
/// instruction sets check the same model code more tightly, and `cpu_products` bounds each product.
const BF16_TOLERANCE: f32 = 0.04;

#[test]
fn logits_at_every_position_equal_the_references() {
    let mut compared = 0;
    for golden in goldens() {
        for (path, expected) in golden.sources() {
            for isa in Isa::ALL {
                let Some(backend) = cpu(isa, 2) else { continue };
                for (prompt, expected) in golden.prompts.iter().zip(&expected) {
                    let mut runner = Runner::load(&path, backend.clone(), golden.context_len(prompt.len()), 4);
                    let found = runner.prompt(prompt, &[prompt.len()], vec![0, 1]);
                    let rounding = match isa {
                        _ if has_matrix_in(&path, DType::MXFP4) => Some(BLOCKS_TOLERANCE),
                        Isa::Amx if has_matrix_in(&path, DType::BF16) => Some(BF16_TOLERANCE),
                        _ => None,
                    };
                    if let Some(tolerance) = rounding {
                        let error = median_error(&found, expected, runner.model.config().vocab_size);
                        let name = &golden.name;
                        assert!(error <= tolerance, "{name} ({}) on {isa}: off by {error}", path.display());
                        continue;
                    }
                    let worst = worst_difference(&found, expected);
                    assert!(worst <= TOLERANCE, "{} ({}) on {isa}: differs by {worst}", golden.name, path.display());
                    compared += found.len();
                }
            }
        }
    }
    assert!(compared > 100_000, "only {compared} logits were compared");
}

#[test]
fn greedy_continuations_equal_the_references() {
    let backend = cpu(exact_isa(), 2).expect("an available instruction set");
    let mut compared = 0;
    for golden in goldens() {
        for (prompt, expected) in golden.prompts.iter().zip(&golden.greedy) {
            // The continuation must not cross the length beyond which the reference uses LongRoPE's long factors.
            let context_len = golden.context_len(prompt.len());
            if context_len.is_some_and(|len| prompt.len() + expected.len() > len) {
                continue;
            }
            let mut runner = Runner::load(&golden.folder, backend.clone(), context_len, 4);
            let mut sequence = TestSequence { blocks: vec![3, 1], len: 0 };
            let mut next = prompt.clone();
            let mut found = Vec::new();
            while found.len() < expected.len() {
                let logits = runner.step(&mut [(&mut sequence, &next)]);
                let last = logits.last().expect("a row of logits");
                let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]).then(b.cmp(&a)));
                next = vec![best.expect("a vocabulary") as u32];
                found.push(next[0]);
            }
            assert_eq!(&found, expected, "{}: greedy continuation of {prompt:?}", golden.name);
            compared += 1;
        }
    }
    assert!(compared >= 60, "only {compared} continuations were compared");
}

/// Maximum of the median relative error of a position's logits if integers are kept in blocks. Their products are not
/// rounded to 16 bits, and activations are rounded to 8 bits, each off by up to 2^-8 of the largest of its 32.
const BLOCKS_TOLERANCE: f32 = 0.04;

#[test]
fn integers_in_blocks_give_the_logits_of_their_package() {
    let mut compared = 0;
    for golden in goldens() {
        let checkpoint = Checkpoint::open(&golden.folder).expect("a golden can be opened");
        let is_in_blocks = |tensor: &TensorInfo| tensor.encoding().is_some() && tensor.dtype.block_len() == 32;
        if !checkpoint.tensors().iter().any(is_in_blocks) {
            continue;
        }
        let expected = golden.logits("logits.bin");
        for isa in Isa::ALL {
            let Some(backend) = cpu(isa, 2) else { continue };
            for (prompt, expected) in golden.prompts.iter().zip(&expected) {
                let context_len = golden.context_len(prompt.len());
                let mut runner = Runner::of(&checkpoint, backend.clone(), context_len, 4, DType::F32);
                let found = runner.prompt(prompt, &[prompt.len()], vec![0, 1]);
                let error = median_error(&found, expected, runner.model.config().vocab_size);
                assert!(error <= BLOCKS_TOLERANCE, "{} on {isa}: off by {error}", golden.name);
                assert!(error > 0.0, "{} on {isa}: not rounded, so not in blocks", golden.name);
                compared += 1;
            }
        }
    }
    assert!(compared >= 12, "only {compared} prompts were compared");
}

/// Whether the model has matrices in this format.
fn has_matrix_in(path: &Path, dtype: DType) -> bool {
    let checkpoint = Checkpoint::open(path).expect("a golden can be opened");
    checkpoint.tensors().iter().any(|tensor| tensor.dtype == dtype && tensor.shape.len() > 1)
}

/// Returns the median of the relative errors of the positions.
fn median_error(found: &[f32], expected: &[f32], vocab_size: usize) -> f32 {
    assert_eq!(found.len(), expected.len());
    let rows = found.chunks_exact(vocab_size).zip(expected.chunks_exact(vocab_size));
    let mut errors: Vec<f32> = rows.map(|(found, expected)| relative_error(found, expected)).collect();
    errors.sort_by(f32::total_cmp);
    errors[errors.len() / 2]
}

/// Returns the root mean square of the differences, relative to that of the expected values.
fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let differences: f32 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    (differences / expected.iter().map(|b| b.powi(2)).sum::<f32>()).sqrt()
}

fn worst_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    // NaN counts as infinitely wrong; `max` would ignore it.
    let difference = |(a, b): (&f32, &f32)| if a.is_nan() { f32::INFINITY } else { (a - b).abs() };
    found.iter().zip(expected).map(difference).fold(0.0, f32::max)
}

/// Maximum difference of a logit after a layer. The reference's values are stored with six digits, and logits of early
/// layers are up to 30.
const LAYER_TOLERANCE: f32 = 2e-4;
/// Maximum difference of an attention weight.
const WEIGHT_TOLERANCE: f32 = 1e-5;

#[test]
fn probes_equal_the_references_hidden_states_and_attentions() {
    let path = goldens_folder().with_file_name("probes.json");
    let text = std::fs::read_to_string(path).expect("a part of the repository");
    let probes: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let num_rows = probes["rows"].as_u64().expect("a number") as usize;
    let backend = cpu(exact_isa(), 2).expect("an available instruction set");
    let floats = |value: &serde_json::Value| -> Vec<f32> { serde_json::from_value(value.clone()).expect("numbers") };
    let mut num_compared = 0;
    for (name, probe) in probes.as_object().expect("an object").iter().filter(|(_, probe)| probe.is_object()) {
        let prompt: Vec<u32> = serde_json::from_value(probe["prompt"].clone()).expect("ids");
        let mut runner = Runner::load(&goldens_folder().join(name), backend.clone(), None, 4);
        let blocks = vec![2, 0];
        let logits = runner.prompt(&prompt, &[prompt.len()], blocks.clone());
        let (num_layers, num_heads) = (runner.model.config().num_layers(), runner.model.config().num_heads);
        let vocab_size = runner.model.config().vocab_size;
        let mut layers = Vec::new();
        let query = ProbeQuery { layers: true, attention: None };
        assert_eq!(runner.probe(&prompt, 1, &blocks, &query, &mut |row| layers.push(row.to_vec())), None);
        assert_eq!(layers.len(), num_layers);
        let plain = &logits[logits.len() - vocab_size..];
        let bits = |row: &[f32]| row.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(layers.last().expect("a layer")), bits(plain), "{name}: the logits without a probe");
        for (layer, found) in layers.iter().enumerate() {
            let worst = worst_difference(found, &floats(&probe["layers"][layer]));
            assert!(worst <= LAYER_TOLERANCE, "{name}, layer {layer}: differs by {worst}");
        }
        for layer in 0..num_layers {
            let mut mean = vec![vec![0.0; prompt.len()]; num_rows];
            for head in (0..num_heads).map(Some).chain([None]) {
                let query = ProbeQuery { layers: false, attention: Some(AttentionQuery { layer, head }) };
                let found = runner.probe(&prompt, num_rows, &blocks, &query, &mut |_| ()).expect("attention weights");
                for (row, found) in found.weights.iter().enumerate() {
                    let expected = match head {
                        Some(head) => floats(&probe["attention"][layer][head][row]),
                        None => mean[row].clone(),
                    };
                    mean[row].iter_mut().zip(&expected).for_each(|(mean, weight)| *mean += weight / num_heads as f32);
                    let worst = worst_difference(found, &expected);
                    assert!(worst <= WEIGHT_TOLERANCE, "{name}, {layer}.{head:?}, row {row}: differs by {worst}");
                    num_compared += found.len();
                }
            }
        }
        // The probe changed nothing: the next step reads the same keys and values.
        let mut again = TestSequence { blocks, len: prompt.len() - 1 };
        let row = runner.step(&mut [(&mut again, &prompt[prompt.len() - 1..])]).concat();
        assert_eq!(bits(&row), bits(plain), "{name}: the logits after probes");
    }
    assert!(num_compared > 10_000, "only {num_compared} weights were compared");
}
