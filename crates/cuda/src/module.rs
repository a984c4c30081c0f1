//! Loads kernels: embedded machine code or PTX or, if neither loads, their source compiled by NVRTC.

use std::collections::HashMap;
use std::ffi::CString;
use std::panic::catch_unwind;

use cudarc::driver::result::DriverError;
use cudarc::driver::{result, sys};
use cudarc::nvrtc;

use crate::kernels::{self, KernelFile};
use crate::probe;

/// The kernels of every file by name, and how they were loaded.
pub(crate) struct Loaded {
    pub(crate) functions: HashMap<&'static str, Function>,
    /// Why the embedded kernels did not load, if they were tried.
    pub(crate) compiled_because: Option<String>,
    /// Machine code or PTX of our own build.
    pub(crate) is_embedded: bool,
}

/// A kernel on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(crate) handle: sys::CUfunction,
    /// Whether it waits for the kernel before it (`wait_for_previous` in prelude.cu).
    pub(crate) waits: bool,
}

/// Whether a kernel was compiled for 9.0 or later, which has the instruction: the PTX for later GPUs is of the first
/// architecture.
fn waits(function: sys::CUfunction) -> Result<bool, DriverError> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
    // SAFETY: the function belongs to a module that is never unloaded.
    Ok(unsafe { result::function::get_function_attribute(function, attribute) }? >= 90)
}

/// Loads every kernel file into the current context, which keeps them. `compiles` skips the embedded ones.
pub(crate) fn load(capability: (i32, i32), compiles: bool) -> Result<Loaded, String> {
    let mut functions = HashMap::new();
    let (mut is_embedded, mut compiled_because) = (!compiles, None);
    for file in kernels::FILES {
        let embedded = match compiles {
            true => Err("`compile_kernels` skips them".into()),
            // SAFETY: the bytes are a fat binary that our own build made, and stay for the length of the program.
            false => unsafe { result::module::load_data(file.binary.as_ptr().cast()) }.map_err(probe::describe),
        };
        let module = match embedded {
            Ok(module) => module,
            Err(why) => {
                let (major, minor) = capability;
                let module = compile(file, capability).map_err(|reason| {
                    format!("no embedded kernels for compute capability {major}.{minor} ({why}), and {reason}")
                })?;
                is_embedded = false;
                if !compiles {
                    compiled_because.get_or_insert(why);
                }
                module
            }
        };
        for &name in file.kernels {
            let missing = |what: String| format!("kernel {name} of {}: {what}", file.name);
            let symbol = CString::new(name).map_err(|error| missing(error.to_string()))?;
            // SAFETY: the module was loaded above and is never unloaded.
            let function =
                unsafe { result::module::get_function(module, symbol) }.map_err(|e| missing(probe::describe(e)))?;
            if kernels::reads_through_cache(name) {
                prefer_cache(function).map_err(|e| missing(probe::describe(e)))?;
            }
            let waits = waits(function).map_err(|e| missing(probe::describe(e)))?;
            functions.insert(name, Function { handle: function, waits });
        }
    }
    Ok(Loaded { functions, compiled_because, is_embedded })
}

/// Gives half of a multiprocessor's memory to the L1 cache. Without this it keeps the share of the kernel before, which
/// may be an eighth.
fn prefer_cache(function: sys::CUfunction) -> Result<(), DriverError> {
    const SHARED_PERCENT: i32 = 50;
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    // SAFETY: the function belongs to a module that is never unloaded.
    unsafe { result::function::set_function_attribute(function, attribute, SHARED_PERCENT) }
}

/// The first error of the compiler's log.
fn first_error(error: &nvrtc::CompileError) -> String {
    let nvrtc::CompileError::CompileError { log, .. } = error else { return format!("{error:?}") };
    let log = log.to_string_lossy();
    log.lines().find(|line| line.contains("error")).unwrap_or("no error in its log").to_owned()
}

/// Compiles one file for a GPU that the embedded kernels do not cover.
fn compile(file: &KernelFile, capability: (i32, i32)) -> Result<sys::CUmodule, String> {
    // The binding panics if NVRTC is missing; we return an error.
    // SAFETY: opening the library runs its initialisers, which is what it is for.
    let present = catch_unwind(|| unsafe { nvrtc::sys::is_culib_present() }).unwrap_or(false);
    if !present {
        return Err("NVRTC, which could compile them, was not found".into());
    }
    let options = nvrtc::CompileOptions {
        options: vec![
            format!("--gpu-architecture=compute_{}{}", capability.0, capability.1),
            "--std=c++17".into(),
            // Each file uses a part of what is shared.
            "--diag-suppress=177".into(),
        ],
        ..Default::default()
    };
    let ptx = nvrtc::compile_ptx_with_opts(kernels::full_source(file), options)
        .map_err(|error| format!("NVRTC could not compile {}: {}", file.name, first_error(&error)))?;
    let text = CString::new(ptx.to_src()).map_err(|error| error.to_string())?;
    // SAFETY: the text is PTX that ends with a zero byte.
    unsafe { result::module::load_data(text.as_ptr().cast()) }.map_err(probe::describe)
}
