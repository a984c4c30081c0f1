//! Top-n-sigma (Tang et al., "Top-nσ: not all logits are you need", 2024): keeps logits of at least max - n * sigma,
//! where sigma is the standard deviation of the candidates' logits. A temperature divides both sides alike, so it does
//! not change what is kept.

use super::step::Effect;
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::Candidates;
use crate::row_blocks::moments;

pub(super) const DESCRIPTION: Description = Description {
    name: "top_n_sigma",
    label: |_| "sigma",
    effect: Effect::Truncates,
    is_movable: true,
    summary: "keeps logits within n standard deviations of the highest",
    is_used: |p| p.top_n_sigma != 0.0,
    option: |_| "top_n_sigma",
    short_setting: |p| p.top_n_sigma.to_string(),
    meaning: |p| format!("keeps logits within {} standard deviations of the highest", p.top_n_sigma),
    build: |p, _| Box::new(TopNSigma { n: p.top_n_sigma }),
};

#[derive(Debug)]
struct TopNSigma {
    n: f32,
}

impl Step for TopNSigma {
    fn setting(&self) -> String {
        self.n.to_string()
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        let sigma = match set.row() {
            Some((logits, _)) => standard_deviation(logits),
            None => {
                // Sorted, because a sum of floats depends on its order and the order of the list has no meaning.
                let mut logits: Vec<f32> = set.list().iter().map(|candidate| candidate.logit).collect();
                logits.sort_unstable_by(f32::total_cmp);
                standard_deviation(&logits)
            }
        };
        let cut = f64::from(set.largest()) - f64::from(self.n) * sigma;
        let rounded = cut as f32;
        set.keep_from(if f64::from(rounded) < cut { rounded.next_up() } else { rounded });
        Ok(())
    }
}

/// Takes two passes: distances from the mean lose no digits where the mean is large beside the spread.
fn standard_deviation(logits: &[f32]) -> f64 {
    let (count, sum, _) = moments(logits, 0.0);
    let (_, _, squares) = moments(logits, sum / count as f64);
    libm::sqrt(squares / count as f64)
}
