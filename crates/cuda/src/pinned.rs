//! Pinned host memory, which the device copies asynchronously, and events, by which the host waits for the device.
//!
//! A copy from pinned memory runs asynchronously: the memory must not change before it is done. [`Ring`] ensures that.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use pellucid_tensor::{Error, HostFloats};

use crate::driver::Device;

/// Numbers, or structures of numbers.
///
/// # Safety
/// Every pattern of bytes is a valid value of the type.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: a byte.
unsafe impl Plain for u8 {}
// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for f32 {}

/// Pinned host memory, freed when dropped.
pub(crate) struct Pinned<T> {
    device: Arc<Device>,
    memory: *mut T,
    len: usize,
}

// SAFETY: the memory is owned by this value, like a box's.
unsafe impl<T: Plain> Send for Pinned<T> {}
// SAFETY: shared references only read.
unsafe impl<T: Plain> Sync for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    /// Allocates `len` zeros.
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Result<Pinned<T>, Error> {
        device.bind()?;
        // SAFETY: the result owns the memory and frees it when it is dropped.
        let memory = unsafe { result::malloc_host((len * size_of::<T>()).max(4), 0) }
            .map_err(|error| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    Error::OutOfMemory { device: "the host".into(), bytes: len * size_of::<T>() }
                }
                _ => device.error("allocating host memory", error),
            })?
            .cast::<T>();
        // SAFETY: the memory holds `len` values, begins at a page, and zero bytes are values.
        unsafe { memory.write_bytes(0, len) };
        Ok(Pinned { device: device.clone(), memory, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn values(&self) -> &[T] {
        // SAFETY: `memory` holds `len` values for as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.memory, self.len) }
    }

    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and nobody else has a reference.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.len) }
    }
}

impl HostFloats for Pinned<f32> {
    fn get(&self) -> &[f32] {
        self.values()
    }

    fn get_mut(&mut self) -> &mut [f32] {
        self.values_mut()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the memory came from the driver. Copies to it were waited for, and those from it by `Piece`.
            let _ = unsafe { result::free_host(self.memory.cast()) };
        }
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} values)", self.len)
    }
}

/// Pinned bytes as f32 values: they begin at a page, so they are aligned.
pub(crate) fn floats_of(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every four bytes are an f32.
    let (before, floats, after) = unsafe { bytes.align_to_mut::<f32>() };
    assert!(before.is_empty() && after.is_empty(), "whole numbers from the start of a page");
    floats
}

/// A point in the order of the stream that the host can wait for.
pub(crate) struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: the driver lets any thread use an event.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Event, Error> {
        device.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|error| device.error("making an event", error))?;
        Ok(Event { device: device.clone(), event })
    }

    /// Records the event after everything that was launched so far.
    pub(crate) fn record(&self) -> Result<(), Error> {
        self.device.bind()?;
        // SAFETY: event and stream live as long as this value.
        unsafe { result::event::record(self.event, self.device.stream()) }
            .map_err(|error| self.device.error("recording an event", error))
    }

    /// Waits for the event. Returns at once if it was never recorded.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        self.device.bind()?;
        // SAFETY: the event lives as long as this value.
        unsafe { result::event::synchronize(self.event) }
            .map_err(|error| self.device.error("waiting for the device", error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: this value owns the event. The driver keeps it until work that needs it has ended.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

/// Pinned memory to upload from or to download into, and the event of the last copy.
#[derive(Debug)]
pub(crate) struct Piece<T> {
    memory: Pinned<T>,
    copied: Event,
}

impl<T: Plain> Piece<T> {
    fn new(device: &Arc<Device>, len: usize) -> Result<Piece<T>, Error> {
        Ok(Piece { memory: Pinned::new(device, len)?, copied: Event::new(device)? })
    }

    /// Returns the piece in `slot` if it has at least `len` values, or replaces it. Sizes are powers of two, so that
    /// they seldom change.
    pub(crate) fn of_len<'a>(
        slot: &'a mut Option<Piece<T>>,
        device: &Arc<Device>,
        len: usize,
    ) -> Result<&'a mut Piece<T>, Error> {
        drop(slot.take_if(|piece| piece.memory.len() < len));
        match slot {
            Some(piece) => Ok(piece),
            None => Ok(slot.insert(Piece::new(device, len.next_power_of_two())?)),
        }
    }

    /// Waits for the last copy, and returns the values.
    pub(crate) fn values_mut(&mut self) -> Result<&mut [T], Error> {
        self.copied.wait()?;
        Ok(self.memory.values_mut())
    }

    /// Starts to copy the first `len` values to an address of the device.
    pub(crate) fn upload(&mut self, len: usize, to: u64) -> Result<(), Error> {
        self.memory.device.upload(&self.memory.values()[..len], to)?;
        self.copied.record()
    }

    /// Starts to copy the first `len` values from an address of the device.
    pub(crate) fn download(&mut self, len: usize, from: u64) -> Result<(), Error> {
        let Piece { memory, copied } = self;
        let device = memory.device.clone();
        device.start_download(from, &mut memory.values_mut()[..len])?;
        copied.record()
    }
}

impl<T> Drop for Piece<T> {
    fn drop(&mut self) {
        // After a failure the device copies nothing more.
        let _ = self.copied.wait();
    }
}

/// Pieces used in turn: one is filled while the device may still copy the others.
#[derive(Debug)]
pub(crate) struct Ring<T, const NUM_PIECES: usize> {
    pieces: [Option<Piece<T>>; NUM_PIECES],
    current: usize,
}

impl<T, const NUM_PIECES: usize> Default for Ring<T, NUM_PIECES> {
    fn default() -> Self {
        Ring { pieces: std::array::from_fn(|_| None), current: 0 }
    }
}

impl<T: Plain, const NUM_PIECES: usize> Ring<T, NUM_PIECES> {
    /// The next piece, of at least `len` values.
    pub(crate) fn next(&mut self, device: &Arc<Device>, len: usize) -> Result<&mut Piece<T>, Error> {
        self.current = (self.current + 1) % NUM_PIECES;
        Piece::of_len(&mut self.pieces[self.current], device, len)
    }
}
