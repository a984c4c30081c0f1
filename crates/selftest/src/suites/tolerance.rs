//! Comparison with a formula in f64: each result has its own bound, a multiple of the rounding that its sums allow.

/// The relative size of one f32 rounding.
pub(super) const ROUNDING: f64 = 6e-8;

/// Every number within its own bound.
pub(super) fn close(what: &str, found: &[f32], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len(), "{what}: number of results");
    for (i, (&found, &(expected, bound))) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(found) - expected).abs();
        assert!(
            difference <= bound,
            "{what}: number {i} is {found}, expected {expected}, off by {difference:e} > {bound:e}"
        );
    }
}

/// A dot product in f64, and how far an f32 sum of any order may be off.
pub(super) fn dot(x: &[f32], w: &[f32]) -> (f64, f64) {
    let products = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
    (sum, size * ROUNDING * (x.len() as f64).sqrt().max(4.0) * 2.0)
}

/// The sum of the magnitudes of a dot product's terms.
pub(super) fn size_of_dot(x: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(w).map(|(&x, &w)| (f64::from(x) * f64::from(w)).abs()).sum()
}
