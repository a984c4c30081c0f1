//! The suites of `pellucid selftest` on the CPU: every instruction set of this machine, with one thread and with
//! several.

use pellucid_cpu::Isa;
use pellucid_selftest::suites::{batch_invariance, fused_operations, operations, residual_stream};
use pellucid_testing::{cpu, cpu_products};

#[test]
fn every_operation_agrees_with_its_formula() {
    for isa in Isa::ALL {
        for num_threads in [1, 3] {
            let Some(backend) = cpu(isa, num_threads) else { continue };
            let checks = operations::run(&*backend);
            assert_eq!(checks.len(), 17, "number of checks");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        batch_invariance::few_linear_rows(&*backend);
    }
}

#[test]
fn experts_give_a_row_the_same_bits_alone_and_in_a_batch() {
    let backend = cpu(Isa::best(), 2).expect("the best instruction set is available");
    batch_invariance::expert_rows(&*backend);
}

#[test]
fn fused_operations_equal_their_parts() {
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        fused_operations::gated_equals_its_parts(&*backend);
        fused_operations::joined_input_equals_its_parts(&*backend);
    }
}

#[test]
fn operations_on_the_residual_stream_equal_their_parts() {
    // Without SIMD, these checks take a minute.
    for isa in Isa::ALL.into_iter().filter(|&isa| isa != Isa::Scalar) {
        let Some(backend) = cpu(isa, 2) else { continue };
        residual_stream::product_equals_its_parts(&*backend);
        residual_stream::normed_products_equal_their_parts(&*backend);
        residual_stream::gated_mlp_equals_its_parts(&*backend);
        residual_stream::experts_equal_their_parts(&*backend);
    }
}

#[test]
fn large_weights_are_uploaded_whole() {
    operations::large_weights(&*cpu(Isa::best(), 2).expect("the best instruction set is available"));
}

#[test]
fn attention_has_the_same_bits_alone_and_in_a_chunk() {
    for isa in Isa::ALL {
        for num_threads in [1, 3] {
            let Some(backend) = cpu(isa, num_threads) else { continue };
            batch_invariance::attention_rows(&*backend);
            fused_operations::attend_equals_its_parts(&*backend);
        }
    }
    batch_invariance::attention_rows_with_sinks(&*cpu(Isa::best(), 2).expect("the best instruction set is available"));
}

#[test]
fn products_have_one_definition_for_every_row_count() {
    let scalar = cpu(Isa::Scalar, 1).expect("scalar is always available");
    for isa in Isa::ALL {
        let Some(backend) = cpu(isa, 2) else { continue };
        cpu_products::match_scalar_and_formula(isa, &*backend, &*scalar);
    }
}

#[test]
fn products_do_not_depend_on_the_number_of_threads() {
    for isa in Isa::ALL {
        let (Some(one), Some(many)) = (cpu(isa, 1), cpu(isa, 16)) else { continue };
        cpu_products::threads_keep_bits(isa, &*one, &*many);
    }
}
