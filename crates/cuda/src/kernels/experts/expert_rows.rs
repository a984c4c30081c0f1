//! Launches of `expert_rows.cu`: products of rows with their selected experts.

use pellucid_tensor::{DType, Error};

use crate::driver::{Device, Grid};
use crate::kernels::rows::route_experts::Route;
use crate::kernels::{GROUP_COLS, Operand};

macro_rules! expert_kernels {
    ($($format:literal),*) => {
        &[
            "group_experts",
            "add_experts",
            "expert_gated_f32",
            "expert_down_f32",
            $(
                concat!("expert_gated_", $format),
                concat!("expert_down_", $format),
                concat!("expert_gated32_", $format),
                concat!("expert_down32_", $format),
                concat!("expert_pair_gated_", $format),
                concat!("expert_pair_down_", $format),
            )*
        ]
    };
}

pub(crate) const KERNELS: &[&str] = expert_kernels!("f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4");

/// `GROUP_THREADS` and `EXPERT_WARPS` of expert_rows.cu.
pub(crate) const MAX_EXPERTS: usize = 1024;
const WARPS: u32 = 16;
/// Maximum rows of an item: of one mma, or of four.
const FEW: usize = 8;
const MORE: usize = 32;

/// Bytes of `ExpertItem`.
pub(crate) const ITEM_BYTES: usize = 12;

/// How pairs (row, expert) are grouped into items, each of which has rows of one expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Items {
    /// Maximum rows of an item.
    pub(crate) rows: usize,
    /// Maximum number of items, for any distribution of pairs over the experts.
    pub(crate) most: usize,
}

impl Items {
    /// Chooses large items if experts have more rows than a small one holds. Weights of f32 have no kernel for large
    /// items.
    pub(crate) fn of(num_pairs: usize, num_experts: usize, has_f32: bool) -> Items {
        let rows = if has_f32 || num_pairs <= FEW * num_experts { FEW } else { MORE };
        Items { rows, most: num_pairs.min(num_pairs / rows + num_experts) }
    }

