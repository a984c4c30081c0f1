//! Lists the GPUs of the machine, and says why one cannot be used. Never panics, on any machine.

use cudarc::driver::{result, sys};

/// The oldest supported driver: CUDA 12.0 has every function that we call.
const OLDEST_DRIVER: i32 = 12_000;
/// The tensor cores' bf16 instruction and asynchronous copies came with compute capability 8.0.
const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

/// Why no GPU, or not this one, can be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unusable {
    #[error("no NVIDIA driver was found")]
    NoDriver,
    #[error("the NVIDIA driver did not start: {reason}")]
    DriverFailed { reason: String },
    #[error("the NVIDIA driver is for CUDA {found}; {expected} or newer is needed")]
    OldDriver { found: String, expected: String },
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    #[error("cuda:{ordinal} does not exist; the last GPU is cuda:{last}")]
    NoSuchDevice { ordinal: usize, last: usize },
    #[error("{name} has compute capability {found}; {expected} or newer is needed")]
    OldDevice { name: String, found: String, expected: String },
    #[error("{name} could not be opened: {reason}")]
    OpenFailed { name: String, reason: String },
}

/// One GPU, as the driver describes it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub ordinal: usize,
    pub name: String,
    /// Major and minor.
    pub capability: (i32, i32),
    pub total_bytes: u64,
    pub num_multiprocessors: i32,
    /// The newest CUDA version that the driver supports: 13000 is 13.0.
    pub driver_version: i32,
    pub unusable: Option<Unusable>,
}

impl DeviceInfo {
    /// Returns the newest CUDA version that the driver supports, such as "13.0".
    pub fn driver_text(&self) -> String {
        dotted(self.driver_version)
    }
}

/// Every GPU of the machine, usable or not.
pub fn devices() -> Result<Vec<DeviceInfo>, Unusable> {
    let driver_version = start()?;
    let failed = |error: result::DriverError| Unusable::DriverFailed { reason: describe(error) };
    let count = result::device::get_count().map_err(failed)?;
    if count <= 0 {
        return Err(Unusable::NoDevice);
    }
    (0..count as usize).map(|ordinal| info(ordinal, driver_version).map_err(failed)).collect()
}

/// Loads and starts the driver, and returns its version.
fn start() -> Result<i32, Unusable> {
    // SAFETY: opening the driver's library runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unusable::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there, and the function, which is in every driver, writes one integer.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) };
    status.result().map_err(|error| Unusable::DriverFailed { reason: describe(error) })?;
    // Functions are looked up when they are first called, and a missing one would panic: reject an old driver here.
    if version < OLDEST_DRIVER {
        return Err(Unusable::OldDriver { found: dotted(version), expected: dotted(OLDEST_DRIVER) });
    }
    match result::init() {
        Ok(()) => Ok(version),
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(Unusable::NoDevice),
        Err(error) => Err(Unusable::DriverFailed { reason: describe(error) }),
    }
}

fn info(ordinal: usize, driver_version: i32) -> Result<DeviceInfo, result::DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal as i32)?;
    // SAFETY: `device` is a handle that the driver has just given.
    let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let name = result::device::get_name(device)?;
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let unusable = (capability < OLDEST_CAPABILITY).then(|| Unusable::OldDevice {
        name: name.clone(),
        found: format!("{}.{}", capability.0, capability.1),
        expected: format!("{}.{}", OLDEST_CAPABILITY.0, OLDEST_CAPABILITY.1),
    });
    Ok(DeviceInfo {
        ordinal,
        capability,
        // SAFETY: as above.
        total_bytes: unsafe { result::device::total_mem(device)? } as u64,
        num_multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        driver_version,
        name,
        unusable,
    })
}

/// 13010 as 13.1.
fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver's description of an error.
pub(crate) fn describe(error: result::DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("error {:?}", error.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On any machine: GPUs, or a sentence that says why there are none.
    #[test]
    fn probing_never_panics() {
        match devices() {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(why) => assert!(!why.to_string().is_empty()),
        }
    }
}
