//! Parameters of `route_experts.cu`.

pub(crate) const KERNELS: &[&str] = &["route", "add_weighted"];

/// Maximum experts that `route` selects for a row.
pub(crate) const MAX_SELECTED: usize = 512;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) logits: u64,
    pub(crate) experts: u64,
    pub(crate) weights: u64,
    pub(crate) num_rows: u32,
    pub(crate) num_experts: u32,
    pub(crate) num_selected: u32,
    pub(crate) normalize: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AddWeighted {
    pub(crate) y: u64,
    pub(crate) rows: u64,
    pub(crate) weights: u64,
    pub(crate) out: u64,
    pub(crate) cols: u32,
}
