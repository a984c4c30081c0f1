//! Groups the characters that a pattern treats alike into classes, so that its automaton reads small numbers.

use std::collections::HashMap;

use super::parser::CharSet;

const PAGE_CHARS: usize = 256;

/// The class of every character, in a table of pages that are shared if they are equal.
#[derive(Debug)]
pub(super) struct CharClasses {
    page_of: Vec<u16>,
    pages: Vec<[u16; PAGE_CHARS]>,
    /// For each class, the sets that contain it, as bits.
    members: Vec<Vec<u64>>,
}

impl CharClasses {
    pub(super) fn new(sets: &[CharSet]) -> CharClasses {
        // Characters between two boundaries are in the same sets.
        let ends = sets.iter().flatten().flat_map(|&(first, last)| [first as u32, last as u32 + 1]);
        let mut boundaries: Vec<u32> = ends.chain([0]).filter(|at| *at <= char::MAX as u32).collect();
        boundaries.sort_unstable();
        boundaries.dedup();
        let mut members = vec![vec![0; sets.len().div_ceil(64)]; boundaries.len()];
        for (number, set) in sets.iter().enumerate() {
            for &(first, last) in set {
                let begin = boundaries.partition_point(|at| *at < first as u32);
                let inside = boundaries[begin..].iter().take_while(|at| **at <= last as u32).count();
                for interval in &mut members[begin..begin + inside] {
                    interval[number / 64] |= 1u64 << (number % 64);
                }
            }
        }
        let mut numbers = HashMap::new();
        let mut distinct = Vec::new();
        let class_of_interval: Vec<u16> = members
            .into_iter()
            .map(|sets| {
                *numbers.entry(sets).or_insert_with_key(|sets| {
                    distinct.push(sets.clone());
                    (distinct.len() - 1) as u16
                })
            })
            .collect();

        let mut page_numbers = HashMap::new();
        let mut pages = Vec::new();
        let mut interval = 0;
        let num_pages = (char::MAX as usize + 1) / PAGE_CHARS;
        let page_of = (0..num_pages).map(|page| {
            let mut classes = [0; PAGE_CHARS];
            for (index, class) in classes.iter_mut().enumerate() {
                let c = (page * PAGE_CHARS + index) as u32;
                while boundaries.get(interval + 1).is_some_and(|next| *next <= c) {
                    interval += 1;
                }
                *class = class_of_interval[interval];
            }
            *page_numbers.entry(classes).or_insert_with(|| {
                pages.push(classes);
                (pages.len() - 1) as u16
            })
        });
        let page_of = page_of.collect();
        CharClasses { page_of, pages, members: distinct }
    }

    /// Returns the number of classes.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    #[inline]
    pub(super) fn of(&self, c: char) -> usize {
        let page = self.page_of[c as usize / PAGE_CHARS];
        usize::from(self.pages[usize::from(page)][c as usize % PAGE_CHARS])
    }

    /// Whether the characters of a class are in a set.
    pub(super) fn contains(&self, set: u32, class: usize) -> bool {
        self.members[class][set as usize / 64] >> (set % 64) & 1 == 1
    }
}
