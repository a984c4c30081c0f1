//! Device memory behind a tensor, and the operand of matrix products that is kept beside an activation.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pellucid_tensor::{DType, Error, Memory, Tensor};

use crate::driver::{Buffer, Device};
use crate::kernels::rows::elementwise::MAX_PIECES;
use crate::kernels::{GROUP_COLS, Operand};

/// Values on a device: an activation or KV memory row by row, a weight in the tiles of `weight_formats.cu`.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) buffer: Buffer,
    /// A second copy of a weight, row by row as in its file, for cuBLASLt.
    pub(crate) plain: Option<Buffer>,
    /// The 16-bit form of an activation, once a matrix product has needed it.
    operand: Mutex<Option<StoredOperand>>,
}

/// An activation rounded for the tensor cores. It is kept with the activation, so that the kernel that writes the
/// activation next can write this too, and the product need not make it.
#[derive(Debug)]
pub(crate) struct StoredOperand {
    numbers: Buffer,
    scales: Buffer,
    maxima: Buffer,
    pitch: usize,
    rows: usize,
    is_bf16: bool,
    /// The run in which the operand was filled; `None` once the activation has changed. It is filled again in every
    /// run that reads it: a run that was only recorded has computed nothing, and a recording must not depend on what
    /// an earlier run left.
    filled_in: Option<u64>,
}

/// Bytes of an operand's numbers: whole panels of 128 rows.
pub(crate) fn operand_bytes(rows: usize, pitch: usize) -> usize {
    rows.next_multiple_of(128) * pitch * 2
}

impl StoredOperand {
    pub(crate) fn parameter(&self) -> Operand {
        Operand {
            numbers: self.numbers.address(),
            scales: self.scales.address(),
            maxima: self.maxima.address(),
            pitch: self.pitch as u32,
            is_bf16: u32::from(self.is_bf16),
        }
    }
}

impl DeviceMemory {
    pub(crate) fn new(buffer: Buffer) -> Self {
        DeviceMemory { buffer, plain: None, operand: Mutex::new(None) }
    }

    fn operand(&self) -> MutexGuard<'_, Option<StoredOperand>> {
        self.operand.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the operand of the first `rows` rows, and whether the caller must fill it. It counts as filled from now
    /// on.
    pub(crate) fn operand_for(
        &self,
        device: &Arc<Device>,
        rows: usize,
        cols: usize,
        is_bf16: bool,
    ) -> Result<(Operand, bool), Error> {
        let mut stored = self.operand();
        let pitch = cols.next_multiple_of(GROUP_COLS);
        if !stored.as_ref().is_some_and(|s| s.rows >= rows && s.pitch == pitch) {
            // The old one is freed first: both need not fit at once.
            *stored = None;
            *stored = Some(StoredOperand {
                numbers: device.allocate(operand_bytes(rows, pitch))?,
                scales: device.allocate(rows * 4)?,
                maxima: device.allocate(rows * MAX_PIECES * 4)?,
                pitch,
                rows,
                is_bf16,
                filled_in: None,
            });
        }
        let operand = stored.as_mut().expect("made above");
        let run = Some(device.run());
        let must_fill = operand.filled_in != run || operand.is_bf16 != is_bf16;
        operand.is_bf16 = is_bf16;
        operand.filled_in = run;
        Ok((operand.parameter(), must_fill))
    }

    /// For a kernel that writes `rows` rows of the activation: the operand to write too, if a product is known to need
    /// it.
    pub(crate) fn operand_to_write(&self, rows: usize) -> Option<Operand> {
        let mut stored = self.operand();
        let operand = stored.as_mut()?;
        let has_room = operand.rows >= rows;
        operand.filled_in = has_room.then(|| self.buffer.device().run());
        has_room.then(|| operand.parameter())
    }

    /// Notes that the activation changes without its operand.
    pub(crate) fn outdate(&self) {
        if let Some(operand) = self.operand().as_mut() {
            operand.filled_in = None;
        }
    }
}

impl Memory for DeviceMemory {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// The memory of a tensor of this backend. A tensor of another backend is a mistake of the caller.
pub(crate) fn memory(tensor: &Tensor) -> &DeviceMemory {
    tensor.memory().as_any().downcast_ref().expect("a tensor of the CUDA backend")
}

/// Address of a tensor that a kernel reads.
pub(crate) fn read(tensor: &Tensor) -> u64 {
    memory(tensor).buffer.address()
}

/// Address of an f32 activation that a kernel reads.
pub(crate) fn floats(tensor: &Tensor) -> u64 {
    assert_eq!(tensor.dtype(), DType::F32, "activations, norms and biases are f32");
    read(tensor)
}

/// Address of an f32 activation that a kernel writes.
pub(crate) fn floats_mut(tensor: &mut Tensor) -> u64 {
    memory(tensor).outdate();
    floats(tensor)
}

/// Copies row `from` of one tensor over row `to` of another of the same format and width, or of the same tensor.
pub(crate) fn copy_row(
    device: &Device,
    (source, from): (&Tensor, usize),
    (target, to): (&Tensor, usize),
) -> Result<(), Error> {
    let (dtype, cols) = (source.dtype(), source.cols());
    let bytes = dtype.bytes_for(cols).expect("rows are whole blocks");
    // A row of 8 bits has two parts: its bytes and, after those of all rows, its scales.
    let (part, scales) = if dtype == DType::Q8_0 { (cols, bytes - cols) } else { (bytes, 0) };
    device.copy(read(source) + (from * part) as u64, read(target) + (to * part) as u64, part)?;
    if scales == 0 {
        return Ok(());
    }
    let scales_of = |tensor: &Tensor, row: usize| read(tensor) + (tensor.len() + row * scales) as u64;
    device.copy(scales_of(source, from), scales_of(target, to), scales)
}
