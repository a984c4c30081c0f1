//! Launches of `expert_products.cu`.

use pellucid_tensor::{DType, Error};

use super::Operand;
use crate::driver::{Device, Grid};

macro_rules! expert_kernels {
    ($($format:literal),*) => {
        &["group_experts", "add_experts", $(concat!("expert_gated_", $format), concat!("expert_down_", $format)),*]
    };
}

pub(crate) const KERNELS: &[&str] = expert_kernels!("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k");

/// `GROUP_THREADS`, `ITEM_ROWS` and `EXPERT_WARPS` of expert_products.cu.
pub(crate) const MAX_EXPERTS: usize = 1024;
const ITEM_ROWS: usize = 8;
const WARPS: u32 = 16;

/// Bytes of `ExpertItem`.
pub(crate) const ITEM_BYTES: usize = 12;

/// Items that so many pairs make at most, however they are shared out among the experts.
pub(crate) fn max_items(num_pairs: usize, num_experts: usize) -> usize {
    num_pairs.min(num_pairs / ITEM_ROWS + num_experts)
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExpertGroups {
    pub(crate) experts: u64,
    pub(crate) order: u64,
    pub(crate) items: u64,
    pub(crate) num_items: u64,
    pub(crate) num_pairs: u32,
    pub(crate) num_experts: u32,
}

impl ExpertGroups {
    pub(crate) fn launch(&self, device: &Device) -> Result<(), Error> {
        device.launch("group_experts", Grid::linear(1, MAX_EXPERTS as u32), self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExpertProduct {
    pub(crate) experts: u64,
    pub(crate) items: u64,
    pub(crate) num_items: u64,
    pub(crate) order: u64,
    pub(crate) x: Operand,
    pub(crate) x_plain: u64,
    pub(crate) out: u64,
    pub(crate) cols: u32,
    pub(crate) outputs: u32,
    pub(crate) slices: u32,
    pub(crate) pairs_a_row: u32,
    pub(crate) first_part: u32,
    pub(crate) activation: u32,
}

impl ExpertProduct {
    /// Gate and up in one where the product begins with the gate, else down.
    pub(crate) fn launch(&self, device: &Device, dtype: DType, max_items: usize) -> Result<(), Error> {
        let (parts, kind) = if self.first_part == 0 { (2, 0) } else { (1, 1) };
        let place = super::format(dtype).expect("a format with kernels") as usize;
        let kernel = KERNELS[2 + 2 * place + kind];
        let (outputs_at_once, threads) = match dtype {
            DType::F32 => (8, 256),
            _ => (16 * (WARPS / (self.slices * parts)), 32 * WARPS),
        };
        let blocks = [self.outputs.div_ceil(outputs_at_once), max_items as u32, 1];
        device.launch(kernel, Grid { blocks, threads, shared_bytes: 0 }, self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AddExperts {
    pub(crate) y: u64,
    pub(crate) weights: u64,
    pub(crate) out: u64,
    pub(crate) cols: u32,
    pub(crate) num_selected: u32,
}

impl AddExperts {
    pub(crate) fn launch(&self, device: &Device, num_rows: usize) -> Result<(), Error> {
        const THREADS: u32 = 256;
        let blocks = [self.cols.div_ceil(THREADS), num_rows as u32, 1];
        device.launch("add_experts", Grid { blocks, threads: THREADS, shared_bytes: 0 }, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_stand_in_the_order_of_formats() {
        let names = [
            (DType::F32, "f32"),
            (DType::F16, "f16"),
            (DType::BF16, "bf16"),
            (DType::Q8_0, "q8_0"),
            (DType::Q4_0, "q4_0"),
            (DType::Q4_K, "q4_k"),
            (DType::Q5_K, "q5_k"),
            (DType::Q6_K, "q6_k"),
        ];
        for (dtype, name) in names {
            let place = 2 + 2 * crate::kernels::format(dtype).expect("a format") as usize;
            assert_eq!(KERNELS[place], format!("expert_gated_{name}"));
            assert_eq!(KERNELS[place + 1], format!("expert_down_{name}"));
        }
    }

    #[test]
    fn items_have_room_however_pairs_are_shared_out() {
        for (num_experts, counts) in
            [(4, vec![1, 1, 1, 1]), (3, vec![9, 8, 1]), (2, vec![64, 0]), (5, vec![7, 9, 17, 1, 25])]
        {
            let items: usize = counts.iter().map(|count: &usize| count.div_ceil(ITEM_ROWS)).sum();
            assert!(items <= max_items(counts.iter().sum(), num_experts));
        }
    }
}
