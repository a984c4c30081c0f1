//! Counts of the tokens that drafters proposed and of those that the model chose.

use std::ops::AddAssign;

use super::DrafterKind;

/// Tokens that one drafter proposed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Tokens that the model checked.
    pub drafted: u64,
    /// Tokens that the model chose as well.
    pub accepted: u64,
}

impl DraftCounts {
    /// Returns the number of tokens that were computed in vain.
    pub fn rejected(&self) -> u64 {
        self.drafted - self.accepted
    }
}

impl AddAssign for DraftCounts {
    fn add_assign(&mut self, other: DraftCounts) {
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }
}

/// Counts by drafter, of a request or of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    counts: [DraftCounts; DrafterKind::ALL.len()],
}

impl SpeculationStats {
    /// Adds the counts of one draft.
    pub fn add(&mut self, drafter: DrafterKind, counts: DraftCounts) {
        self.counts[drafter.index()] += counts;
    }

    /// Returns the counts of a drafter.
    pub fn of(&self, drafter: DrafterKind) -> DraftCounts {
        self.counts[drafter.index()]
    }

    /// Returns the drafters that proposed something, with their counts.
    pub fn used(&self) -> impl Iterator<Item = (DrafterKind, DraftCounts)> + '_ {
        DrafterKind::ALL.into_iter().map(|drafter| (drafter, self.of(drafter))).filter(|(_, counts)| counts.drafted > 0)
    }

    /// Returns the counts of all drafters together.
    pub fn total(&self) -> DraftCounts {
        let mut total = DraftCounts::default();
        self.counts.iter().for_each(|&counts| total += counts);
        total
    }
}

impl AddAssign for SpeculationStats {
    fn add_assign(&mut self, other: SpeculationStats) {
        self.counts.iter_mut().zip(other.counts).for_each(|(sum, counts)| *sum += counts);
    }
}

/// A proposal for the position of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proposal {
    /// Its drafter.
    pub drafter: DrafterKind,
    /// The proposed token; accepted if it is the token that the model chose.
    pub token: u32,
}
