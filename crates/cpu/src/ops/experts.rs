//! Choosing experts and running their MLPs.
//!
//! Rows are grouped by expert so that an expert's weights are read once; a row adds up its experts in ascending order of their
//! number, whatever the other rows chose.

use pellucid_tensor::Routing;

use crate::math;

/// The experts of one row with their weights, in ascending order of the expert's number.
///
/// Softmax over all experts, then the highest probabilities (ties to the lower number), normalised when asked for.
pub(crate) fn select(logits: &[f32], routing: Routing) -> Vec<(usize, f32)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f32> = logits.iter().map(|&logit| math::exp(logit - largest)).collect();
    let sum: f32 = exponentials.iter().sum();
    let mut experts: Vec<(usize, f32)> = exponentials.iter().map(|e| e / sum).enumerate().collect();
    experts.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    experts.truncate(routing.num_selected);
    if routing.normalize {
        let selected: f32 = experts.iter().map(|expert| expert.1).sum();
        experts.iter_mut().for_each(|expert| expert.1 /= selected);
    }
    experts.sort_by_key(|expert| expert.0);
    experts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_experts_share_the_weight() {
        let routing = Routing { num_selected: 2, normalize: true };
        let selected = select(&[0.0, 2.0, -1.0, 1.0], routing);
        assert_eq!(selected.iter().map(|s| s.0).collect::<Vec<_>>(), [1, 3]);
        let expected = 1.0 / (1.0 + (-1f32).exp());
        assert!((selected[0].1 - expected).abs() < 1e-6 && (selected[0].1 + selected[1].1 - 1.0).abs() < 1e-6);

        let all = select(&[0.0, 2.0, -1.0, 1.0], Routing { num_selected: 4, normalize: false });
        assert!((all.iter().map(|s| s.1).sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_number() {
        let selected = select(&[1.0; 5], Routing { num_selected: 2, normalize: true });
        assert_eq!(selected.iter().map(|s| s.0).collect::<Vec<_>>(), [0, 1]);
    }
}
