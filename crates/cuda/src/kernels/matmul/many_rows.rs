//! Launches of `many_rows.cu`: products of any number of rows on any GPU.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};
use crate::kernels::format;

macro_rules! many_kernels {
    ($($format:literal),*) => {
        &[
            "linear_f32",
            "linear_f32_some",
            "linear_f32_many",
            "linear_combine",
            $(
                concat!("linear_many16_", $format),
                concat!("linear_many32_", $format),
                concat!("linear_many64_", $format),
                concat!("linear_many128_", $format),
            )*
            "linear_f32_normed",
        ]
    };
}

pub(crate) const KERNELS: &[&str] = many_kernels!("f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4");

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
    // `KERNELS` begins with four kernels of F32 or of no format; then come four per format, from F16 on.
    let kernel = KERNELS[4 + 4 * (format(dtype).expect("a format with tiles") as usize - 1) + size];
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
        let names = ["f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4"];
        use DType::{BF16, F16, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
        let dtypes = [F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4];
        for (i, (name, dtype)) in names.into_iter().zip(dtypes).enumerate() {
            assert_eq!(format(dtype), Some(i as u32 + 1));
            assert_eq!(KERNELS[4 + 4 * i], format!("linear_many16_{name}"));
            assert_eq!(super::super::few_rows::KERNELS[i], format!("linear_few_{name}"));
        }
    }
}
