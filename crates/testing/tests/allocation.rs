//! A step allocates nothing once the engine is warm: every thread keeps its buffers from the step before.
//!
//! This is a separate test program because it counts the allocations of the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pellucid_cpu::Isa;
use pellucid_model::{BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Logits, Model, QuantScheme, SyntheticModel};
use pellucid_selftest::Runner;
use pellucid_tensor::{DType, StateSave};
use pellucid_testing::{cpu, invariance_cases};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system's allocator with the same arguments.
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

/// Sequences per step. One and eight use vector kernels, sixteen AMX tiles that unpack weights, twenty the AMX kernels
/// for many rows.
const BATCHES: [usize; 4] = [1, 8, 16, 20];
/// Steps before counting. Tasks go to random threads, so it takes several steps until every thread has run every
/// operation.
const WARM_UP: usize = 16;
const STEPS: usize = 4;

#[test]
fn a_warm_step_allocates_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let backend = cpu(Isa::best(), 2).expect("the best instruction set");
    for case in invariance_cases(folder.path()) {
        let what = format!("{}, KV in {}", case.name, case.kv_dtype);
        for num_sequences in BATCHES {
            let runner = Runner::load_with(&case.path, backend.clone(), None, num_sequences, case.kv_dtype);
            assert_allocates_nothing(&what, runner, num_sequences, &case.prompt);
        }
    }
    let prompt: Vec<u32> = (0..(WARM_UP + STEPS) as u32).map(|i| i * 37 % 512).collect();
    for scheme in QuantScheme::ALL {
        let checkpoint =
            SyntheticModel::ALL[0].miniature().checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
        // The instruction sets that keep rows in a packed form.
        for isa in [Isa::Avx512, Isa::Amx] {
            let Some(backend) = cpu(isa, 2) else { continue };
            for num_sequences in BATCHES {
                let runner = Runner::of(&checkpoint, backend.clone(), None, num_sequences, DType::F16);
                assert_allocates_nothing(&format!("{} on {isa}", scheme.name()), runner, num_sequences, &prompt);
            }
        }
    }
}

/// Decodes step by step and counts the allocations of the last steps.
fn assert_allocates_nothing(what: &str, mut runner: Runner, num_sequences: usize, ids: &[u32]) {
    let (mut batch, mut logits) = (Batch::default(), Logits::default());
    let mut counts = [0; STEPS];
    for step in 0..WARM_UP + STEPS {
        assert!(step < BLOCK_LEN);
        let windows: Vec<_> =
            (0..num_sequences as u32).map(|sequence| runner.window_blocks(&[sequence], step)).collect();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        batch.clear();
        for sequence in 0..num_sequences as u32 {
            let ids = &ids[step..step + 1];
            let save = StateSave { row: 0, slot: sequence };
            batch.push_with_windows(
                Chunk {
                    ids: ChunkIds::Tokens(ids),
                    first_position: step,
                    blocks: &[sequence],
                    wanted: 0..1,
                    queries: &[],
                    state: ChunkState::in_place(step, &save),
                },
                &windows[sequence as usize],
                BLOCK_LEN,
            );
        }
        runner.model.forward(&batch, &mut runner.kv, &mut logits).expect("a step");
        if let Some(steady) = step.checked_sub(WARM_UP) {
            counts[steady] = ALLOCATIONS.load(Ordering::Relaxed) - before;
        }
    }
    // A thread may still get its first task of a kind in some step; a kernel that allocates does so in every step.
    assert_eq!(counts.iter().min(), Some(&0), "{what}, {num_sequences} sequences: {counts:?}");
}
