//! Comparison with a formula in f64: each result has its own bound, a multiple of the rounding that its sums allow.

/// The relative error of one f32 rounding.
pub(super) const ROUNDING: f64 = 6e-8;

/// Asserts that every value is within its bound of the expected one.
pub(super) fn close(what: &str, found: &[f32], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    for (i, (&found, &(expected, bound))) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(found) - expected).abs();
        assert!(
            difference <= bound,
            "{what}: value {i} is {found}, expected {expected}, off by {difference:e} > {bound:e}"
        );
    }
}

/// Returns a dot product in f64, and the maximum error of an f32 sum in any order.
pub(super) fn dot(x: &[f32], w: &[f32]) -> (f64, f64) {
    let products = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
    (sum, size * ROUNDING * (x.len() as f64).sqrt().max(4.0) * 2.0)
}

/// Returns the sum of the magnitudes of a dot product's terms.
pub(super) fn size_of_dot(x: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(w).map(|(&x, &w)| (f64::from(x) * f64::from(w)).abs()).sum()
}
