//! A steady step allocates nothing: what it needs is kept from the step before, on every thread that takes part.
//!
//! A file of its own, because it counts the allocations of the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pellucid_cpu::Isa;
use pellucid_model::{BLOCK_LEN, Batch, Chunk, Logits, Model, QuantScheme, SyntheticModel};
use pellucid_selftest::Runner;
use pellucid_tensor::DType;
use pellucid_testing::{cpu, invariance_cases};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator with the arguments it was given.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Sequences of a step: one and eight by vectors, sixteen by tiles that unpack weights on the way, twenty by those of many rows.
const BATCHES: [usize; 4] = [1, 8, 16, 20];
/// Before a step is steady: every thread has had its part of every operation, which tasks that are shared out at random need not give it
/// the first time.
const WARM_UP: usize = 16;
const STEPS: usize = 4;

#[test]
fn a_steady_step_allocates_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let backend = cpu(Isa::best(), 2).expect("the best instruction set");
    for subject in invariance_cases(folder.path()) {
        let what = format!("{}, KV in {}", subject.name, subject.kv_dtype);
        for num_sequences in BATCHES {
            let runner = Runner::load_with(&subject.path, backend.clone(), None, num_sequences, subject.kv_dtype);
            assert_steady(&what, runner, num_sequences, &subject.prompt);
        }
    }
    let prompt: Vec<u32> = (0..(WARM_UP + STEPS) as u32).map(|i| i * 37 % 512).collect();
    for scheme in QuantScheme::ALL {
        let checkpoint =
            SyntheticModel::ALL[0].miniature().checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
        // Those with rows in forms of their own.
        for isa in [Isa::Avx512, Isa::Amx] {
            let Some(backend) = cpu(isa, 2) else { continue };
            for num_sequences in BATCHES {
                let runner = Runner::of(&checkpoint, backend.clone(), None, num_sequences, DType::F16);
                assert_steady(&format!("{} on {isa}", scheme.name()), runner, num_sequences, &prompt);
            }
        }
    }
}

/// Decodes step by step, and counts the allocations of the last steps.
fn assert_steady(what: &str, mut runner: Runner, num_sequences: usize, ids: &[u32]) {
    let (mut batch, mut logits) = (Batch::default(), Logits::default());
    let mut counts = [0; STEPS];
    for step in 0..WARM_UP + STEPS {
        assert!(step < BLOCK_LEN);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        batch.clear();
        for sequence in 0..num_sequences as u32 {
            let ids = &ids[step..step + 1];
            batch.push(Chunk { ids, first_position: step, blocks: &[sequence], wanted: 0..1, query: None }, BLOCK_LEN);
        }
        runner.model.forward(&batch, &mut runner.kv, &mut logits).expect("a step");
        if let Some(steady) = step.checked_sub(WARM_UP) {
            counts[steady] = ALLOCATIONS.load(Ordering::Relaxed) - before;
        }
    }
    // Now and then a thread gets a part that it never had before; a step that allocates does so every time.
    assert_eq!(counts.iter().min(), Some(&0), "{what}, {num_sequences} sequences: {counts:?}");
}
