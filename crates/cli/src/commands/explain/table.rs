//! The trace of one token as a table: a row for each shown candidate, a column for each sampling step.
//!
//! Computes the values from the trace and the model's own log probabilities; `page.rs` draws them.

use std::collections::BTreeSet;

use pellucid_sampling::{Logprobs, StepTrace, TokenTrace};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Cell {
    /// The candidate is left, with this probability.
    In(f64),
    /// This step removed the candidate.
    Cut,
    /// An earlier step removed the candidate.
    Gone,
    /// The trace does not contain the candidate: it holds the 20 most probable of each step.
    Unrecorded,
}

impl Cell {
    pub(super) fn probability(self) -> f64 {
        if let Cell::In(probability) = self { probability } else { 0.0 }
    }
}

/// A candidate and its probability after each step.
#[derive(Debug)]
pub(super) struct CandidateRow {
    pub(super) id: u32,
    /// The model's own probability, before any step.
    pub(super) model: Cell,
    /// Probability after each step that has a column.
    pub(super) after: Vec<Cell>,
    /// Probability in the draw.
    pub(super) last: Cell,
}

#[derive(Debug)]
pub(super) struct Table<'t> {
    pub(super) columns: Vec<&'t StepTrace>,
    /// Steps of the chain that have no column.
    pub(super) without_column: Vec<&'t StepTrace>,
    /// Sorted by the model's own probability, highest first.
    pub(super) rows: Vec<CandidateRow>,
    /// Candidates before the first step.
    pub(super) entered: usize,
}

impl<'t> Table<'t> {
    /// Returns the table with at most `num_rows` rows and `max_columns` steps.
    pub(super) fn new(
        trace: &'t TokenTrace,
        logprobs: &Logprobs,
        num_rows: usize,
        vocab_size: usize,
        max_columns: usize,
    ) -> Table<'t> {
        let mut columns: Vec<&StepTrace> = trace.steps.iter().collect();
        let mut without_column = Vec::new();
        if columns.len() > max_columns {
            let (acted, idle) = columns.into_iter().partition(|step| acts(step));
            (columns, without_column) = (acted, idle);
            // The last steps matter most, because they decide between the remaining candidates.
            let surplus = columns.len().saturating_sub(max_columns);
            without_column.extend(columns.drain(..surplus));
        }
        let history = |id| Path::new(trace, logprobs, id);
        let mut rows: Vec<CandidateRow> = (chosen_ids(trace, logprobs, num_rows).into_iter())
            .map(|id| {
                let path = history(id);
                let after = columns.iter().map(|column| path.after(trace, column)).collect();
                CandidateRow { id, model: path.model, after, last: path.last() }
            })
            .collect();
        // Unrecorded candidates count as 0, so they come last.
        rows.sort_by(|a, b| {
            (b.model.probability().total_cmp(&a.model.probability()))
                .then(b.last.probability().total_cmp(&a.last.probability()))
                .then(a.id.cmp(&b.id))
        });
        let entered = trace.steps.first().map_or(vocab_size, |step| step.entered);
        Table { columns, without_column, rows, entered }
    }
}

/// Whether a step changed any probability.
pub(super) fn acts(step: &StepTrace) -> bool {
    step.left != step.entered
        || step.candidates.iter().any(|candidate| (candidate.before - candidate.after).abs() > 1e-12)
}

/// The probabilities of one candidate after each step.
struct Path {
    model: Cell,
    after: Vec<Cell>,
}

impl Path {
    fn new(trace: &TokenTrace, logprobs: &Logprobs, id: u32) -> Path {
        let listed = logprobs.top.iter().find(|(top, _)| *top == id).map(|&(_, logprob)| logprob);
        let own = listed.or((trace.draw.winner.id == id).then_some(trace.logprob));
        let first = trace.steps.first().and_then(|step| step.candidates.iter().find(|candidate| candidate.id == id));
        let model = match (own, first) {
            (Some(logprob), _) => Cell::In(f64::from(logprob).exp()),
            (None, Some(first)) => Cell::In(first.before),
            (None, None) => Cell::Unrecorded,
        };
        let mut is_out = false;
        let mut after: Vec<Cell> = Vec::with_capacity(trace.steps.len());
        for step in &trace.steps {
            let found = step.candidates.iter().find(|candidate| candidate.id == id);
            after.push(match found {
                _ if is_out => Cell::Gone,
                Some(candidate) if candidate.cut => Cell::Cut,
                Some(candidate) => Cell::In(candidate.after),
                // The trace holds every candidate that was left, so this one was cut, by this step or before it.
                None if step.candidates.iter().filter(|candidate| candidate.after > 0.0).count() == step.left => {
                    Cell::Gone
                }
                None => Cell::Unrecorded,
            });
            is_out |= matches!(after.last(), Some(Cell::Cut | Cell::Gone));
        }
        // The draw names its first two candidates even if the trace of the last step does not contain them.
        let runners = [Some(trace.draw.winner), trace.draw.runner_up];
        if let Some(runner) = runners.into_iter().flatten().find(|runner| runner.id == id)
            && let Some(last) = after.last_mut()
        {
            *last = Cell::In(runner.probability);
            fill_gaps(&trace.steps, model, &mut after);
        }
        Path { model, after }
    }

