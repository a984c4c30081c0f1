//! Routing of a mixture of experts: which rows go to which expert.
//!
//! Rows are grouped by expert so that an expert's weights are read once. A row adds up the results of its experts in
//! ascending order of their number, whatever the other rows chose.

use pellucid_tensor::{Routing, Scoring};

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
    /// All experts of the current row.
    scored: Vec<Scored>,
    /// The scores of the groups of the current row.
    groups: Vec<(usize, f32)>,
}

/// An expert of one row.
#[derive(Debug, Clone, Copy)]
struct Scored {
    expert: usize,
    score: f32,
    /// Value by which it is selected: the score and the bias.
    rank: f32,
}

impl Choices {
    /// Chooses the experts of every row of logits: the highest scores, after `bias` is added for the selection. Ties go
    /// to the lower number; `routing.normalize` makes the weights of a row add up to one before they are scaled.
    pub(crate) fn choose(&mut self, logits: &[f32], num_experts: usize, routing: Routing, bias: Option<&[f32]>) {
        self.choices.clear();
        for (row, logits) in logits.chunks_exact(num_experts).enumerate() {
            self.score(logits, routing.scoring, bias);
            if let Some(groups) = routing.groups {
                self.leave_groups(groups, routing.scoring);
            }
            let Choices { choices, scored, .. } = self;
            scored.sort_unstable_by(|a, b| b.rank.total_cmp(&a.rank).then(a.expert.cmp(&b.expert)));
            scored.truncate(routing.num_selected);
            let selected: f32 = scored.iter().map(|expert| expert.score).sum();
            let divisor = if routing.normalize { selected } else { 1.0 };
            let weight = |score: f32| score / divisor * routing.scale;
            choices.extend(scored.iter().map(|s| Choice { expert: s.expert, row, weight: weight(s.score) }));
        }
        self.choices.sort_unstable_by_key(|choice| (choice.expert, choice.row));
    }

    fn score(&mut self, logits: &[f32], scoring: Scoring, bias: Option<&[f32]>) {
        let scored = &mut self.scored;
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let score = |logit: f32| match scoring {
            Scoring::Softmax => math::exp(logit - largest),
            Scoring::Sigmoid => math::sigmoid(logit),
        };
        scored.clear();
        scored.extend(logits.iter().enumerate().map(|(expert, &logit)| Scored {
            expert,
            score: score(logit),
            rank: 0.0,
        }));
        if scoring == Scoring::Softmax {
            let sum: f32 = scored.iter().map(|expert| expert.score).sum();
            scored.iter_mut().for_each(|expert| expert.score /= sum);
        }
        for (i, expert) in scored.iter_mut().enumerate() {
            expert.rank = bias.map_or(expert.score, |bias| expert.score + bias[i]);
        }
    }

    /// Leaves the experts of the groups that rank highest: by the sum of their two highest ranks with sigmoid scores,
    /// by the highest with a softmax. Ties go to the lower group.
    fn leave_groups(&mut self, (num_groups, num_selected): (usize, usize), scoring: Scoring) {
        let Choices { scored, groups, .. } = self;
        let group_len = scored.len() / num_groups;
        groups.clear();
        groups.extend(scored.chunks_exact(group_len).enumerate().map(|(group, experts)| {
            let highest = |(first, second): (f32, f32), expert: &Scored| match expert.rank {
                rank if rank > first => (rank, first),
                rank => (first, second.max(rank)),
            };
            let (first, second) = experts.iter().fold((f32::NEG_INFINITY, f32::NEG_INFINITY), highest);
            (group, if scoring == Scoring::Sigmoid { first + second } else { first })
        }));
        groups.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        groups.truncate(num_selected);
        scored.retain(|expert| groups.iter().any(|group| group.0 == expert.expert / group_len));
    }

    /// Multiplies the weights of each expert by its factor.
    pub(crate) fn scale(&mut self, scales: &[f32]) {
        self.choices.iter_mut().for_each(|choice| choice.weight *= scales[choice.expert]);
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
        choices.choose(logits, num_experts, routing, None);
        choices.choices
    }

    #[test]
    fn the_most_probable_experts_share_the_weight() {
        let routing = Routing::softmax(2, true);
        let selected = choose(&[0.0, 2.0, -1.0, 1.0], 4, routing);
        assert_eq!(selected.iter().map(|choice| choice.expert).collect::<Vec<_>>(), [1, 3]);
        let expected = 1.0 / (1.0 + (-1f32).exp());
        let [first, second] = [selected[0].weight, selected[1].weight];
        assert!((first - expected).abs() < 1e-6 && (first + second - 1.0).abs() < 1e-6);

        let all = choose(&[0.0, 2.0, -1.0, 1.0], 4, Routing::softmax(4, false));
        assert!((all.iter().map(|choice| choice.weight).sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_number_and_rows_gather_at_their_experts() {
        let mut choices = Choices::default();
        let logits = [[1.0; 3], [0.0, 5.0, 4.0], [3.0, 2.0, 0.0]];
        choices.choose(logits.as_flattened(), 3, Routing::softmax(2, true), None);
        let rows: Vec<(usize, Vec<usize>)> =
            choices.by_expert().map(|rows| (rows[0].expert, rows.iter().map(|choice| choice.row).collect())).collect();
        assert_eq!(rows, [(0, vec![0, 2]), (1, vec![0, 1, 2]), (2, vec![1])]);
    }

    #[test]
    fn a_bias_and_groups_select_and_do_not_weigh() {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let routing = Routing { scoring: Scoring::Sigmoid, scale: 2.5, ..Routing::softmax(2, false) };
        let logits = [0.0, 2.0, -1.0, 1.0];
        let mut choices = Choices::default();
        choices.choose(&logits, 4, routing, Some(&[0.0, -1.0, 1.0, 0.0]));
        let found: Vec<(usize, f32)> = choices.choices.iter().map(|choice| (choice.expert, choice.weight)).collect();
        assert_eq!(found.iter().map(|choice| choice.0).collect::<Vec<_>>(), [2, 3]);
        assert!((found[0].1 - 2.5 * sigmoid(-1.0)).abs() < 1e-6 && (found[1].1 - 2.5 * sigmoid(1.0)).abs() < 1e-6);

        // The group of the experts 0 and 1 has the highest sum, although expert 3 is second.
        let grouped = Routing { groups: Some((2, 1)), ..routing };
        choices.choose(&[0.9, 2.0, -3.0, 1.0], 4, grouped, None);
        assert_eq!(choices.choices.iter().map(|choice| choice.expert).collect::<Vec<_>>(), [0, 1]);
    }
}
