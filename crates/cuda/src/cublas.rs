//! cuBLASLt, opened at run time where it is installed: under `--fast`, the products of many rows with weights of BF16
//! and F16.
//!
//! The library chooses its kernel, and hence the order of a row's sum, by the number of rows: the last bits of a row
//! may depend on the rest of the batch. It is used only if the user asks for it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::catch_unwind;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use pellucid_tensor::Error;

use crate::driver::{Buffer, Device};
use crate::kernels::rows::cublas_input;

/// Minimum rows for the library. With up to 128 rows our own kernels, bound by memory, were faster.
pub(crate) const LEAST_ROWS: usize = 129;
/// The size that cuBLAS recommends for this generation of GPUs.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The library, and the algorithms that it chose for the shapes seen so far.
pub(crate) struct CublasLt {
    device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    workspace: Buffer,
    chosen: HashMap<ProductShape, ChosenAlgorithm>,
}

/// Everything that the choice of an algorithm for `out = W x + b` depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProductShape {
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) cols: usize,
    pub(crate) has_bias: bool,
    /// The input was rounded by `cublas_input.cu`, with a factor; otherwise it is BF16.
    pub(crate) is_f16: bool,
}

/// Device addresses of a product: `x` and `weight` in 16 bits, the others in f32; `scalars` is what `cublas_input.cu`
/// wrote for rows of F16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) x: u64,
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    pub(crate) out: u64,
    pub(crate) scalars: u64,
}

/// Descriptors of a product and its algorithm. There are few, one for each shape, and they are never freed.
#[derive(Clone, Copy)]
struct ChosenAlgorithm {
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: handle and descriptors are objects of the library, which lets any thread use them, one at a time; every use
// borrows this value.
unsafe impl Send for CublasLt {}

impl CublasLt {
    /// Opens the library; `None` if it is not installed.
    pub(crate) fn open(device: &Arc<Device>) -> Result<Option<CublasLt>, Error> {
        // SAFETY: opening the library runs its initialisers, which is what it is for.
        let present = catch_unwind(|| unsafe { sys::is_culib_present() }).unwrap_or(false);
        if !present {
            return Ok(None);
        }
        device.bind()?;
        let handle = result::create_handle().map_err(|error| failed(device, error))?;
        let workspace = device.allocate(WORKSPACE_BYTES)?;
        Ok(Some(CublasLt { device: device.clone(), handle, workspace, chosen: HashMap::new() }))
    }

    pub(crate) fn multiply(&mut self, shape: ProductShape, addresses: Addresses) -> Result<(), Error> {
        self.device.bind()?;
        let chosen = match self.chosen.get(&shape) {
            Some(chosen) => *chosen,
            None => {
                let chosen = self.choose(shape).map_err(|error| failed(&self.device, error))?;
                self.chosen.insert(shape, chosen);
                chosen
            }
        };
        self.launch(&chosen, shape.is_f16, addresses).map_err(|error| failed(&self.device, error))
    }

    /// Asks the library for an algorithm. It is column-major, so our rows are its columns: `out^T = (W^T)^T x^T`.
    fn choose(&self, shape: ProductShape) -> Result<ChosenAlgorithm, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let ProductShape { rows, outputs, cols, has_bias, is_f16 } = shape;
        let half = if is_f16 { sys::cudaDataType::CUDA_R_16F } else { sys::cudaDataType::CUDA_R_16BF };
        let single = sys::cudaDataType::CUDA_R_32F;
        let product = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, single)?;
        // CUBLAS_OP_T, which the binding does not name.
        let transposed: i32 = 1;
        let epilogue = match has_bias {
            true => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            false => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        };
        // SAFETY: each attribute is given a value of its own type and size, which the library copies.
        unsafe {
            set(product, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
            set(product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if is_f16 {
                let on_device = sys::cublasLtPointerMode_t::CUBLASLT_POINTER_MODE_DEVICE;
                set(product, Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, &on_device)?;
            }
        }
        let weight = result::create_matrix_layout(half, cols as u64, outputs as u64, cols as i64)?;
        let x = result::create_matrix_layout(half, cols as u64, rows as u64, cols as i64)?;
        let out = result::create_matrix_layout(single, outputs as u64, rows as u64, outputs as i64)?;
        let preference = result::create_matmul_pref()?;
        // SAFETY: the descriptors were made above; the preference is given back here.
        let found = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&WORKSPACE_BYTES).cast(),
                size_of::<usize>(),
            )?;
            let found = result::get_matmul_algo_heuristic(self.handle, product, weight, x, out, out, preference);
            result::destroy_matmul_pref(preference)?;
            found?
        };
        Ok(ChosenAlgorithm { product, weight, x, out, algorithm: found.algo })
    }

    fn launch(&self, chosen: &ChosenAlgorithm, is_f16: bool, addresses: Addresses) -> Result<(), result::CublasError> {
        let at = |address: u64| address as *mut c_void;
        // The factors of product and output: on the host, or those that the rounding wrote on the device.
        let (one, zero) = (1.0f32, 0.0f32);
        let (factor, nothing) = match is_f16 {
            true => (
                at(addresses.scalars + cublas_input::BACK).cast_const(),
                at(addresses.scalars + cublas_input::ZERO).cast_const(),
            ),
            false => (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(&zero).cast()),
        };
        // SAFETY: the caller gives addresses of live buffers with the shapes of the descriptors; the library copies the
        // factors on the host and the address of the bias before it returns, and reads those on the device in the order
        // of the stream.
        unsafe {
            if addresses.bias != 0 {
                let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                set(chosen.product, attribute, &addresses.bias)?;
            }
            result::matmul(
                self.handle,
                chosen.product,
                factor,
                nothing,
                at(addresses.weight),
                chosen.weight,
                at(addresses.x),
                chosen.x,
                at(addresses.out),
                chosen.out,
                at(addresses.out),
                chosen.out,
                &chosen.algorithm,
                at(self.workspace.address()),
                WORKSPACE_BYTES,
                self.device.stream().cast(),
            )
        }
    }
}

/// # Safety
/// `value` is of the attribute's type.
unsafe fn set<T>(
    product: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), result::CublasError> {
    // SAFETY: the descriptor is live, and the value is as large as is said.
    unsafe { result::set_matmul_desc_attribute(product, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

fn failed(device: &Device, error: result::CublasError) -> Error {
    device.refuse("a product of cuBLASLt", format!("{:?}", error.0))
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the handle is owned by this value. A failure here leaves nothing to do.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}