    fn after(&self, trace: &TokenTrace, step: &StepTrace) -> Cell {
        let index = trace.steps.iter().position(|other| other.kind == step.kind);
        index.map_or(Cell::Unrecorded, |index| self.after[index])
    }

    fn last(&self) -> Cell {
        match self.after.last() {
            None => self.model,
            Some(Cell::Cut) => Cell::Gone,
            Some(&last) => last,
        }
    }
}

/// Computes the unrecorded probabilities of a candidate that reached the draw: a step that only removes candidates
/// scales the probabilities of all others by one factor.
fn fill_gaps(steps: &[StepTrace], model: Cell, after: &mut [Cell]) {
    for i in (1..steps.len()).rev() {
        if let (Cell::Unrecorded, Cell::In(later), Some(scale)) = (after[i - 1], after[i], scale(&steps[i])) {
            after[i - 1] = Cell::In(later / scale);
        }
    }
    for i in 0..steps.len() {
        let before = if i == 0 { model } else { after[i - 1] };
        if let (Cell::In(before), Cell::Unrecorded, Some(scale)) = (before, after[i], scale(&steps[i])) {
            after[i] = Cell::In(before * scale);
        }
    }
}

/// Returns the factor by which a step scaled the remaining probabilities; `None` for steps that change logits.
fn scale(step: &StepTrace) -> Option<f64> {
    if !step.kind.only_removes() {
        return None;
    }
    let survivor = step.candidates.iter().find(|candidate| candidate.before > 0.0 && candidate.after > 0.0)?;
    Some(survivor.after / survivor.before)
}

