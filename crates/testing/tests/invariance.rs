//! The law of row independence, in bits: the logits at a position depend on the tokens up to it and on nothing else.
//!
//! Every comparison is of bit patterns. A tolerance here would hide exactly what the tests are for.

use pellucid_cpu::Isa;
use pellucid_testing::{Golden, Runner, TestSequence, cpu, exact_isa, goldens};

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// The longest prompt: it crosses every window and several blocks' edges when it is repeated.
fn long_prompt(golden: &Golden) -> Vec<u32> {
    let longest = golden.prompts.iter().max_by_key(|prompt| prompt.len()).expect("a prompt");
    let mut prompt = longest.clone();
    prompt.extend(longest.iter().rev().take(24));
    prompt.truncate(60);
    prompt
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn chunks_of_any_size_give_the_bits_of_the_whole_prompt() {
    for golden in goldens() {
        let prompt = long_prompt(&golden);
        for isa in isas() {
            let Some(backend) = cpu(isa, 2) else { continue };
            let mut runner = Runner::load(&golden.folder, backend, None, 8);
            let whole = bits(&runner.prompt(&prompt, &[prompt.len()], vec![0, 1]));
            // Every size for the best instruction set; the edges for the others.
            let sizes: Vec<usize> =
                if isa == Isa::best() { (1..prompt.len()).collect() } else { vec![1, 2, 7, 31, 32, 33] };
            for size in sizes {
                let chunked = bits(&runner.prompt(&prompt, &[size], vec![2, 3]));
                assert!(whole == chunked, "{} on {isa}: chunks of {size} differ from the whole", golden.name);
            }
            let mixed = bits(&runner.prompt(&prompt, &[5, 1, 1, 17, 2, 30], vec![5, 4]));
            assert!(whole == mixed, "{} on {isa}: mixed chunks differ from the whole", golden.name);
        }
    }
}

#[test]
fn one_thread_and_several_give_the_same_bits() {
    for golden in goldens() {
        let prompt = long_prompt(&golden);
        for isa in isas() {
            let run = |num_threads| {
                let backend = cpu(isa, num_threads).expect("an available instruction set");
                bits(&Runner::load(&golden.folder, backend, None, 2).prompt(&prompt, &[13], vec![1, 0]))
            };
            let one = run(1);
            assert!(one == run(2) && one == run(3), "{} on {isa}: threads change the result", golden.name);
        }
    }
}

#[test]
fn neighbours_in_the_batch_change_nothing() {
    for golden in goldens() {
        let Some(backend) = cpu(Isa::best(), 2) else { return };
        let mut runner = Runner::load(&golden.folder, backend, None, 32);
        let prompts: Vec<Vec<u32>> = (0..6).map(|i| long_prompt(&golden)[i..30 + 5 * i].to_vec()).collect();
        let alone: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| bits(&runner.prompt(prompt, &[prompt.len()], vec![30, 31]))).collect();

        // Sequences advance by chunks of their own size, join at different steps, and lie in scattered blocks.
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
            assert!(alone[i] == found[i], "{}: sequence {i} differs in company", golden.name);
        }
    }
}

#[test]
fn both_file_formats_of_a_model_agree() {
    // The GGUF of a Llama holds reordered rows, so its sums run in another order; elsewhere only constants are rounded differently.
    for golden in goldens() {
        let sources = golden.sources();
        if sources.len() < 2 || sources[0].1 != sources[1].1 {
            continue;
        }
        let Some(backend) = cpu(exact_isa(), 2) else { return };
        let prompt = long_prompt(&golden);
        let logits: Vec<Vec<f32>> = sources
            .iter()
            .map(|(path, _)| Runner::load(path, backend.clone(), None, 2).prompt(&prompt, &[60], vec![0, 1]))
            .collect();
        let worst = logits[0].iter().zip(&logits[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-4, "{}: the formats differ by {worst}", golden.name);
    }
}

#[test]
fn avx2_and_avx512_give_the_same_bits() {
    if !(Isa::Avx2.is_available() && Isa::Avx512.is_available()) {
        eprintln!("skipped: this machine has not both");
        return;
    }
    for golden in goldens() {
        let prompt = long_prompt(&golden);
        let run = |isa| {
            let backend = cpu(isa, 2).expect("an available instruction set");
            bits(&Runner::load(&golden.folder, backend, None, 2).prompt(&prompt, &[60], vec![0, 1]))
        };
        assert!(run(Isa::Avx2) == run(Isa::Avx512), "{}: instruction sets differ", golden.name);
    }
}
