//! Every architecture against the reference implementation's logits, from both file formats, on every instruction set.

use std::path::Path;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_model::Model;
use pellucid_selftest::{Runner, TestSequence, goldens};
use pellucid_tensor::DType;
use pellucid_testing::{cpu, exact_isa};

/// Maximum difference of a logit. Two correct f32 implementations differ by rounding alone: the reference differs from
/// its own f64 result by up to 2e-5 on these models (`selftest/fixtures/README.md`), and ours sums in another order. Of
/// the mistakes that were tried on purpose, the smallest, GELU's tanh form instead of the exact one, changes a logit by
/// 1.1e-3.
const TOLERANCE: f32 = 1e-4;

/// Maximum relative error of all logits of a prompt on AMX. AMX rounds activations to bf16 before it multiplies them
/// with BF16 weights, as llama.cpp and oneDNN do: each is off by up to 2^-9, and the errors add up over all layers, so
/// a bound on single logits could not tell them from a mistake. Measured were 0.003 to 0.009, and 0.05 with a router
/// that selected another expert. The other instruction sets check the same model code more tightly, and `cpu_products`
/// bounds each product.
const BF16_TOLERANCE: f32 = 0.02;
const BF16_EXPERTS_TOLERANCE: f32 = 0.1;

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
                    if isa == Isa::Amx && stored_in_bf16(&path) {
                        let error = relative_error(&found, expected);
                        let experts = runner.model.config().experts.is_some();
                        let allowed = if experts { BF16_EXPERTS_TOLERANCE } else { BF16_TOLERANCE };
                        assert!(error <= allowed, "{} ({}) on {isa}: off by {error}", golden.name, path.display());
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

/// Whether the model's matrices are BF16.
fn stored_in_bf16(path: &Path) -> bool {
    let checkpoint = Checkpoint::open(path).expect("a golden can be opened");
    checkpoint.tensors().iter().any(|tensor| tensor.dtype == DType::BF16 && tensor.shape.len() > 1)
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
