//! Batch invariance of whole models: the logits at a position depend on the tokens up to it and on nothing else.
//!
//! Comparisons are of bits unless a test states a tolerance: a tolerance would hide the very differences that these
//! tests look for.

use std::sync::Arc;

use pellucid_cpu::{CpuBackend, Isa};
use pellucid_selftest::{Runner, TestSequence, goldens};
use pellucid_tensor::DType;
use pellucid_testing::{InvarianceCase, cpu, exact_isa, invariance_cases};

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Calls `f` for every model and every format of its keys and values.
fn for_each_case(f: impl Fn(&InvarianceCase)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    invariance_cases(folder.path()).iter().for_each(f);
}

fn runner(case: &InvarianceCase, backend: Arc<CpuBackend>, num_blocks: usize) -> Runner {
    Runner::load_with(&case.path, backend, None, num_blocks, case.kv_dtype)
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn chunks_of_any_size_give_the_bits_of_the_whole_prompt() {
    for_each_case(|case| {
        let InvarianceCase { name, kv_dtype, prompt, .. } = case;
        for isa in isas() {
            let Some(backend) = cpu(isa, 2) else { continue };
            let mut runner = runner(case, backend, 8);
            let whole = bits(&runner.prompt(prompt, &[prompt.len()], vec![0, 1]));
            // Every chunk size for the best instruction set with f32 keys and values; sizes around block edges for the
            // others.
            let every = isa == Isa::best() && *kv_dtype == DType::F32;
            let sizes: Vec<usize> = if every { (1..prompt.len()).collect() } else { vec![1, 2, 7, 31, 32, 33] };
            for size in sizes {
                let chunked = bits(&runner.prompt(prompt, &[size], vec![2, 3]));
                assert!(whole == chunked, "{name}, KV in {kv_dtype}, on {isa}: chunks of {size} differ from the whole");
            }
            let mixed = bits(&runner.prompt(prompt, &[5, 1, 1, 17, 2, 30], vec![5, 4]));
            assert!(whole == mixed, "{name}, KV in {kv_dtype}, on {isa}: mixed chunks differ from the whole");
        }
    });
}

#[test]
fn one_thread_and_several_give_the_same_bits() {
    for_each_case(|case| {
        for isa in isas() {
            let run = |num_threads| {
                let backend = cpu(isa, num_threads).expect("an available instruction set");
                bits(&runner(case, backend, 2).prompt(&case.prompt, &[13], vec![1, 0]))
            };
            let one = run(1);
            let InvarianceCase { name, kv_dtype, .. } = case;
            assert!(
                one == run(2) && one == run(3),
                "{name}, KV in {kv_dtype}, on {isa}: the bits depend on the number of threads"
            );
        }
    });
}

#[test]
fn other_sequences_of_the_batch_change_nothing() {
    for_each_case(|case| {
        let Some(backend) = cpu(Isa::best(), 2) else { return };
        let mut runner = runner(case, backend, 32);
        let prompts: Vec<Vec<u32>> = (0..6).map(|i| case.prompt[i..30 + 5 * i].to_vec()).collect();
        let alone: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| bits(&runner.prompt(prompt, &[prompt.len()], vec![30, 31]))).collect();

        // Sequences advance by chunks of different sizes, join at different steps, and have scattered blocks.
        let mut sequences: Vec<TestSequence> =
            (0..6).map(|i| TestSequence { blocks: vec![29 - 3 * i, 2 * i], len: 0 }).collect();
        let mut found: Vec<Vec<u32>> = vec![Vec::new(); 6];
        for step in 0.. {
            let mut chunks: Vec<(&mut TestSequence, &[u32])> = Vec::new();
            let mut owners = Vec::new();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let left = prompts[i].len() - sequence.len;
                let size = (1 + 3 * i).min(left);
                if step >= i && size > 0 {
                    let ids = &prompts[i][sequence.len..sequence.len + size];
                    owners.extend(std::iter::repeat_n(i, size));
                    chunks.push((sequence, ids));
                }
            }
            if chunks.is_empty() {
                break;
            }
            for (owner, row) in owners.into_iter().zip(runner.step(&mut chunks)) {
                found[owner].extend(bits(&row));
            }
        }
        for i in 0..6 {
            let InvarianceCase { name, kv_dtype, .. } = case;
            assert!(alone[i] == found[i], "{name}, KV in {kv_dtype}: sequence {i} differs in a batch");
        }
    });
}

#[test]
fn both_file_formats_of_a_model_agree() {
    // GGUF files of Llama have reordered rows, and so another order of summation; in others, only constants are rounded
    // differently.
    let mut compared = 0;
    for golden in goldens() {
        let sources = golden.sources();
        if sources.len() < 2 || sources[0].1 != sources[1].1 {
            continue;
        }
        let Some(backend) = cpu(exact_isa(), 2) else { return };
        let prompt: Vec<u32> = golden.prompts.concat().into_iter().take(60).collect();
        let logits: Vec<Vec<f32>> = sources
            .iter()
            .map(|(path, _)| Runner::load(path, backend.clone(), None, 2).prompt(&prompt, &[60], vec![0, 1]))
            .collect();
        assert_eq!(logits[0].len(), logits[1].len(), "{}: number of logits", golden.name);
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
        assert!(logits[0].iter().zip(&logits[1]).all(is_close), "{}: the formats differ by 1e-4 or more", golden.name);
        compared += 1;
    }
    assert!(compared >= 10, "only {compared} models have both formats");
}

#[test]
fn avx2_and_avx512_give_the_same_bits() {
    if !(Isa::Avx2.is_available() && Isa::Avx512.is_available()) {
        eprintln!("skipped: this machine lacks AVX2 or AVX-512");
        return;
    }
    for_each_case(|case| {
        let run = |isa| {
            let backend = cpu(isa, 2).expect("an available instruction set");
            bits(&runner(case, backend, 2).prompt(&case.prompt, &[60], vec![0, 1]))
        };
        let InvarianceCase { name, kv_dtype, .. } = case;
        assert!(run(Isa::Avx2) == run(Isa::Avx512), "{name}, KV in {kv_dtype}: instruction sets differ");
    });
}

/// The error of each format of keys and values, as a fraction of the logits' standard deviation, as `docs/accuracy.md`
/// states it. A format that is worse, or exact although it should round, is a mistake.
#[test]
fn the_error_of_each_format_is_what_the_documentation_says() {
    for_each_case(|case| {
        let Some(backend) = cpu(exact_isa(), 2) else { return };
        let exact = InvarianceCase { kv_dtype: DType::F32, ..case.clone() };
        let run = |case| runner(case, backend.clone(), 2).prompt(&case.prompt, &[60], vec![0, 1]);
        let (exact, found) = (run(&exact), run(case));
        let count = exact.len() as f32;
        let mean = exact.iter().sum::<f32>() / count;
        let spread = (exact.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / count).sqrt();
        let error = (exact.iter().zip(&found).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / count).sqrt() / spread;
        let range = match case.kv_dtype {
            DType::F32 => 0.0..=0.0,
            DType::F16 => 1e-5..=6e-4,
            DType::BF16 => 1e-4..=5e-3,
            _ => 1e-3..=2e-2,
        };
        let InvarianceCase { name, kv_dtype, .. } = case;
        eprintln!("{name}, KV in {kv_dtype}: {error:e} of the standard deviation");
        assert!(range.contains(&error), "{name}, KV in {kv_dtype}: {error:e} is outside {range:?}");
    });
}