/// Returns the candidates that get a row: the winner, the runner-up, the most probable one that each step removed, then
/// those with the highest probability at any point.
fn chosen_ids(trace: &TokenTrace, logprobs: &Logprobs, num_rows: usize) -> BTreeSet<u32> {
    let mut ids = BTreeSet::from([trace.draw.winner.id]);
    let mut take = |id: u32| {
        if ids.len() < num_rows {
            ids.insert(id);
        }
    };
    trace.draw.runner_up.iter().for_each(|runner| take(runner.id));
    let mut prominent: Vec<(u32, f64)> =
        logprobs.top.iter().map(|&(id, logprob)| (id, f64::from(logprob).exp())).collect();
    // Half of the rows are kept for the most probable candidates, so that the model's own distribution is visible.
    let removed = trace.steps.iter().rev().filter_map(|step| step.candidates.iter().find(|candidate| candidate.cut));
    removed.take(num_rows / 2).for_each(|candidate| take(candidate.id));
    for step in &trace.steps {
        prominent.extend(step.candidates.iter().map(|candidate| (candidate.id, candidate.before.max(candidate.after))));
    }
    prominent.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    prominent.into_iter().for_each(|(id, _)| take(id));
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use pellucid_sampling::{Input, Sampler, SamplingParams, StepKind, Workspace};

    fn traced(params: &SamplingParams, logits: &[f32]) -> (TokenTrace, Logprobs) {
        let params = SamplingParams { logprobs: Some(20), ..params.clone() };
        let sampler = Sampler::new(&params, logits.len()).unwrap();
        let history = sampler.history(&[0]);
        let input = Input { logits, history: &history, position: 1, mask: None };
        let (choice, trace) = sampler.trace(&input, &mut sampler.state(), &mut Workspace::new()).unwrap();
        (trace, choice.logprobs.unwrap())
    }

    const LOGITS: [f32; 7] = [8.7, 6.2, 5.9, 5.1, 4.3, 4.1, 3.8];

    #[test]
    fn a_row_follows_its_candidate_through_the_steps() {
        let params = SamplingParams { temperature: 0.5, top_k: 3, ..SamplingParams::default() };
        let (trace, logprobs) = traced(&params, &LOGITS);
        let table = Table::new(&trace, &logprobs, 7, 7, 6);
        assert_eq!(table.rows.iter().map(|row| row.id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
        let near = |cell: Cell, expected: f64| (cell.probability() - expected).abs() < 0.005;
        assert!(near(table.rows[0].model, 0.83) && near(table.rows[0].after[0], 0.99), "{:?}", table.rows[0]);
        assert!(matches!(table.rows[2].after[1], Cell::In(_)));
        assert!(matches!(table.rows[3].after[..], [Cell::In(_), Cell::Cut]), "{:?}", table.rows[3]);
        assert_eq!(table.rows[3].last, Cell::Gone);
    }

    #[test]
    fn the_model_alone_still_has_rows() {
        let (trace, logprobs) = traced(&SamplingParams::default(), &LOGITS);
        let table = Table::new(&trace, &logprobs, 4, 7, 6);
        assert!(table.columns.is_empty() && table.entered == 7);
        assert!(table.rows.iter().any(|row| row.id == trace.draw.winner.id) && table.rows.len() == 4);
        assert!(table.rows.iter().all(|row| row.last == row.model));
    }

    #[test]
    fn a_winner_from_far_below_is_followed_all_the_way() {
        // A hundred nearly equal candidates: the trace holds 20 of each step, and most winners are not among them.
        let logits: Vec<f32> = (0..100u16).map(|i| 5.0 - f32::from(i) / 100.0).collect();
        let samplers = Some(vec![StepKind::TopK, StepKind::Temperature, StepKind::TopP]);
        let mut num_unrecorded = 0;
        for seed in 0..20 {
            let params = SamplingParams {
                seed,
                temperature: 2.0,
                top_k: 80,
                top_p: 0.9,
                samplers: samplers.clone(),
                ..SamplingParams::default()
            };
            let (trace, logprobs) = traced(&params, &logits);
            let winner = trace.draw.winner.id;
            num_unrecorded += usize::from(trace.steps[2].candidates.iter().all(|candidate| candidate.id != winner));
            let table = Table::new(&trace, &logprobs, 8, 100, 6);
            let row = table.rows.iter().find(|row| row.id == winner).unwrap();
            // By definition: the first 80 candidates, and those of them that reach 0.9 at temperature 2.
            let weight = |id: u32, temperature: f64| (f64::from(logits[id as usize]) / temperature).exp();
            let among = |count: u32, temperature| {
                weight(winner, temperature) / (0..count).map(|id| weight(id, temperature)).sum::<f64>()
            };
            let left = trace.steps[2].left as u32;
            for (cell, expected) in row.after.iter().zip([among(80, 1.0), among(80, 2.0), among(left, 2.0)]) {
                assert!((cell.probability() / expected - 1.0).abs() < 1e-5, "seed {seed}: {cell:?}, {expected}");
            }
        }
        assert!(num_unrecorded > 5, "{num_unrecorded}");
    }

    #[test]
    fn a_removed_candidate_has_a_row() {
        let params = SamplingParams { top_k: 6, ..SamplingParams::default() };
        let (trace, logprobs) = traced(&params, &LOGITS);
        let table = Table::new(&trace, &logprobs, 4, 7, 6);
        let removed = table.rows.iter().find(|row| row.id == 6).expect("the seventh is cut and shown");
        assert_eq!(removed.after, [Cell::Cut]);
    }

    #[test]
    fn more_steps_than_columns() {
        let params = SamplingParams {
            temperature: 0.9,
            top_n_sigma: 50.0,
            top_k: 6,
            typical_p: 0.999,
            top_p: 0.99,
            min_p: 0.001,
            xtc_probability: 0.5,
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            ..SamplingParams::default()
        };
        let (trace, logprobs) = traced(&params, &LOGITS);
        let table = Table::new(&trace, &logprobs, 7, 7, 6);
        assert_eq!(trace.steps.len(), 9);
        assert!(table.columns.len() <= 6);
        assert_eq!(table.columns.len() + table.without_column.len(), 9);
    }
}
