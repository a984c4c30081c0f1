//! Products of rows with their selected experts.

pub(crate) mod expert_panels;
pub(crate) mod expert_rows;
