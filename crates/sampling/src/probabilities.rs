//! Probabilities of logits, given the total over a set.

use crate::exponential::exp_of_nonpositive;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Probabilities {
    /// Highest logit of the set. +inf: the tokens with it are equally probable and all others impossible. -inf: the set
    /// is empty.
    pub(crate) largest: f32,
    /// 1 / temperature.
    pub(crate) inverse: f32,
    /// Sum of e^((logit - largest) / temperature), or the number of logits at +inf if there are any.
    pub(crate) total: f64,
}

impl Probabilities {
    pub(crate) fn of(&self, logit: f32) -> f64 {
        match self.largest {
            f32::INFINITY if logit == f32::INFINITY => 1.0 / self.total,
            f32::INFINITY | f32::NEG_INFINITY => 0.0,
            _ => f64::from(exp_of_nonpositive((logit - self.largest) * self.inverse)) / self.total,
        }
    }

    /// Returns ln p without computing p, which may be too small for an f64.
    pub(crate) fn ln_of(&self, logit: f32) -> f64 {
        let exponent = match self.largest {
            f32::INFINITY if logit == f32::INFINITY => 0.0,
            f32::INFINITY => f64::NEG_INFINITY,
            _ => (f64::from(logit) - f64::from(self.largest)) * f64::from(self.inverse),
        };
        exponent - libm::log(self.total)
    }
}
