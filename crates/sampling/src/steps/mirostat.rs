//! Mirostat 2 (Basu et al., 2021): cut every token that would surprise by more than mu bits, draw, and move mu by how far the surprise
//! of the drawn token was from the target.
//!
//! As llama.cpp defines it: mu begins at twice the target, and the surprise of the drawn token is taken after the cut, with the
//! probabilities of those who were left.

use crate::candidates::Candidates;
use crate::params::Mirostat;

pub(crate) fn first_mu(mirostat: &Mirostat) -> f64 {
    2.0 * f64::from(mirostat.tau)
}

/// Keeps -log2 p <= mu, and always the most probable.
pub(crate) fn truncate(set: &mut Candidates<'_>, mu: f64) {
    // -ln p = h + ln(total).
    let reach = mu * std::f64::consts::LN_2 - libm::log(set.mass().total);
    if reach >= 0.0 {
        set.keep_from(set.cut_at(reach));
    } else if let Some(best) = set.best() {
        set.keep_only(best);
    }
}

/// mu after a token that had `probability` among those who were left.
pub(crate) fn next_mu(mirostat: &Mirostat, mu: f64, probability: f64) -> f64 {
    let surprise = -libm::log2(probability);
    mu - f64::from(mirostat.eta) * (surprise - f64::from(mirostat.tau))
}
