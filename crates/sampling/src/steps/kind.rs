//! [`StepKind`]: the steps by name, in their default order. Requests, traces and errors use the same names.

use std::fmt;
use std::str::FromStr;

use super::{Effect, StepKind};
use crate::{Error, SamplingParams};

/// Defines [`StepKind`] from the list in `steps/mod.rs`: each entry is a kind and the module with its `DESCRIPTION`.
macro_rules! steps {
    ($($(#[$doc:meta])* $kind:ident: $module:ident,)+) => {
        /// A step of the chain.
        ///
        /// `samplers` may list the movable steps in any order. The others are fixed: logit bias and token rules come
        /// first, the mask before the first step that looks at more than one candidate, the draw last.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum StepKind { $($(#[$doc])* $kind,)+ }

        impl StepKind {
            /// Every step, in the default order.
            pub const ALL: [StepKind; [$(stringify!($kind)),+].len()] = [$(StepKind::$kind),+];

            pub(crate) fn description(self) -> &'static Description {
                match self { $(StepKind::$kind => &$module::DESCRIPTION,)+ }
            }
        }
    };
}

pub(super) use steps;

impl StepKind {
    /// Returns the steps that `samplers` may list, in the default order.
    pub fn movable() -> impl Iterator<Item = StepKind> {
        StepKind::ALL.into_iter().filter(|kind| kind.is_movable())
    }

    pub fn is_movable(self) -> bool {
        self.description().is_movable
    }

    pub fn name(self) -> &'static str {
        self.description().name
    }

    pub fn effect(self) -> Effect {
        self.description().effect
    }

    /// Whether the step removes candidates and leaves the logits of the others as they are.
    pub fn only_removes(self) -> bool {
        matches!(self.effect(), Effect::ExcludesTokens | Effect::Truncates)
    }

    /// Returns a name of at most six letters, for the head of a column.
    pub fn label(self, params: &SamplingParams) -> &'static str {
        (self.description().label)(params)
    }

    /// Returns the setting in a few letters, to stand below the label.
    pub fn short_setting(self, params: &SamplingParams) -> String {
        (self.description().short_setting)(params)
    }

    /// Returns what the step does with these parameters: a sentence without its subject.
    pub fn meaning(self, params: &SamplingParams) -> String {
        (self.description().meaning)(params)
    }

    /// Returns one line about what the step does, whatever its parameters.
    pub fn summary(self) -> &'static str {
        self.description().summary
    }

    /// Index in the default order.
    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StepKind {
    type Err = Error;

    /// Finds a movable step by its name; underscores may be hyphens, as in flags. The error says whether a name is
    /// unknown or fixed.
    fn from_str(name: &str) -> Result<Self, Error> {
        let name = name.replace('-', "_");
        match StepKind::ALL.into_iter().find(|kind| kind.name() == name) {
            Some(kind) if kind.is_movable() => Ok(kind),
            Some(kind) => Err(Error::StepFixed { step: kind.name() }),
            None => Err(Error::UnknownStep {
                found: name.chars().take(40).collect(),
                expected: StepKind::movable().map(StepKind::name).collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_a_short_label_and_a_meaning() {
        for kind in StepKind::ALL {
            let label = kind.label(&SamplingParams::default());
            assert!((1..=6).contains(&label.len()), "{kind}: {label:?}");
            assert!(!kind.meaning(&SamplingParams::default()).is_empty(), "{kind}");
            assert_eq!(StepKind::ALL[kind.index()], kind);
        }
    }
}
