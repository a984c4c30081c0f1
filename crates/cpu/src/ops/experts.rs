//! Routing of a mixture of experts: which rows go to which expert.
//!
//! Rows are grouped by expert so that an expert's weights are read once. A row adds up the results of its experts in
//! ascending order of their number, whatever the other rows chose.

use pellucid_tensor::Routing;

use crate::math;
use crate::memory::Buffer;

/// Memory that a mixture of experts keeps from step to step.
#[derive(Debug, Default)]
pub(crate) struct ExpertBuffers {
    pub(crate) choices: Choices,
    /// The rows of one expert, and the results of its products.
    pub(crate) rows: Buffer<f32>,
    pub(crate) gate: Buffer<f32>,
    pub(crate) up: Buffer<f32>,
    pub(crate) down: Buffer<f32>,
}

/// One row's choice of one expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub(crate) expert: usize,
    pub(crate) row: usize,
    pub(crate) weight: f32,
}

/// The choices of all rows.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    /// In ascending order of experts, then of rows.
    choices: Vec<Choice>,
    /// All experts with their probabilities, for the current row.
    probabilities: Vec<(usize, f32)>,
}

impl Choices {
    /// Chooses the experts of every row of logits: the highest probabilities of a softmax over all experts. Ties go to
    /// the lower number; `routing.normalize` makes the weights of a row add up to one.
    pub(crate) fn choose(&mut self, logits: &[f32], num_experts: usize, routing: Routing) {
        let Choices { choices, probabilities } = self;
        choices.clear();
        for (row, logits) in logits.chunks_exact(num_experts).enumerate() {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            probabilities.clear();
            probabilities.extend(logits.iter().map(|&logit| math::exp(logit - largest)).enumerate());
            let sum: f32 = probabilities.iter().map(|expert| expert.1).sum();
            probabilities.iter_mut().for_each(|expert| expert.1 /= sum);
            probabilities.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            probabilities.truncate(routing.num_selected);
            let selected: f32 = probabilities.iter().map(|expert| expert.1).sum();
            let divisor = if routing.normalize { selected } else { 1.0 };
            choices.extend(probabilities.iter().map(|&(expert, p)| Choice { expert, row, weight: p / divisor }));
        }
        choices.sort_unstable_by_key(|choice| (choice.expert, choice.row));
    }

    /// The rows of each expert that was chosen, in ascending order of both.
    pub(crate) fn by_expert(&self) -> impl Iterator<Item = &[Choice]> {
        self.choices.chunk_by(|a, b| a.expert == b.expert)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(logits: &[f32], num_experts: usize, routing: Routing) -> Vec<Choice> {
        let mut choices = Choices::default();
        choices.choose(logits, num_experts, routing);
        choices.choices
    }

    #[test]
    fn the_most_probable_experts_share_the_weight() {
        let routing = Routing { num_selected: 2, normalize: true };
        let selected = choose(&[0.0, 2.0, -1.0, 1.0], 4, routing);
        assert_eq!(selected.iter().map(|choice| choice.expert).collect::<Vec<_>>(), [1, 3]);
        let expected = 1.0 / (1.0 + (-1f32).exp());
        let [first, second] = [selected[0].weight, selected[1].weight];
        assert!((first - expected).abs() < 1e-6 && (first + second - 1.0).abs() < 1e-6);

        let all = choose(&[0.0, 2.0, -1.0, 1.0], 4, Routing { num_selected: 4, normalize: false });
        assert!((all.iter().map(|choice| choice.weight).sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_number_and_rows_gather_at_their_experts() {
        let mut choices = Choices::default();
        let logits = [[1.0; 3], [0.0, 5.0, 4.0], [3.0, 2.0, 0.0]];
        choices.choose(logits.as_flattened(), 3, Routing { num_selected: 2, normalize: true });
        let rows: Vec<(usize, Vec<usize>)> =
            choices.by_expert().map(|rows| (rows[0].expert, rows.iter().map(|choice| choice.row).collect())).collect();
        assert_eq!(rows, [(0, vec![0, 2]), (1, vec![0, 1, 2]), (2, vec![1])]);
    }
}
