//! [`Shares`]: the columns that each rank computes, and [`WeightRows`], the rows of a weight for them.

use std::ops::Range;

use super::cut::Cut;

/// The columns of each rank, in ascending ranges. Columns that several ranks have are the same on all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shares {
    total: usize,
    /// For each rank.
    ranges: Vec<Vec<Range<usize>>>,
}

impl From<Cut> for Shares {
    fn from(cut: Cut) -> Shares {
        Shares::new(cut.total(), (0..cut.num_ranks()).map(|rank| vec![cut.range(rank)]))
    }
}

impl Shares {
    /// Returns shares of `total` columns. The ranges of a rank are in ascending order, and adjacent ones are joined.
    pub(crate) fn new(total: usize, of_ranks: impl Iterator<Item = Vec<Range<usize>>>) -> Shares {
        let joined = |ranges: Vec<Range<usize>>| {
            let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
            for range in ranges {
                match joined.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => joined.push(range),
                }
            }
            joined
        };
        Shares { total, ranges: of_ranks.map(joined).collect() }
    }

    /// Returns the shares of columns of which `size` take the place of each one.
    pub(crate) fn times(&self, size: usize) -> Shares {
        let scaled = |ranges: &Vec<Range<usize>>| ranges.iter().map(|r| r.start * size..r.end * size).collect();
        Shares::new(self.total * size, self.ranges.iter().map(scaled))
    }

    /// Returns the shares of rows that have these columns, and after them those of `other`.
    pub(crate) fn then(&self, other: &Shares) -> Shares {
        let start = self.total;
        let ranks = self.ranges.iter().zip(&other.ranges).map(|(first, second)| {
            first.iter().cloned().chain(second.iter().map(|range| start + range.start..start + range.end)).collect()
        });
        Shares::new(self.total + other.total, ranks)
    }

    /// Returns the number of all columns.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Returns the columns of a rank.
    pub(crate) fn of(&self, rank: usize) -> &[Range<usize>] {
        &self.ranges[rank]
    }

    /// Returns the number of columns of a rank.
    pub(crate) fn num_columns(&self, rank: usize) -> usize {
        self.of(rank).iter().map(Range::len).sum()
    }

    /// Whether the columns of every rank are whole groups of `len` adjacent columns.
    pub(crate) fn are_groups_of(&self, len: usize) -> bool {
        let is_edge = |column: usize| column.is_multiple_of(len);
        self.ranges.iter().flatten().all(|range| is_edge(range.start) && is_edge(range.end))
    }
}

/// The rows of a weight in the file, and those that this rank has, in ascending ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightRows {
    pub(crate) total: usize,
    pub(crate) own: Vec<Range<usize>>,
}

impl From<usize> for WeightRows {
    /// All rows: a weight that is whole on every rank.
    fn from(total: usize) -> Self {
        WeightRows::new(total, 0..total)
    }
}

impl WeightRows {
    pub(crate) fn new(total: usize, own: Range<usize>) -> WeightRows {
        WeightRows { total, own: vec![own] }
    }

    /// Returns the number of rows that this rank has.
    pub(crate) fn len(&self) -> usize {
        self.own.iter().map(Range::len).sum()
    }

    /// Returns this rank's part of a list with an entry for each row.
    pub(crate) fn select<T: Copy>(&self, all: &[T]) -> Vec<T> {
        assert_eq!(all.len(), self.total, "an entry for each row");
        self.own.iter().flat_map(|range| &all[range.clone()]).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(total: usize, ranges: [Range<usize>; 2]) -> Shares {
        Shares::new(total, ranges.into_iter().map(|range| vec![range]))
    }

    #[test]
    fn stacked_rows_have_the_columns_of_both_parts() {
        let heads = shares(3, [0..2, 2..3]);
        let stacked = heads.times(4).then(&heads.times(2));
        assert_eq!((stacked.total(), stacked.of(0), stacked.of(1)), (18, &[0..8, 12..16][..], &[8..12, 16..18][..]));
        assert_eq!([stacked.num_columns(0), stacked.num_columns(1)], [12, 6]);
        assert!(stacked.are_groups_of(2) && !stacked.are_groups_of(4));
        let (whole, joined) = (shares(3, [0..3, 0..3]), 0..6);
        assert_eq!(whole.then(&whole).of(1), [joined], "adjacent ranges are joined");
    }

    #[test]
    fn a_part_of_a_list_follows_the_rows() {
        let rows = WeightRows { total: 6, own: vec![1..2, 4..6] };
        assert_eq!((rows.len(), rows.select(&[0, 1, 2, 3, 4, 5])), (3, vec![1, 4, 5]));
        assert_eq!(WeightRows::from(2).select(&['a', 'b']), ['a', 'b']);
    }
}
