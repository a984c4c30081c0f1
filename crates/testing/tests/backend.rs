//! The backend suite on the CPU: every instruction set that the machine has, on one thread and on several.

use pellucid_cpu::Isa;
use pellucid_selftest::suites::{batch_invariance, fused_operations, operations};
use pellucid_testing::{cpu, cpu_products};

#[test]
fn every_operation_agrees_with_its_formula() {
    for isa in Isa::ALL {
        for num_threads in [1, 3] {
            let Some(backend) = cpu(isa, num_threads) else { continue };
            let checks = operations::run(&*backend);
            assert_eq!(checks.len(), 9, "the suite ran whole");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_many_in_every_format() {
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        batch_invariance::few_linear_rows(&*backend);
    }
}

#[test]
fn a_row_has_the_same_experts_alone_and_among_many() {
    let backend = cpu(Isa::best(), 2).expect("the best there is");
    batch_invariance::expert_rows(&*backend);
}

#[test]
fn what_is_done_at_once_is_done_in_parts() {
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        fused_operations::gated_equals_its_parts(&*backend);
        fused_operations::joined_input_equals_its_parts(&*backend);
    }
}

#[test]
fn large_weights_arrive_whole() {
    operations::large_weights(&*cpu(Isa::best(), 2).expect("the best there is"));
}

#[test]
fn a_row_attends_alone_as_it_does_in_a_chunk() {
    for isa in Isa::ALL {
        for num_threads in [1, 3] {
            let Some(backend) = cpu(isa, num_threads) else { continue };
            batch_invariance::attention_rows(&*backend);
            fused_operations::attend_equals_its_parts(&*backend);
        }
    }
}

#[test]
fn products_have_one_definition_for_every_number_of_rows() {
    let scalar = cpu(Isa::Scalar, 1).expect("scalar is always there");
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        cpu_products::match_scalar_and_formula(isa, &*backend, &*scalar);
    }
}

#[test]
fn products_are_the_same_however_many_threads_share_them_out() {
    for isa in Isa::ALL {
        let (Some(one), Some(many)) = (cpu(isa, 1), cpu(isa, 16)) else { continue };
        cpu_products::threads_keep_bits(isa, &*one, &*many);
    }
}
