//! A steady step allocates nothing: what it needs is kept from the step before, on every thread that takes part.
//!
//! A test of its own, because it counts the allocations of the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pellucid_cpu::Isa;
use pellucid_model::{BLOCK_LEN, Batch, Chunk, Logits, Model};
use pellucid_testing::{Runner, cpu, subjects};

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

/// Rows of a step: one sequence by vectors, many by tiles.
const BATCHES: [usize; 2] = [1, 20];
/// Before a step is steady: every thread has had its part of every operation, which tasks that are shared out at random need not give it
/// the first time.
const WARM_UP: usize = 16;
const STEPS: usize = 4;

#[test]
fn a_steady_step_allocates_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let backend = cpu(Isa::best(), 2).expect("the best instruction set");
    for subject in subjects(folder.path()) {
        // Experts are chosen anew in every step, in lists of their own.
        if subject.name == "mixtral" || subject.name.contains("moe") {
            continue;
        }
        for num_sequences in BATCHES {
            let mut runner = Runner::load_with(&subject.path, backend.clone(), None, num_sequences, subject.kv_dtype);
            let (mut batch, mut logits) = (Batch::default(), Logits::default());
            let mut counts = [0; STEPS];
            for step in 0..WARM_UP + STEPS {
                assert!(step < BLOCK_LEN);
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                batch.clear();
                for sequence in 0..num_sequences as u32 {
                    let ids = &subject.prompt[step..step + 1];
                    batch.push(
                        Chunk { ids, first_position: step, blocks: &[sequence], wanted: 0..1, query: None },
                        BLOCK_LEN,
                    );
                }
                runner.model.forward(&batch, &mut runner.kv, &mut logits).expect("a step");
                if let Some(steady) = step.checked_sub(WARM_UP) {
                    counts[steady] = ALLOCATIONS.load(Ordering::Relaxed) - before;
                }
            }
            let (name, kv_dtype) = (&subject.name, subject.kv_dtype);
            // Now and then a thread gets a part that it never had before; a step that allocates does so every time.
            assert_eq!(
                counts.iter().min(),
                Some(&0),
                "{name}, KV in {kv_dtype}, {num_sequences} sequences: {counts:?}"
            );
        }
    }
}
