//! From logits to probabilities, once the total over a set is known.

use crate::exponential::exp_of_nonpositive;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Probabilities {
    /// The highest logit of the set. +inf: those who have it share everything alike. -inf: the set is empty.
    pub(crate) largest: f32,
    /// 1 / temperature.
    pub(crate) inverse: f32,
    /// The sum of e^((logit - largest) / temperature); how many have +inf where any has.
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

    /// ln p, without passing through p: fine where p would be too small for a number.
    pub(crate) fn ln_of(&self, logit: f32) -> f64 {
        let exponent = match self.largest {
            f32::INFINITY if logit == f32::INFINITY => 0.0,
            f32::INFINITY => f64::NEG_INFINITY,
            _ => (f64::from(logit) - f64::from(self.largest)) * f64::from(self.inverse),
        };
        exponent - libm::log(self.total)
    }
}
