//! The set of candidates stays consistent under every operation.

use crate::candidates::{Candidate, Candidates, Workspace, by_rank};
use crate::row_blocks::BLOCK;

fn ranked(set: &Candidates<'_>) -> Vec<u32> {
    let mut list = set.list().to_vec();
    list.sort_by(by_rank);
    list.iter().map(|candidate| candidate.id).collect()
}

#[test]
fn the_highest_are_found_with_ties_to_lower_ids() {
    let mut space = Workspace::new();
    let flat = vec![1.5; 1000];
    let mut set = Candidates::new(&flat, &mut space).unwrap();
    set.keep_highest(7);
    assert_eq!(ranked(&set), [0, 1, 2, 3, 4, 5, 6]);
    let mut row = vec![0.0; 1000];
    (row[999], row[3], row[500], row[501]) = (3.0, 3.0, -0.0, 9.0);
    let mut set = Candidates::new(&row, &mut space).unwrap();
    set.keep_highest(5);
    assert_eq!(ranked(&set), [501, 3, 999, 0, 1], "minus zero is zero");
    assert_eq!(set.highest(2).len(), 2);
    assert_eq!(set.count(), 5, "looking at the highest leaves the set as it is");
}

#[test]
fn edits_keep_the_block_maxima_true() {
    let row: Vec<f32> = (0..300).map(|i| (i % 97) as f32).collect();
    let mut space = Workspace::new();
    let mut set = Candidates::new(&row, &mut space).unwrap();
    set.edit([(96u32, -50.0f32), (10, 200.0), (299, 3.0)].into_iter(), |logit, by| logit + by);
    assert_eq!(set.best(), Some(Candidate { id: 10, logit: 210.0 }));
    set.remove(&[10]);
    assert_eq!(set.best(), Some(Candidate { id: 193, logit: 96.0 }));
    let (logits, maxima) = set.row().unwrap();
    for (block, &highest) in logits.chunks(BLOCK).zip(maxima) {
        assert_eq!(highest, block.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    }
}

#[test]
fn mass_is_that_of_the_definition_for_a_row_and_for_its_list() {
    let row: Vec<f32> = (0..1000).map(|i| ((i * 37 % 101) as f32) * 0.07).collect();
    let (mut one, mut two) = (Workspace::new(), Workspace::new());
    let (dense, mut list) = (Candidates::new(&row, &mut one).unwrap(), Candidates::new(&row, &mut two).unwrap());
    list.keep_from(f32::MIN);
    assert!((dense.mass().total / list.mass().total - 1.0).abs() < 1e-7);
    assert!((dense.mass().handicap / list.mass().handicap - 1.0).abs() < 1e-6);
    let exact: f64 = row.iter().map(|&logit| libm::exp(f64::from(logit) - 7.0)).sum();
    assert!((dense.mass().total / exact - 1.0).abs() < 1e-6);
}
