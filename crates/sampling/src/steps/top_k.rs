//! Top-k: the k highest; ties at the edge to the lower ids.

use crate::candidates::Candidates;

pub(crate) fn top_k(set: &mut Candidates<'_>, k: u32) {
    set.keep_highest(k as usize);
}
