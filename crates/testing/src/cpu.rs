//! CPU backends for tests, by instruction set.

use std::sync::Arc;

use pellucid_cpu::{CpuBackend, CpuOptions, Isa, Unusable};

/// Returns a CPU backend; `None`, with a message on stderr, if the machine lacks the instruction set.
pub fn cpu(isa: Isa, num_threads: usize) -> Option<Arc<CpuBackend>> {
    match CpuBackend::new(CpuOptions { num_threads, isa }) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(why @ Unusable::Isa(_)) => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

/// Returns the fastest instruction set that does not round activations for BF16 weights, which most goldens have: any
/// but AMX.
pub fn exact_isa() -> Isa {
    let mut exact = Isa::ALL.into_iter().filter(|&isa| isa != Isa::Amx && isa.is_available());
    exact.next_back().expect("scalar is always available")
}
