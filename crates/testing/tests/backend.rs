//! The backend suite on the CPU: every instruction set that the machine has, on one thread and on several.

use pellucid_cpu::Isa;
use pellucid_testing::{backend_suite, cpu, fused_suite, products, row_suite};

#[test]
fn every_operation_agrees_with_its_formula() {
    for isa in Isa::ALL {
        for num_threads in [1, 3] {
            let Some(backend) = cpu(isa, num_threads) else { continue };
            let checks = backend_suite::run(&*backend);
            assert_eq!(checks.len(), 9, "the suite ran whole");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_many_in_every_format() {
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        row_suite::rows_stand_alone(&*backend);
    }
}

#[test]
fn a_row_has_the_same_experts_alone_and_among_many() {
    let backend = cpu(Isa::best(), 2).expect("the best there is");
    row_suite::expert_rows_stand_alone(&*backend);
}

#[test]
fn what_is_done_at_once_is_done_in_parts() {
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        fused_suite::gating_at_once_changes_nothing(&*backend);
        fused_suite::joining_first_changes_nothing(&*backend);
    }
}

#[test]
fn large_weights_arrive_whole() {
    backend_suite::large_weights(&*cpu(Isa::best(), 2).expect("the best there is"));
}

#[test]
fn a_row_attends_alone_as_it_does_in_a_chunk() {
    for isa in Isa::ALL {
        for num_threads in [1, 3] {
            let Some(backend) = cpu(isa, num_threads) else { continue };
            row_suite::attention_rows_stand_alone(&*backend);
            fused_suite::attending_at_once_changes_nothing(&*backend);
        }
    }
}

#[test]
fn products_have_one_definition_for_every_number_of_rows() {
    let scalar = cpu(Isa::Scalar, 1).expect("scalar is always there");
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        products::agree(isa, &*backend, &*scalar);
    }
}

#[test]
fn products_are_the_same_however_many_threads_share_them_out() {
    for isa in Isa::ALL {
        let (Some(one), Some(many)) = (cpu(isa, 1), cpu(isa, 16)) else { continue };
        products::threads_change_nothing(isa, &*one, &*many);
    }
}
