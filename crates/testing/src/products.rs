//! Products with quantized weights on the CPU: every instruction set and every number of rows against one definition.
//!
//! Two comparisons. In bits: with the scalar version. And with a formula in f64 over the decoded weights and the rounded activations,
//! whose tolerance is the rounding of f32 sums alone: an integer misplaced by the packing, a forgotten minimum or a wrong scale fails it.

use pellucid_tensor::{Backend, DType, Linear, Tensor};

use crate::backend_suite::Numbers;

/// The formats that are multiplied as integers, with the numbers of x that share a scale.
pub const INTEGER_FORMATS: [(DType, usize); 8] = [
    (DType::Q4_0, 64),
    (DType::Q4_1, 64),
    (DType::Q5_0, 64),
    (DType::Q5_1, 64),
    (DType::Q8_0, 64),
    (DType::Q4_K, 256),
    (DType::Q5_K, 256),
    (DType::Q6_K, 256),
];

/// Around the sizes of the kernels' blocks.
const ROW_COUNTS: [usize; 8] = [1, 2, 3, 5, 16, 17, 33, 64];

/// Compares `backend` with `scalar`, to the bit, and with the formula.
pub fn agree(backend: &dyn Backend, scalar: &dyn Backend) {
    let mut numbers = Numbers(3);
    for (dtype, group) in INTEGER_FORMATS {
        // One unit, an odd number of slices where the format allows one, and enough units for every loop to turn; panels that are not full.
        for (depth, num_columns) in [(dtype.block_len(), 7), (5 * dtype.block_len(), 37), (9 * dtype.block_len(), 64)] {
            let (weight, decoded) = numbers.weight(dtype, num_columns, depth);
            let x = numbers.normals(ROW_COUNTS[7] * depth);
            let linear = |backend: &dyn Backend| Linear {
                weight: backend.linear_weight(weight.clone()).expect("memory"),
                bias: None,
            };
            let (found, expected) = (linear(backend), linear(scalar));
            for rows in ROW_COUNTS {
                let case = format!("{dtype}, {rows} rows of {depth}, {num_columns} columns");
                let x = &x[..rows * depth];
                let found = product(backend, &found, x, depth);
                let expected = product(scalar, &expected, x, depth);
                assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{case}: bits differ");
                let rounded: Vec<f64> = x.chunks(depth).flat_map(|row| rounded(row, group)).collect();
                for (i, &found) in found.iter().enumerate() {
                    let (row, column) = (i / num_columns, i % num_columns);
                    let w = &decoded[column * depth..(column + 1) * depth];
                    let terms = || rounded[row * depth..].iter().zip(w).map(|(x, &w)| x * f64::from(w));
                    let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    // Minimums are summed apart from the products and may exceed their difference, hence the factor.
                    let bound = size * 8.0 * 6e-8 * (depth as f64 / 32.0).sqrt().max(4.0);
                    let difference = (f64::from(found) - sum).abs();
                    assert!(difference <= bound, "{case}: number {i} is {found}, expected {sum}, allowed {bound:e}");
                }
            }
        }
    }
}

fn product(backend: &dyn Backend, linear: &Linear, x: &[f32], depth: usize) -> Vec<f32> {
    let rows = x.len() / depth;
    let activation = |rows: usize, cols: usize| backend.zeros(DType::F32, rows, cols).expect("memory");
    let mut input: Tensor = activation(rows, depth);
    backend.write(x, &mut input).expect("a write");
    let mut out = activation(rows, linear.weight.rows());
    backend.linear(&input, linear, &mut out).expect("a product");
    let mut values = vec![0.0; out.len()];
    backend.read(&out, &mut values).expect("a read");
    values
}

/// The activations as the kernels see them: 8-bit integers times the scale of their group.
fn rounded(row: &[f32], group: usize) -> impl Iterator<Item = f64> {
    row.chunks(group).flat_map(|group| {
        let largest = group.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
        group.iter().map(move |x| f64::from((x * inverse).round_ties_even()) * f64::from(largest / 127.0))
    })
}
