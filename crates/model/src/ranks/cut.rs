//! [`Cut`]: which columns of a product's result each rank computes.

use std::ops::Range;

/// Adjacent columns of a panel of the CPU's kernels. Shares are whole panels where the matrix is wide enough.
const PANEL: usize = 16;
/// Columns that products round together: with weights in K formats, and in other quantized formats.
const ROUNDED_GROUPS: [usize; 2] = [256, 32];

/// A division of columns into one range for each rank, in ascending order of both. No range is empty.
///
/// Columns are groups of units. A rank has whole groups if there is one for each rank; otherwise ranks share the units
/// of a group, and no rank has units of two groups. No rank has more than rank 0, which plans the memory of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    num_ranks: usize,
    num_groups: usize,
    units_per_group: usize,
    unit: usize,
}

impl Cut {
    /// Divides `total` columns that have no structure; `None` if there are fewer columns than ranks.
    pub(crate) fn even(total: usize, num_ranks: usize) -> Option<Cut> {
        let has_panels = total.is_multiple_of(PANEL) && total / PANEL >= num_ranks;
        let unit = if has_panels { PANEL } else { 1 };
        Cut::groups(total / unit, 1, unit, num_ranks)
    }

    /// Divides `total` columns like [`Cut::even`], but into groups of columns that a product rounds together
    /// ([`RoundedGroups`](pellucid_tensor::RoundedGroups)) where shares remain nearly equal.
    pub(crate) fn in_rounded_groups(total: usize, num_ranks: usize) -> Option<Cut> {
        let is_fair = |&unit: &usize| {
            let largest = (total / unit).div_ceil(num_ranks) * unit;
            total.is_multiple_of(unit) && total / unit >= num_ranks && 32 * largest * num_ranks <= 33 * total
        };
        match ROUNDED_GROUPS.into_iter().find(is_fair) {
            Some(unit) => Cut::groups(total / unit, 1, unit, num_ranks),
            None => Cut::even(total, num_ranks),
        }
    }

    /// Divides groups of `units_per_group` units of `unit` columns; `None` if there are fewer units than ranks.
    pub(crate) fn groups(num_groups: usize, units_per_group: usize, unit: usize, num_ranks: usize) -> Option<Cut> {
        (num_groups * units_per_group >= num_ranks).then_some(Cut { num_ranks, num_groups, units_per_group, unit })
    }

    /// Returns the columns of a rank.
    pub(crate) fn range(self, rank: usize) -> Range<usize> {
        let Cut { num_ranks, num_groups, units_per_group, unit } = self;
        let units = if num_ranks <= num_groups {
            let groups = part(num_groups, num_ranks, rank);
            groups.start * units_per_group..groups.end * units_per_group
        } else {
            // The last groups have more ranks if the division leaves a rest.
            let ranks_of = |group: usize| {
                let mirrored = part(num_ranks, num_groups, num_groups - 1 - group);
                num_ranks - mirrored.end..num_ranks - mirrored.start
            };
            let group = (0..num_groups).find(|&group| ranks_of(group).contains(&rank)).expect("a rank has a group");
            let ranks = ranks_of(group);
            let units = part(units_per_group, ranks.len(), rank - ranks.start);
            group * units_per_group + units.start..group * units_per_group + units.end
        };
        units.start * unit..units.end * unit
    }

    pub(crate) fn num_ranks(self) -> usize {
        self.num_ranks
    }

    /// Returns the number of all columns.
    pub(crate) fn total(self) -> usize {
        self.num_groups * self.units_per_group * self.unit
    }
}

/// Returns the range of part `index` when `total` things are divided into `num_parts` parts: the first ones have one
/// more if the division leaves a rest.
fn part(total: usize, num_parts: usize, index: usize) -> Range<usize> {
    let (len, rest) = (total / num_parts, total % num_parts);
    let start = |index: usize| index * len + index.min(rest);
    start(index)..start(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(cut: Cut) -> Vec<Range<usize>> {
        (0..cut.num_ranks).map(|rank| cut.range(rank)).collect()
    }

    #[test]
    fn ranges_follow_each_other_and_none_is_empty() {
        for num_ranks in 1..=9 {
            let even = (1..200).chain([4096, 49_152, 128_256]).filter_map(|total| Cut::even(total, num_ranks));
            let heads = [(1, 3), (3, 3), (8, 4), (2, 2), (4, 1)];
            let heads = heads.into_iter().filter_map(|(groups, units)| Cut::groups(groups, units, 64, num_ranks));
            for cut in even.chain(heads) {
                let ranges = ranges(cut);
                assert!(ranges.iter().all(|range| !range.is_empty()), "{cut:?}: {ranges:?}");
                assert_eq!(ranges[0].start, 0);
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{cut:?}: {ranges:?}");
                assert_eq!(ranges[num_ranks - 1].end, cut.total());
                assert!(ranges.iter().all(|range| range.len() <= ranges[0].len()), "{cut:?}: {ranges:?}");
            }
        }
        assert_eq!(Cut::even(3, 4), None);
    }

    #[test]
    fn shares_are_whole_panels_of_a_wide_matrix() {
        assert_eq!(ranges(Cut::even(1536, 4).unwrap()), [0..384, 384..768, 768..1152, 1152..1536]);
        assert_eq!(ranges(Cut::even(576, 5).unwrap()), [0..128, 128..240, 240..352, 352..464, 464..576]);
        assert_eq!(ranges(Cut::even(40, 3).unwrap()), [0..14, 14..27, 27..40]);
    }

    #[test]
    fn shares_are_whole_rounded_groups_if_they_are_nearly_equal() {
        assert_eq!(ranges(Cut::in_rounded_groups(8960, 2).unwrap()), [0..4608, 4608..8960]);
        assert_eq!(ranges(Cut::in_rounded_groups(1536, 3).unwrap()), [0..512, 512..1024, 1024..1536]);
        assert_eq!(ranges(Cut::in_rounded_groups(768, 2).unwrap()), [0..384, 384..768], "groups of 32");
        assert_eq!(Cut::in_rounded_groups(336, 5), Cut::even(336, 5), "two groups of 32 too many");
    }

    #[test]
    fn a_rank_has_whole_groups_of_heads_or_a_part_of_one() {
        // SmolLM2: nine heads, three of which share a KV head.
        let heads = |num_ranks| ranges(Cut::groups(3, 3, 1, num_ranks).unwrap());
        assert_eq!(heads(2), [0..6, 6..9]);
        assert_eq!(heads(3), [0..3, 3..6, 6..9]);
        assert_eq!(heads(4), [0..3, 3..6, 6..8, 8..9]);
        assert_eq!(heads(9), [0..1, 1..2, 2..3, 3..4, 4..5, 5..6, 6..7, 7..8, 8..9]);
    }
}
