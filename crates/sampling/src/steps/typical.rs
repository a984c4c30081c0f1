//! Typical sampling (Meister et al., "Locally typical sampling", 2022): orders tokens by |-ln p_i - entropy| and keeps
//! the smallest set whose sum reaches p. Ties go to the more probable token, then to the lower id. Never empty.

use super::step::{Effect, percent};
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::{Candidate, Candidates, by_rank, units_of_share};

pub(super) const DESCRIPTION: Description = Description {
    name: "typical_p",
    label: |_| "typic",
    effect: Effect::Truncates,
    is_movable: true,
    summary: "keeps the tokens whose surprise is closest to the entropy, until their sum reaches p",
    is_used: |p| p.typical_p < 1.0,
    option: |_| "typical_p",
    short_setting: |p| p.typical_p.to_string(),
    meaning: |p| format!("keeps those closest to the expected surprise that together reach {}", percent(p.typical_p)),
    build: |p, _| Box::new(Typical { p: p.typical_p }),
};

#[derive(Debug)]
struct Typical {
    p: f32,
}

impl Step for Typical {
    fn setting(&self) -> String {
        self.p.to_string()
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        let mass = set.mass();
        let target = units_of_share(&mass, self.p);
        // -ln p = h + ln(total), so the distance to the entropy is that of h to its mean.
        let mean_handicap = mass.handicap / mass.total;
        let (largest, temperature) = (f64::from(set.largest()), set.temperature());
        let distance =
            move |candidate: &Candidate| ((largest - f64::from(candidate.logit)) / temperature - mean_handicap).abs();
        // The most probable token has h = 0 and is as far from the mean as the mean is from 0. So the tokens with h up
        // to twice the mean plus one are exactly those at most the mean plus one away. Only if they do not reach the
        // target must the search in a row go farther.
        if set.row().is_some() {
            let cut = set.cut_at(2.0 * mean_handicap + 1.0);
            set.keep_from(if set.weight_from(cut) >= target { cut } else { f32::NEG_INFINITY });
        }
        set.keep_until(target, |a, b| distance(a).total_cmp(&distance(b)).then_with(|| by_rank(a, b)));
        Ok(())
    }
}
