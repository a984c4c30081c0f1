//! Parameters of `route_experts.cu`, and of the kernels of experts that route rows themselves.

use pellucid_tensor::Error;

use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &["route", "route_by_scores", "scale_experts", "add_weighted"];

/// Maximum experts that `route` selects for a row.
pub(crate) const MAX_SELECTED: usize = 512;

/// Maximum groups of experts.
pub(crate) const MAX_GROUPS: usize = 32;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) logits: u64,
    /// 0 for none.
    pub(crate) bias: u64,
    pub(crate) experts: u64,
    pub(crate) weights: u64,
    pub(crate) num_rows: u32,
    pub(crate) num_experts: u32,
    pub(crate) num_selected: u32,
    pub(crate) normalize: u32,
    pub(crate) is_sigmoid: u32,
    pub(crate) num_groups: u32,
    pub(crate) selected_groups: u32,
    pub(crate) scale: f32,
}

/// Maximum experts of a row that a warp selects without a list.
const MAX_IN_LANES: u32 = 32;

impl Route {
    /// No routing: a kernel of experts then reads the selected experts from memory.
    pub(crate) const NONE: Route = Route {
        logits: 0,
        bias: 0,
        experts: 0,
        weights: 0,
        num_rows: 0,
        num_experts: 0,
        num_selected: 0,
        normalize: 0,
        is_sigmoid: 0,
        num_groups: 0,
        selected_groups: 0,
        scale: 0.0,
    };

    /// Whether experts are selected by their logits alone.
    fn is_plain(&self) -> bool {
        self.is_sigmoid == 0 && self.bias == 0 && self.num_groups == 0
    }

    /// Whether a kernel of experts can route its rows itself.
    pub(crate) fn can_be_fused(&self) -> bool {
        self.is_plain() && self.num_selected <= MAX_IN_LANES
    }

    pub(crate) fn launch(&self, device: &Device) -> Result<(), Error> {
        let kernel = if self.is_plain() { "route" } else { "route_by_scores" };
        device.launch(kernel, Grid::items(self.num_rows as usize * 32, 128), self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ScaleExperts {
    pub(crate) experts: u64,
    pub(crate) weights: u64,
    pub(crate) scales: u64,
    pub(crate) num_pairs: u32,
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
