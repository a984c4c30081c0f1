//! Temperature: logit / T. Below 1 it sharpens the distribution, above 1 it flattens it, at 0 only the highest logit
//! stays.
//!
//! Dynamic temperature: T = low + (high - low) * (entropy / highest possible entropy)^exponent, where low and high are
//! temperature -+ range (low at least 0), the entropy is that of the candidates before the step, and the highest
//! possible entropy is ln(number of candidates).

use super::step::Effect;
use super::{Context, Description, Step};
use crate::candidates::Candidates;
use crate::digest::DigestPlan;
use crate::{Error, SamplingParams};

pub(super) const DESCRIPTION: Description = Description {
    name: "temperature",
    label: |_| "temp",
    effect: Effect::ScalesLogits,
    is_movable: true,
    summary: "divides the logits by T; T = 0 keeps the highest logit alone, ties to the lowest id. \
              Dynamic: T between temperature - range and temperature + range, by the entropy",
    is_used: |p| p.temperature != 1.0 || p.dynamic_temperature_range != 0.0,
    option: |p| if p.temperature == 1.0 { "dynamic_temperature_range" } else { "temperature" },
    short_setting: |p| {
        if p.dynamic_temperature_range != 0.0 {
            return format!("{}±{}", p.temperature, p.dynamic_temperature_range);
        }
        p.temperature.to_string()
    },
    meaning,
    build: |p, _| {
        if p.dynamic_temperature_range == 0.0 {
            return Box::new(Temperature { temperature: p.temperature });
        }
        Box::new(DynamicTemperature {
            temperature: p.temperature,
            range: p.dynamic_temperature_range,
            exponent: p.dynamic_temperature_exponent,
        })
    },
};

fn meaning(p: &SamplingParams) -> String {
    match p.temperature {
        _ if p.dynamic_temperature_range != 0.0 => "divides the logits, by more where the model is unsure".into(),
        0.0 => "greedy: the highest logit stays, alone".into(),
        temperature if temperature < 1.0 => format!("divides every logit by {temperature}: the likely gain"),
        temperature => format!("divides every logit by {temperature}: the unlikely gain"),
    }
}

#[derive(Debug)]
struct Temperature {
    temperature: f32,
}

impl Step for Temperature {
    fn setting(&self) -> String {
        self.temperature.to_string()
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        divide(set, f64::from(self.temperature));
        Ok(())
    }

    fn plan_digest(&self, plan: &mut DigestPlan) -> bool {
        plan.divide(f64::from(self.temperature));
        true
    }
}

#[derive(Debug)]
struct DynamicTemperature {
    temperature: f32,
    range: f32,
    exponent: f32,
}

impl Step for DynamicTemperature {
    fn setting(&self) -> String {
        format!("{} +- {}, exponent {}", self.temperature, self.range, self.exponent)
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        let count = set.count();
        if count < 2 {
            return Ok(());
        }
        let low = (f64::from(self.temperature) - f64::from(self.range)).max(0.0);
        let high = f64::from(self.temperature) + f64::from(self.range);
        let share = (set.mass().entropy() / libm::log(count as f64)).clamp(0.0, 1.0);
        divide(set, low + (high - low) * libm::pow(share, f64::from(self.exponent)));
        Ok(())
    }
}

/// Divides the logits. Where 1/T is too large for an f32 only the highest logit stays, ties to the lowest id.
fn divide(set: &mut Candidates<'_>, temperature: f64) {
    if ((1.0 / temperature) as f32).is_finite() {
        set.divide(temperature);
    } else if let Some(best) = set.best() {
        set.keep_only(best);
    }
}
