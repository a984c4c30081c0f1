//! The mask of a grammar: excludes the tokens that the grammar does not allow next. Always in the chain, also without a
//! grammar, because it settles infinite logits for the steps after it.

use super::step::Effect;
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::Candidates;

pub(super) const DESCRIPTION: Description = Description {
    name: "grammar",
    label: |_| "mask",
    effect: Effect::ExcludesTokens,
    is_movable: false,
    summary: "excludes tokens that the grammar does not allow",
    is_used: |_| true,
    option: |_| "grammar",
    short_setting: |_| String::new(),
    meaning: |_| "takes out what the grammar forbids".into(),
    build: |_, _| Box::new(GrammarMask),
};

#[derive(Debug)]
struct GrammarMask;

impl Step for GrammarMask {
    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        if let Some(words) = context.input.mask {
            set.mask(words);
        }
        set.settle_infinities()
    }
}
