//! The last entry of the chain: the description of the draw, for `explain` and the documents. `apply` does nothing:
//! `draw.rs` at the root of the crate draws the token after all steps have run.

use super::step::Effect;
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::Candidates;

pub(super) const DESCRIPTION: Description = Description {
    name: "draw",
    label: |_| "draw",
    effect: Effect::Draws,
    is_movable: false,
    summary: "each remaining token i gets the time -ln(u_i) / p_i with u_i = Philox4x32-10(key = seed, \
              counter = (position, i, 0, 0)); the shortest time wins",
    is_used: |_| true,
    option: |_| "draw",
    short_setting: |_| String::new(),
    meaning: |p| {
        if p.temperature == 0.0 {
            return "with one candidate left, there is nothing to draw".into();
        }
        "exponential race: each candidate takes the time -ln(u)/p and the shortest time wins; its u is a random \
         number fixed by seed, position and token"
            .into()
    },
    build: |_, _| Box::new(WeightedDraw),
};

#[derive(Debug)]
struct WeightedDraw;

impl Step for WeightedDraw {
    fn apply(&self, _: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        Ok(())
    }
}
