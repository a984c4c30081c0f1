//! Top-n-sigma (Tang et al., "Top-nσ: not all logits are you need", 2024): keep logits of at least max - n * sigma, with sigma the
//! standard deviation of the candidates' logits. Dividing all by a temperature changes both sides alike, so it keeps the same set.

use crate::blocks::moments;
use crate::candidates::Candidates;

pub(crate) fn top_n_sigma(set: &mut Candidates<'_>, n: f32) {
    // Two passes: distances are taken from the mean, so that no digits are lost where the mean is large beside the spread.
    let spread = |logits: &[f32]| {
        let (count, sum, _) = moments(logits, 0.0);
        let (_, _, squares) = moments(logits, sum / count as f64);
        libm::sqrt(squares / count as f64)
    };
    let sigma = match set.row() {
        Some((logits, _)) => spread(logits),
        None => {
            // In one order whatever the list's, because these sums are of floats.
            let mut logits: Vec<f32> = set.list().iter().map(|candidate| candidate.logit).collect();
            logits.sort_unstable_by(f32::total_cmp);
            spread(&logits)
        }
    };
    let cut = f64::from(set.largest()) - f64::from(n) * sigma;
    let rounded = cut as f32;
    set.keep_from(if f64::from(rounded) < cut { rounded.next_up() } else { rounded });
}
