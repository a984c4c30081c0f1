//! Launches of `expert_panels.cu`: products of rows with their selected experts, on compute capability 9.0.

use pellucid_tensor::{DType, Error};

use super::expert_rows::Items;
use crate::driver::{Device, Grid};
use crate::kernels::Operand;
use crate::kernels::matmul::many_rows_wgmma::{THREADS, family, serves, shared_bytes};
use crate::kernels::rows::elementwise::row_threads;

macro_rules! panel_kernels {
    ($($format:literal),*) => {
        &[
            "expert_input",
            "gated_operand",
            $(
                concat!("panels16_gated_", $format),
                concat!("panels16_down_", $format),
                concat!("panels32_gated_", $format),
                concat!("panels32_down_", $format),
                concat!("panels128_gated_", $format),
                concat!("panels128_down_", $format),
            )*
        ]
    };
}

pub(crate) const KERNELS: &[&str] = panel_kernels!("f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4");

/// Outputs of gate, and of up, that a block takes, and outputs of down.
const GATED_OUTPUTS: usize = 64;
const DOWN_OUTPUTS: usize = 128;

/// Whether the device has the kernels, the formats have tiles, and the width of the experts is whole blocks.
pub(crate) fn serve(device: &Device, dtypes: [DType; 2], width: usize) -> bool {
    dtypes.into_iter().all(|dtype| serves(device, dtype)) && width.is_multiple_of(GATED_OUTPUTS)
}

/// Items whose maximum of rows is a little above the average rows of an expert.
pub(crate) fn items(num_pairs: usize, num_experts: usize) -> Items {
    let rows = match num_pairs.div_ceil(num_experts) {
        0..=10 => 16,
        11..=24 => 32,
        _ => 128,
    };
    Items { rows, most: num_pairs.min(num_pairs / rows + num_experts) }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExpertInput {
    pub(crate) x: Operand,
    pub(crate) order: u64,
    pub(crate) maxima: u64,
    pub(crate) pairs_a_row: u32,
    pub(crate) operand: Operand,
}

impl ExpertInput {
    pub(crate) fn launch(&self, device: &Device, num_places: usize) -> Result<(), Error> {
        device.launch("expert_input", Grid::linear(num_places as u32, row_threads(self.x.pitch as usize / 8)), self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct GatedOperand {
    pub(crate) x: u64,
    pub(crate) order: u64,
    pub(crate) maxima: u64,
    pub(crate) cols: u32,
    pub(crate) operand: Operand,
}

impl GatedOperand {
    pub(crate) fn launch(&self, device: &Device, num_places: usize) -> Result<(), Error> {
        let threads = row_threads(self.operand.pitch as usize / 8);
        device.launch("gated_operand", Grid::linear(num_places as u32, threads), self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExpertPanels {
    pub(crate) experts: u64,
    pub(crate) items: u64,
    pub(crate) num_items: u64,
    pub(crate) order: u64,
    pub(crate) x: Operand,
    pub(crate) out: u64,
    /// The largest magnitude of each row of gated results; 0 for the product with down.
    pub(crate) maxima: u64,
    pub(crate) cols: u32,
    pub(crate) outputs: u32,
    pub(crate) slices: u32,
    pub(crate) activation: u32,
}

impl ExpertPanels {
    /// Launches gate and up, if there is a place for maxima, or down.
    pub(crate) fn launch(&self, device: &Device, dtype: DType, items: Items) -> Result<(), Error> {
        let (format, chunk_bytes) = family(dtype).expect("a format with tiles");
        let is_gated = self.maxima != 0;
        let (size, shared_bytes) = match items.rows {
            16 => (0, shared_bytes(16, true, chunk_bytes)),
            32 => (1, shared_bytes(32, true, chunk_bytes)),
            // The last item of an expert is computed with fewer rows.
            _ => (2, [32, 64, 128].map(|rows| shared_bytes(rows, false, chunk_bytes)).into_iter().max().unwrap_or(0)),
        };
        let outputs = self.outputs as usize;
        let columns = outputs.div_ceil(if is_gated { GATED_OUTPUTS } else { DOWN_OUTPUTS });
        let blocks = [columns as u32, items.most as u32, 1];
        // `KERNELS` begins with two kernels of no format; then six per format.
        let kernel = KERNELS[2 + 6 * format + 2 * size + usize::from(!is_gated)];
        device.launch(kernel, Grid { blocks, threads: THREADS, shared_bytes }, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_in_the_order_of_formats() {
        let formats = [
            (DType::F16, "f16"),
            (DType::BF16, "bf16"),
            (DType::Q8_0, "q8_0"),
            (DType::Q4_0, "q4_0"),
            (DType::Q4_K, "q4_k"),
            (DType::Q5_K, "q5_k"),
            (DType::Q6_K, "q6_k"),
            (DType::MXFP4, "mxfp4"),
        ];
        for (dtype, name) in formats {
            let first = 2 + 6 * family(dtype).unwrap().0;
            assert_eq!(KERNELS[first], format!("panels16_gated_{name}"));
            assert_eq!(KERNELS[first + 5], format!("panels128_down_{name}"));
        }
    }

    #[test]
    fn items_fit_any_distribution_of_pairs() {
        for counts in [&[1usize, 1, 1, 1][..], &[17, 16, 1], &[300, 0], &[33, 33, 33], &[129, 127, 1, 128]] {
            let items = items(counts.iter().sum(), counts.len());
            let needed: usize = counts.iter().map(|count| count.div_ceil(items.rows)).sum();
            assert!(needed <= items.most, "{counts:?}");
        }
    }
}
