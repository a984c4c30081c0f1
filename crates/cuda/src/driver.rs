//! One opened GPU: its context, its stream, memory from it, and launches on it. Everything runs in the order of the one
//! stream.
//!
//! Knows no tensor and no kernel by name. A launch takes one structure by value, with the layout of the kernel's
//! parameter.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result::DriverError;
use cudarc::driver::{result, sys};
use pellucid_tensor::Error;

use crate::module::{self, Function};
use crate::probe::{self, DeviceInfo, Unusable};

/// A parameter of a kernel.
///
/// # Safety
/// The type is `#[repr(C)]` with the fields of the kernel's parameter in the same order and of the same sizes.
pub(crate) unsafe trait Parameter: Copy {}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

impl Grid {
    /// `blocks` blocks in one dimension.
    pub(crate) fn linear(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads, shared_bytes: 0 }
    }

    /// A thread for each of `len` items.
    pub(crate) fn items(len: usize, threads: u32) -> Grid {
        let blocks = len.div_ceil(threads as usize).max(1);
        Grid::linear(u32::try_from(blocks).unwrap_or(u32::MAX), threads)
    }
}

/// An opened GPU.
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    context: sys::CUcontext,
    handle: sys::CUdevice,
    stream: sys::CUstream,
    functions: HashMap<&'static str, Function>,
    /// Why the embedded kernels could not be loaded, if NVRTC compiled them instead.
    pub(crate) compiled_because: Option<String>,
    /// Maximum shared memory of a block, in bytes.
    pub(crate) shared_limit: u32,
    /// Whether the kernels with wgmma run: their instructions are of compute capability 9.0 alone, and only embedded
    /// machine code has them.
    pub(crate) has_wgmma: bool,
    /// Changes whenever memory is allocated or freed: recorded launches hold addresses.
    generation: AtomicU64,
    /// Number of runs of steps that have begun, those that were only recorded included.
    run: AtomicU64,
}

// SAFETY: contexts, streams, functions and devices are handles that the driver allows any thread to use.
unsafe impl Send for Device {}
// SAFETY: as above; every call of the driver is synchronised by the driver.
unsafe impl Sync for Device {}

