//! Matrix products, embedding and gathering of rows, in every weight format.

use pellucid_tensor::{Backend, DType, HostWeight, Linear, TableRows};

use crate::suites::harness::Harness;
use crate::suites::random_data::{LARGE, MODEST, RandomData, ScaleBits};
use crate::suites::tolerance::{ROUNDING, close, dot, size_of_dot};

/// Whether products with BF16 weights first round their input to BF16, as tensor cores and AMX tiles do.
pub fn rounds_activations(backend: &dyn Backend) -> bool {
    let harness = Harness { backend, random: RandomData(1) };
    let cols = 64;
    let bytes: Vec<u8> = (0..cols).flat_map(|_| 0x3f80u16.to_le_bytes()).collect();
    let weight = HostWeight { dtype: DType::BF16, rows: 1, cols, bytes: bytes.into() };
    let linear = Linear { weight: backend.linear_weight(weight).expect("an upload"), bias: None };
    let mut x = vec![0.0; cols];
    // A value with four more bits than bf16 holds.
    x[0] = 1.0 + 2f32.powi(-12);
    let mut out = harness.zeros(1, 1);
    backend.linear(&harness.activation(&x, cols), &linear, &mut out).expect("a product");
    harness.read(&out)[0] != x[0]
}

/// Returns the maximum error of a product due to rounded activations. With quantized weights, a backend may round
/// activations to 8 bits, in groups of at most 256 values: an error is then uniform within half a step of its group,
/// and the weighted sum of the errors stays within six standard deviations. With 16-bit weights, it may round each
/// activation to the weights' format.
fn activation_rounding(dtype: DType, x: &[f32], w: &[f32]) -> f64 {
    match dtype {
        DType::F32 => return 0.0,
        DType::F16 => return size_of_dot(x, w) * 2f64.powi(-11),
        DType::BF16 => return size_of_dot(x, w) * 2f64.powi(-8),
        _ => {}
    }
    let variance = x.chunks(256).zip(w.chunks(256)).map(|(x, w)| {
        let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let step = f64::from(largest) / 127.0;
        step * step / 12.0 * w.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
    });
    6.0 * variance.sum::<f64>().sqrt()
}

pub(super) fn linear(harness: &mut Harness<'_>) {
    for dtype in DType::ALL {
        // Row and column counts around the kernels' tile sizes; every format at two depths or more.
        let unit = dtype.block_len();
        let depths = if unit == 1 { vec![1, 17, 96, 300] } else { vec![unit, 3 * unit] };
        for cols in depths {
            for (num_rows, num_outputs) in [(1, 1), (1, 37), (7, 5), (13, 64), (70, 40)] {
                product(harness, dtype, [num_rows, cols, num_outputs], MODEST);
            }
        }
        if unit > 1 {
            product(harness, dtype, [2, 2 * unit, 37], LARGE);
        }
    }
}

fn product(harness: &mut Harness<'_>, dtype: DType, [num_rows, cols, num_outputs]: [usize; 3], scales: ScaleBits) {
    let mut x = harness.random.normals(num_rows * cols);
    // One row has values beyond the range of f16.
    if num_rows > 7 && cols > 17 {
        x[5 * cols..6 * cols].iter_mut().for_each(|x| *x *= 1e5);
    }
    let bias = harness.random.normals(num_outputs);
    let (weight, decoded) = harness.random.weight_scaled(dtype, num_outputs, cols, scales);
    let weight = harness.backend.linear_weight(weight).expect("an upload");
    let linear = Linear { weight, bias: Some(harness.vector(&bias)) };
    let mut out = harness.zeros(num_rows, num_outputs);
    harness.backend.linear(&harness.activation(&x, cols), &linear, &mut out).expect("linear");
    let expected: Vec<(f64, f64)> = (x.chunks_exact(cols))
        .flat_map(|x| decoded.chunks_exact(cols).zip(&bias).map(move |(w, bias)| (x, w, bias)))
        .map(|(x, w, &bias)| {
            let (sum, bound) = dot(x, w);
            let bound = bound + ROUNDING * (sum.abs() + f64::from(bias.abs()));
            (sum + f64::from(bias), bound + activation_rounding(dtype, x, w))
        })
        .collect();
    close(&format!("linear {dtype} {num_rows}x{cols}x{num_outputs}"), &harness.read(&out), &expected);
}

pub(super) fn embed(harness: &mut Harness<'_>) {
    for dtype in DType::ALL {
        let cols = dtype.block_len() * 2;
        let (weight, decoded) = harness.random.weight(dtype, 9, cols);
        let table = harness.upload(weight);
        let ids = [8, 0, 3, 3];
        let mut out = harness.zeros(4, cols);
        harness.backend.embed(&table, TableRows::Positions(&ids), 2.5, &mut out).expect("embed");
        let row = |id: u32| decoded[id as usize * cols..][..cols].iter();
        let expected: Vec<(f64, f64)> = (ids.iter())
            .flat_map(|&id| row(id))
            .map(|&value| (f64::from(value) * 2.5, f64::from(value.abs()) * 2.5 * ROUNDING))
            .collect();
        close(&format!("embed {dtype}"), &harness.read(&out), &expected);
    }
    let x = harness.random.normals(5 * 3);
    let mut out = harness.zeros(2, 3);
    harness.backend.gather_rows(&harness.activation(&x, 3), &[4, 1], &mut out).expect("gather");
    assert_eq!(harness.read(&out), [&x[12..15], &x[3..6]].concat());
}

/// Checks matrices of tens of megabytes, which a device may upload in pieces: a few columns, each read by a product
/// with a one-hot row, and a few rows of an embedding table.
pub fn large_weights(backend: &dyn Backend) {
    const OUTPUTS: usize = 2203;
    const COLS: usize = 4096;
    let mut harness = Harness { backend, random: RandomData(6) };
    for dtype in [DType::F32, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q6_K, DType::Q4_1] {
        let (weight, decoded) = harness.random.weight(dtype, OUTPUTS, COLS);
        let linear = Linear { weight: backend.linear_weight(weight.clone()).expect("an upload"), bias: None };
        for col in [0, 1234, COLS - 1] {
            let mut x = vec![0.0; COLS];
            x[col] = 1.0;
            let mut out = harness.zeros(1, OUTPUTS);
            backend.linear(&harness.activation(&x, COLS), &linear, &mut out).expect("linear");
            // A weight may be rounded to 16 bits, and so may its scale.
            let bound = |value: f64| (value, value.abs() * 2e-3 + 1e-6);
            let expected: Vec<(f64, f64)> = decoded.chunks_exact(COLS).map(|row| bound(f64::from(row[col]))).collect();
            close(&format!("column {col} of a large matrix of {dtype}"), &harness.read(&out), &expected);
        }
        let ids = [0u32, 2202, 1111, 1023, 1024];
        let mut rows = harness.zeros(ids.len(), COLS);
        backend.embed(&harness.upload(weight), TableRows::Positions(&ids), 1.0, &mut rows).expect("embed");
        let expected: Vec<f32> =
            ids.iter().flat_map(|&id| &decoded[id as usize * COLS..(id as usize + 1) * COLS]).copied().collect();
        assert!(harness.read(&rows) == expected, "rows of a large table of {dtype}");
    }
}
