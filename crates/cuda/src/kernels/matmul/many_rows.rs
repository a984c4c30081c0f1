//! Launches of `many_rows.cu`: products of any number of rows on any GPU.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};
use crate::kernels::format;

macro_rules! many_kernels {
    ($($format:literal),*) => {
        &[
            "linear_f32",
            "linear_combine",
            $(
                concat!("linear_many16_", $format),
                concat!("linear_many32_", $format),
                concat!("linear_many64_", $format),
                concat!("linear_many128_", $format),
            )*
        ]
    };
}

pub(crate) const KERNELS: &[&str] = many_kernels!("f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k");

/// Launches a product. Returns it if its slices are left, see [`LinearProduct::launch`].
pub(super) fn launch(
    device: &Device,
    dtype: DType,
    mut product: LinearProduct,
    workspace: impl FnOnce(usize) -> Result<u64, Error>,
) -> Result<Option<LinearProduct>, Error> {
    let (size, rows, threads) = match product.num_rows {
        0..=16 => (0, 16, 128),
        17..=32 => (1, 32, 128),
        33..=64 => (2, 64, 128),
        _ => (3, 128, 256),
    };
    // `KERNELS` begins with `linear_f32` and `linear_combine`; then four per format, from F16 on.
    let kernel = KERNELS[2 + 4 * (format(dtype).expect("a format with tiles") as usize - 1) + size];
    let mut blocks = [product.num_rows.div_ceil(rows), product.num_tiles.div_ceil(8), 1];
    // Few blocks would leave most multiprocessors idle: then each slice has its own blocks.
    if blocks[0] * blocks[1] < 3 * device.num_multiprocessors() / 4 && product.slices > 1 {
        product.workspace = workspace(product.workspace_bytes())?;
        blocks[2] = product.slices;
    }
    // Four stages of rows of 64 columns, 144 bytes each.
    device.launch(kernel, Grid { blocks, threads, shared_bytes: 4 * rows * 144 }, &product)?;
    Ok((product.workspace != 0).then_some(product))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_in_the_order_of_formats() {
        let names = ["f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k"];
        let dtypes =
            [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q5_K, DType::Q6_K].map(format);
        for (i, (name, code)) in names.into_iter().zip(dtypes).enumerate() {
            assert_eq!(code, Some(i as u32 + 1));
            assert_eq!(KERNELS[2 + 4 * i], format!("linear_many16_{name}"));
            assert_eq!(super::super::few_rows::KERNELS[i], format!("linear_few_{name}"));
        }
    }
}
