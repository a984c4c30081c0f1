//! Matrix products on the CPU in every format that has a kernel: every instruction set and row count against one
//! definition.
//!
//! There are two comparisons. To the bit: with the scalar kernel (except BF16 on AMX tiles, whose order of summation no
//! other instruction has), and row by row with other row counts. And with a formula in f64 over the decoded weights and
//! the rounded activations, with a tolerance for the rounding of f32 sums alone: a misplaced integer, a forgotten
//! minimum or a wrong scale fails.

use pellucid_cpu::Isa;
use pellucid_selftest::suites::RandomData;
use pellucid_tensor::{Activation, Backend, DType, Input, Linear, Tensor};

/// The rounding of activations before they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rounding {
    None,
    Bf16,
    /// To 8 bits, in groups of this length that share a scale.
    Groups(usize),
}

/// The formats that have kernels; the others decode rows first and are checked by `suites::operations`.
const FORMATS: [(DType, Rounding); 18] = [
    (DType::F32, Rounding::None),
    (DType::F16, Rounding::None),
    (DType::BF16, Rounding::None),
    (DType::Q4_0, Rounding::Groups(32)),
    (DType::Q4_1, Rounding::Groups(32)),
    (DType::Q5_0, Rounding::Groups(32)),
    (DType::Q5_1, Rounding::Groups(32)),
    (DType::Q8_0, Rounding::Groups(32)),
    (DType::MXFP4, Rounding::Groups(32)),
    (DType::IQ4_NL, Rounding::Groups(32)),
    (DType::IQ4_XS, Rounding::Groups(32)),
    (DType::IQ3_S, Rounding::Groups(256)),
    (DType::TQ1_0, Rounding::Groups(32)),
    (DType::TQ2_0, Rounding::Groups(32)),
    (DType::Q3_K, Rounding::Groups(256)),
    (DType::Q4_K, Rounding::Groups(256)),
    (DType::Q5_K, Rounding::Groups(256)),
    (DType::Q6_K, Rounding::Groups(256)),
];

/// Row counts around the kernels' block sizes, the largest first.
const ROW_COUNTS: [usize; 8] = [64, 33, 17, 16, 5, 3, 2, 1];

/// Compares `backend`, which uses `isa`, with `scalar` to the bit and with the formula.
pub fn match_scalar_and_formula(isa: Isa, backend: &dyn Backend, scalar: &dyn Backend) {
    let mut random = RandomData(3);
    for (dtype, rounding) in FORMATS {
        let tiles = dtype == DType::BF16 && isa == Isa::Amx;
        let rounding = if tiles { Rounding::Bf16 } else { rounding };
        // Depths of one unit, of an odd number of slices, and enough for every loop and for two chunks of a panel;
        // partial panels.
        let unit = if dtype.is_quantized() { dtype.block_len() } else { 67 };
        for (depth, num_columns) in [(unit, 7), (5 * unit, 37), (9 * unit, 64), (1280_usize.next_multiple_of(unit), 17)]
        {
            let (weight, decoded) = random.weight(dtype, num_columns, depth);
            let x = random.normals(ROW_COUNTS[0] * depth);
            let linear = |backend: &dyn Backend| Linear {
                weight: backend.linear_weight(weight.clone()).expect("memory"),
                bias: None,
            };
            let (found, expected) = (linear(backend), linear(scalar));
            let all = product(backend, &found, &x, depth);
            // Once, for all row counts: that they do not matter to the scalar kernel is checked when it is `backend`.
            if isa != Isa::Scalar && !tiles {
                let case = format!("{dtype} on {isa}, rows of {depth}, {num_columns} columns");
                assert!(same_bits(&all, &product(scalar, &expected, &x, depth)), "{case}: bits differ from scalar");
            }
            for rows in ROW_COUNTS {
                let case = format!("{dtype} on {isa}, {rows} rows of {depth}, {num_columns} columns");
                let x = &x[..rows * depth];
                let found = product(backend, &found, x, depth);
                assert!(same_bits(&found, &all[..found.len()]), "{case}: the bits depend on the number of rows");
            }
            let rounded: Vec<f64> = x.chunks(depth).flat_map(|row| rounded(row, rounding)).collect();
            for (i, &found) in all.iter().enumerate() {
                let (row, column) = (i / num_columns, i % num_columns);
                let w = &decoded[column * depth..(column + 1) * depth];
                let terms = || rounded[row * depth..].iter().zip(w).map(|(x, &w)| x * f64::from(w));
                let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                // Minimums are summed separately from the products and may be larger than the difference, hence the
                // factor 8.
                let bound = size * 8.0 * 6e-8 * (depth as f64 / 32.0).sqrt().max(4.0);
                let difference = (f64::from(found) - sum).abs();
                assert!(
                    difference <= bound,
                    "{dtype} on {isa}, depth {depth}: {found}, expected {sum}, allowed {bound:e}"
                );
            }
        }
    }
}

/// Compares a backend with one thread to one with enough threads to divide rows as well as columns, to the bit.
pub fn threads_keep_bits(isa: Isa, one: &dyn Backend, many: &dyn Backend) {
    // A row count that does not divide evenly, with a partial last block.
    const ROWS: usize = 16 * 17 + 5;
    const COLUMNS: usize = 72;
    let mut random = RandomData(8);
    for (dtype, _) in FORMATS {
        let depth = 256;
        let weights = [(); 2].map(|()| random.weight(dtype, COLUMNS, depth).0);
        let x = random.normals(ROWS * depth);
        let [expected, found] = [one, many].map(|backend| {
            let maps = weights
                .each_ref()
                .map(|weight| Linear { weight: backend.linear_weight(weight.clone()).expect("memory"), bias: None });
            let zeros = |cols: usize| backend.zeros(DType::F32, ROWS, cols).expect("memory");
            let mut rows = zeros(depth);
            backend.write(&x, &mut rows).expect("a write");
            let [mut plain, mut gated, mut spare] = [(); 3].map(|()| zeros(COLUMNS));
            backend.linear(&rows, &maps[0], &mut plain).expect("a product");
            let outputs = [(&maps[0], &mut gated), (&maps[1], &mut spare)];
            backend.gated(Input::Rows(&rows), outputs, Activation::Silu).expect("a gated product");
            [plain, gated].map(|out| {
                let mut values = vec![0.0; out.len()];
                backend.read(&out, &mut values).expect("a read");
                values
            })
        });
        for (what, expected, found) in [("product", &expected[0], &found[0]), ("gated", &expected[1], &found[1])] {
            assert!(same_bits(expected, found), "{dtype} on {isa}, {what}: the bits depend on the number of threads");
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
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

/// Returns the activations as the kernels multiply them.
fn rounded(row: &[f32], rounding: Rounding) -> Vec<f64> {
    match rounding {
        Rounding::None => row.iter().map(|&x| f64::from(x)).collect(),
        Rounding::Bf16 => row.iter().map(|&x| f64::from(to_bf16(x))).collect(),
        Rounding::Groups(len) => (row.chunks(len))
            .flat_map(|group| {
                let largest = group.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
                group.iter().map(move |x| f64::from((x * inverse).round_ties_even()) * f64::from(largest / 127.0))
            })
            .collect(),
    }
}

/// Returns the nearest value with eight significant bits, by scaling it to an integer.
fn to_bf16(x: f32) -> f32 {
    if x == 0.0 {
        return x;
    }
    let step = 2f32.powi(x.abs().log2().floor() as i32 - 7);
    (x / step).round_ties_even() * step
}
