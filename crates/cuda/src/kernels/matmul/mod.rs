//! Kernels of linear maps; [`linear`] chooses among them.

pub(crate) mod few_rows;
pub(crate) mod few_rows_ring;
pub(crate) mod linear;
pub(crate) mod many_rows;
pub(crate) mod many_rows_wgmma;
pub(crate) mod pack_weight;
