//! Decides which models are unloaded so that another one fits. Pure: no clock, no lock, no model.

/// A model as this decision sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Occupant<T> {
    pub(super) bytes: u64,
    pub(super) use_: Use<T>,
}

/// Whether a model takes memory, and who needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use<T> {
    /// Not loaded.
    None,
    /// It has requests, is being loaded, or must stay loaded.
    Busy,
    /// It has no request since this time.
    Idle(T),
    /// It is being unloaded, and takes memory until that is done.
    Leaving,
}

/// Bounds on the loaded models together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) max_bytes: Option<u64>,
    pub(super) max_loaded: Option<usize>,
}

/// Answer to whether a model can be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fit {
    /// Unload the models with these indexes, possibly none.
    Unload(Vec<usize>),
    /// Wait until the models that are being unloaded are gone.
    Wait,
    /// It does not fit beside the models that are in use.
    No {
        /// Bytes of the models that cannot be unloaded.
        bytes_in_use: u64,
        /// Number of these models.
        num_in_use: usize,
    },
}

impl Bounds {
    pub(super) fn allow(&self, bytes: u64, num_loaded: usize) -> bool {
        self.max_bytes.is_none_or(|max| bytes <= max) && self.max_loaded.is_none_or(|max| num_loaded <= max)
    }

    /// Returns what has to happen before a model of `bytes` can be loaded beside `occupants`. The least recently used
    /// models are unloaded first, and no more than necessary.
    pub(super) fn fit<T: Ord + Copy>(&self, bytes: u64, occupants: &[Occupant<T>]) -> Fit {
        let sum = |is_counted: fn(&Use<T>) -> bool| {
            let counted = occupants.iter().filter(|occupant| is_counted(&occupant.use_));
            counted.fold((0_u64, 0_usize), |(sum, count), occupant| (sum.saturating_add(occupant.bytes), count + 1))
        };
        let (bytes_in_use, num_in_use) = sum(|used| matches!(used, Use::Busy));
        if !self.allow(bytes_in_use.saturating_add(bytes), num_in_use + 1) {
            return Fit::No { bytes_in_use, num_in_use };
        }
        let (mut total, mut count) = sum(|used| !matches!(used, Use::None));
        let (leaving, num_leaving) = sum(|used| matches!(used, Use::Leaving));
        let mut idle: Vec<(T, usize)> = Vec::new();
        for (index, occupant) in occupants.iter().enumerate() {
            if let Use::Idle(since) = occupant.use_ {
                idle.push((since, index));
            }
        }
        idle.sort_unstable();
        let mut unloaded = Vec::new();
        for (_, index) in idle {
            if self.allow(total.saturating_add(bytes), count + 1) {
                return Fit::Unload(unloaded);
            }
            if self.allow((total - leaving).saturating_add(bytes), count - num_leaving + 1) {
                return Fit::Wait;
            }
            total -= occupants[index].bytes;
            count -= 1;
            unloaded.push(index);
        }
        if self.allow(total.saturating_add(bytes), count + 1) { Fit::Unload(unloaded) } else { Fit::Wait }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NO_BOUND: Bounds = Bounds { max_bytes: None, max_loaded: None };

    fn occupants(of: &[(u64, Use<u32>)]) -> Vec<Occupant<u32>> {
        of.iter().map(|&(bytes, use_)| Occupant { bytes, use_ }).collect()
    }

    #[test]
    fn the_least_recently_used_model_goes_first() {
        let bounds = Bounds { max_bytes: Some(100), ..NO_BOUND };
        let loaded = occupants(&[(30, Use::Idle(9)), (30, Use::Idle(3)), (30, Use::Idle(5)), (50, Use::None)]);
        assert_eq!(bounds.fit(10, &loaded), Fit::Unload(vec![]));
        assert_eq!(bounds.fit(11, &loaded), Fit::Unload(vec![1]));
        assert_eq!(bounds.fit(41, &loaded), Fit::Unload(vec![1, 2]));
        assert_eq!(bounds.fit(100, &loaded), Fit::Unload(vec![1, 2, 0]));
        assert_eq!(bounds.fit(101, &loaded), Fit::No { bytes_in_use: 0, num_in_use: 0 });
        let bounds = Bounds { max_loaded: Some(3), ..NO_BOUND };
        assert_eq!(bounds.fit(u64::MAX, &loaded), Fit::Unload(vec![1]));
    }

    #[test]
    fn models_in_use_stay_and_leaving_ones_are_waited_for() {
        let bounds = Bounds { max_bytes: Some(100), ..NO_BOUND };
        let loaded = occupants(&[(60, Use::Busy), (30, Use::Idle(1))]);
        assert_eq!(bounds.fit(40, &loaded), Fit::Unload(vec![1]));
        assert_eq!(bounds.fit(41, &loaded), Fit::No { bytes_in_use: 60, num_in_use: 1 });
        let leaving = occupants(&[(60, Use::Leaving), (30, Use::Idle(1))]);
        assert_eq!(bounds.fit(10, &leaving), Fit::Unload(vec![]));
        assert_eq!(bounds.fit(40, &leaving), Fit::Wait);
        assert_eq!(bounds.fit(80, &occupants(&[(60, Use::Leaving)])), Fit::Wait);
    }

    fn use_of() -> impl Strategy<Value = Use<u32>> {
        prop_oneof![Just(Use::None), Just(Use::Busy), (0..9_u32).prop_map(Use::Idle), Just(Use::Leaving)]
    }

    proptest! {
        #[test]
        fn the_bounds_hold_whatever_is_loaded(
            loaded in proptest::collection::vec((0..50_u64, use_of()), 0..8),
            bytes in 0..120_u64,
            max_bytes in 0..150_u64,
            max_loaded in 1..6_usize,
        ) {
            let bounds = Bounds { max_bytes: Some(max_bytes), max_loaded: Some(max_loaded) };
            let loaded = occupants(&loaded);
            match bounds.fit(bytes, &loaded) {
                Fit::Unload(unloaded) => {
                    prop_assert!(unloaded.iter().all(|index| matches!(loaded[*index].use_, Use::Idle(_))));
                    let stay = loaded.iter().enumerate();
                    let stay = stay.filter(|(index, one)| one.use_ != Use::None && !unloaded.contains(index));
                    let (mut sum, mut count) = (bytes, 1);
                    stay.for_each(|(_, one)| { sum += one.bytes; count += 1 });
                    prop_assert!(sum <= max_bytes && count <= max_loaded);
                }
                Fit::Wait => prop_assert!(loaded.iter().any(|one| one.use_ == Use::Leaving)),
                Fit::No { bytes_in_use, num_in_use } => {
                    prop_assert!(bytes_in_use + bytes > max_bytes || num_in_use + 1 > max_loaded);
                }
            }
        }
    }
}