thread_local! {
    /// The context that is current on this thread, so that it is not set at every call.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Device {
    pub(crate) fn open(ordinal: usize, compiles: bool) -> Result<Arc<Device>, Unusable> {
        let mut devices = probe::devices()?;
        if ordinal >= devices.len() {
            return Err(Unusable::NoSuchDevice { ordinal, last: devices.len() - 1 });
        }
        let info = devices.swap_remove(ordinal);
        if let Some(why) = info.unusable {
            return Err(why);
        }
        let name = info.name.clone();
        Self::open_usable(info, compiles).map_err(|reason| Unusable::OpenFailed { name, reason })
    }

    fn open_usable(info: DeviceInfo, compiles: bool) -> Result<Arc<Device>, String> {
        let failed = |error: DriverError| probe::describe(error);
        let handle = result::device::get(info.ordinal as i32).map_err(failed)?;
        // SAFETY: `handle` comes from the driver. The context is released when the device is dropped.
        let context = unsafe { result::primary_ctx::retain(handle) }.map_err(failed)?;
        // SAFETY: `context` is alive.
        unsafe { result::ctx::set_current(context) }.map_err(failed)?;
        CURRENT.set(context as usize);
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed)?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        // SAFETY: `handle` comes from the driver.
        let shared_limit = unsafe { result::device::get_attribute(handle, attribute) }.map_err(failed)? as u32;
        let loaded = module::load(info.capability, compiles)?;
        let has_wgmma = info.capability == (9, 0) && loaded.is_embedded;
        let functions = loaded.functions;
        for &function in functions.values() {
            allow_shared_memory(function.handle, shared_limit).map_err(failed)?;
        }
        Ok(Arc::new(Device {
            info,
            context,
            handle,
            stream,
            functions,
            compiled_because: loaded.compiled_because,
            shared_limit,
            has_wgmma,
            generation: AtomicU64::new(0),
            run: AtomicU64::new(0),
        }))
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn bind(&self) -> Result<(), Error> {
        if CURRENT.get() == self.context as usize {
            return Ok(());
        }
        // SAFETY: the context lives as long as the device.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| self.error("selecting the device", error))?;
        CURRENT.set(self.context as usize);
        Ok(())
    }

    pub(crate) fn error(&self, operation: &'static str, error: DriverError) -> Error {
        let (device, reason) = (self.name(), probe::describe(error));
        match loses_context(error.0) {
            true => Error::Lost { device, operation, reason },
            false => Error::Device { device, operation, reason },
        }
    }

    /// An error for an operation that this backend does not support.
    pub(crate) fn refuse(&self, operation: &'static str, reason: impl Into<String>) -> Error {
        Error::Device { device: self.name(), operation, reason: reason.into() }
    }

    pub(crate) fn name(&self) -> String {
        format!("cuda:{} ({})", self.info.ordinal, self.info.name)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Number of the current run of a step. Operations outside of steps belong to the run before them.
    pub(crate) fn run(&self) -> u64 {
        self.run.load(Ordering::Relaxed)
    }

    /// Notes that a step runs or is recorded from its beginning.
    pub(crate) fn begin_run(&self) {
        self.run.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(crate) fn num_multiprocessors(&self) -> u32 {
        self.info.num_multiprocessors as u32
    }

    /// Allocates memory, not cleared.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Buffer, Error> {
        self.bind()?;
        // The driver rejects an allocation of 0 bytes.
        let size = bytes.max(256);
        // SAFETY: the buffer owns the memory and frees it when it is dropped.
        let address = unsafe { result::malloc_sync(size) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { device: self.name(), bytes: size },
            _ => self.error("allocating", error),
        })?;
        self.generation.fetch_add(1, Ordering::Relaxed);
        Ok(Buffer { device: self.clone(), address, bytes })
    }

    pub(crate) fn allocate_zeroed(self: &Arc<Self>, bytes: usize) -> Result<Buffer, Error> {
        let buffer = self.allocate(bytes)?;
        // SAFETY: the buffer has at least `bytes` bytes.
        unsafe { result::memset_d8_async(buffer.address, 0, bytes, self.stream) }
            .map_err(|error| self.error("clearing memory", error))?;
        Ok(buffer)
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self) -> Result<(usize, usize), Error> {
        self.bind()?;
        result::mem_get_info().map_err(|error| self.error("reading the free memory", error))
    }

    /// Copies to the device in the order of the stream. Returns when `values` may be changed; a copy from pinned memory
    /// has only started.
    pub(crate) fn upload<T: Copy>(&self, values: &[T], to: u64) -> Result<(), Error> {
        self.bind()?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: callers give an address of a buffer that `values` fit into; pageable memory is copied before the call
        // returns, and `Piece` does not change pinned memory until the copy is done.
        unsafe { result::memcpy_htod_async(to, values, self.stream) }.map_err(|error| self.error("an upload", error))
    }

    /// Copies to the host, and waits for everything before it.
    pub(crate) fn download<T: Copy>(&self, from: u64, values: &mut [T]) -> Result<(), Error> {
        if values.is_empty() {
            return Ok(());
        }
        self.start_download(from, values)?;
        self.synchronize("a download")
    }

    /// Copies to the host in the order of the stream. A copy into pinned memory has only started: `Piece` waits until
    /// it is done.
    pub(crate) fn start_download<T: Copy>(&self, from: u64, values: &mut [T]) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: callers give an address that holds as much as `values`, which outlives the copy: they wait for it.
        unsafe { result::memcpy_dtoh_async(values, from, self.stream) }.map_err(|error| self.error("a download", error))
    }

    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: callers give ranges of live buffers.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(|error| self.error("a copy", error))
    }

    pub(crate) fn synchronize(&self, operation: &'static str) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: the stream lives as long as the device.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|error| self.error(operation, error))
    }

    fn function(&self, name: &'static str) -> Function {
        *self.functions.get(name).unwrap_or_else(|| panic!("no kernel is called {name}"))
    }

    pub(crate) fn launch<P: Parameter>(&self, name: &'static str, grid: Grid, parameter: &P) -> Result<(), Error> {
        self.bind()?;
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let mut parameters = [std::ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        let function = self.function(name);
        let mut attributes = [overlap()];
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::from(function.waits),
        };
        // SAFETY: `P` has the layout of the kernel's parameter, callers give addresses of live buffers in it, and the
        // driver copies the parameter before the call returns.
        unsafe { sys::cuLaunchKernelEx(&config, function.handle, parameters.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|error| self.error(name, error))
    }
}

/// Whether the driver fails every call after this error, for as long as the process lives.
pub(crate) fn loses_context(error: sys::CUresult) -> bool {
    use sys::CUresult as Status;
    matches!(
        error,
        Status::CUDA_ERROR_ILLEGAL_ADDRESS
            | Status::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Status::CUDA_ERROR_MISALIGNED_ADDRESS
            | Status::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Status::CUDA_ERROR_INVALID_PC
            | Status::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Status::CUDA_ERROR_LAUNCH_FAILED
            | Status::CUDA_ERROR_LAUNCH_TIMEOUT
            | Status::CUDA_ERROR_ASSERT
            | Status::CUDA_ERROR_ECC_UNCORRECTABLE
            | Status::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Status::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Status::CUDA_ERROR_DEINITIALIZED
            | Status::CUDA_ERROR_NO_DEVICE
            | Status::CUDA_ERROR_DEVICE_UNAVAILABLE
            | Status::CUDA_ERROR_SYSTEM_NOT_READY
            | Status::CUDA_ERROR_UNKNOWN
    )
}

/// Raises the limit of a block's shared memory, which is 48 KiB by default.
fn allow_shared_memory(function: sys::CUfunction, limit: u32) -> Result<(), DriverError> {
    use sys::CUfunction_attribute as Attribute;
    // SAFETY: the function belongs to a module that is never unloaded.
    unsafe {
        let fixed = result::function::get_function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        result::function::set_function_attribute(function, dynamic, limit as i32 - fixed)
    }
}

/// Lets a kernel start while the one before it ends; the kernel waits for it (see `begin` in prelude.cu).
fn overlap() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: nothing else holds the stream, and every buffer keeps the device alive. A failure here cannot be
            // handled.
            unsafe {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
                let _ = result::primary_ctx::release(self.handle);
            }
        }
        CURRENT.set(0);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Memory of a device, freed when dropped.
pub(crate) struct Buffer {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl Buffer {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.generation.fetch_add(1, Ordering::Relaxed);
        if self.device.bind().is_ok() {
            // SAFETY: the buffer owns the memory. The driver waits for work that still uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}