    /// Whether items pay: most experts have rows for one or two items. With more rows, the kernels of many rows read
    /// the weights less often.
    pub(crate) fn pay(num_pairs: usize, num_experts: usize) -> bool {
        num_pairs <= MORE * num_experts
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExpertGroups {
    pub(crate) experts: u64,
    pub(crate) order: u64,
    pub(crate) items: u64,
    pub(crate) num_items: u64,
    pub(crate) num_pairs: u32,
    pub(crate) item_rows: u32,
    pub(crate) num_places: u32,
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
    pub(crate) chosen: u64,
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
    pub(crate) route: Route,
    pub(crate) arrived: u64,
    pub(crate) sum: u64,
    pub(crate) residual: u64,
}

impl ExpertProduct {
    /// Launches gate and up, if the product begins with the gate, or down.
    pub(crate) fn launch(&self, device: &Device, dtype: DType, items: Items) -> Result<(), Error> {
        let (outputs_at_once, threads) = match dtype {
            DType::F32 => (8, 256),
            _ => (self.outputs_at_once(), 32 * WARPS),
        };
        let blocks = [items.most as u32, self.outputs.div_ceil(outputs_at_once), 1];
        let take = if items.rows > FEW { Take::LargeItem } else { Take::Item };
        device.launch(kernel(dtype, self.is_gated(), take), Grid { blocks, threads, shared_bytes: 0 }, self)
    }

    /// Launches gate and up, or down, for pairs that are not grouped: as many blocks as run at once.
    pub(crate) fn launch_pairs(&self, device: &Device, dtype: DType, num_pairs: usize) -> Result<(), Error> {
        let blocks = [num_pairs as u32, self.num_sets(device, num_pairs), 1];
        let shared_bytes = pair_bytes(self.cols as usize) as u32;
        device.launch(
            kernel(dtype, self.is_gated(), Take::Pair),
            Grid { blocks, threads: 32 * WARPS, shared_bytes },
            self,
        )
    }

    /// Blocks that [`ExpertProduct::launch_pairs`] launches for each pair.
    pub(crate) fn num_sets(&self, device: &Device, num_pairs: usize) -> u32 {
        (device.num_multiprocessors() / num_pairs as u32).clamp(1, self.outputs.div_ceil(self.outputs_at_once()))
    }

    fn is_gated(&self) -> bool {
        self.first_part == 0
    }

    /// Outputs of the tiles that the warps of a block take at once.
    fn outputs_at_once(&self) -> u32 {
        let parts = if self.is_gated() { 2 } else { 1 };
        16 * (WARPS / (self.slices * parts))
    }
}

/// Bytes of a row's operand in shared memory.
fn pair_bytes(cols: usize) -> usize {
    cols.next_multiple_of(GROUP_COLS) * 2
}

/// Whether pairs are better not grouped: if hardly two of them share an expert, and the operand of a row fits into
/// shared memory. Formats must have tiles.
pub(crate) fn stay_pairs(device: &Device, num_rows: usize, num_pairs: usize, num_experts: usize, cols: usize) -> bool {
    (num_rows == 1 || num_pairs * 4 <= num_experts) && pair_bytes(cols) + 4096 <= device.shared_limit as usize
}

/// The unit of work of a block.
#[derive(Debug, Clone, Copy)]
enum Take {
    Item,
    LargeItem,
    Pair,
}

fn kernel(dtype: DType, is_gated: bool, take: Take) -> &'static str {
    let format = crate::kernels::format(dtype).expect("a format with kernels") as usize;
    // `KERNELS` begins with two kernels of no format and two of F32, which has small items only; then six per format.
    let first = if dtype == DType::F32 { 2 } else { 4 + 6 * (format - 1) };
    KERNELS[first + 2 * take as usize + usize::from(!is_gated)]
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AddExperts {
    pub(crate) y: u64,
    pub(crate) weights: u64,
    pub(crate) out: u64,
    /// The sum is added to this too; 0 for none.
    pub(crate) residual: u64,
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
    fn kernels_are_in_the_order_of_formats() {
        let names = [
            (DType::F32, "f32"),
            (DType::F16, "f16"),
            (DType::BF16, "bf16"),
            (DType::Q8_0, "q8_0"),
            (DType::Q4_0, "q4_0"),
            (DType::Q4_K, "q4_k"),
            (DType::Q5_K, "q5_k"),
            (DType::Q6_K, "q6_k"),
            (DType::MXFP4, "mxfp4"),
        ];
        for (dtype, name) in names {
            assert_eq!(kernel(dtype, true, Take::Item), format!("expert_gated_{name}"));
            assert_eq!(kernel(dtype, false, Take::Item), format!("expert_down_{name}"));
            if dtype != DType::F32 {
                assert_eq!(kernel(dtype, true, Take::LargeItem), format!("expert_gated32_{name}"));
                assert_eq!(kernel(dtype, false, Take::LargeItem), format!("expert_down32_{name}"));
                assert_eq!(kernel(dtype, true, Take::Pair), format!("expert_pair_gated_{name}"));
                assert_eq!(kernel(dtype, false, Take::Pair), format!("expert_pair_down_{name}"));
            }
        }
    }

    #[test]
    fn items_fit_any_distribution_of_pairs() {
        let shares: [&[usize]; 6] =
            [&[1, 1, 1, 1], &[9, 8, 1], &[64, 0], &[7, 9, 17, 1, 25], &[33, 33, 33], &[100, 0, 1]];
        for (counts, has_f32) in shares.into_iter().flat_map(|counts| [(counts, false), (counts, true)]) {
            let items = Items::of(counts.iter().sum(), counts.len(), has_f32);
            let needed: usize = counts.iter().map(|count| count.div_ceil(items.rows)).sum();
            assert!(needed <= items.most, "{counts:?}");
        }
    }
}
