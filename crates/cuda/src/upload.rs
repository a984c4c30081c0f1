//! Weights on their way to the device: raw bytes in pieces, packed into tiles there.
//!
//! A format without tiles of its own is decoded on the host and stored as F16 (MXFP4, whose exponents F16 cannot hold, as BF16, which is
//! exact for it); the backend keeps count, so that the program can say so.

use pellucid_tensor::{DType, Error, HostWeight, Tensor, quant};

use crate::backend::{CudaBackend, Purpose};
use crate::kernels::pack::PackWeight;
use crate::kernels::{self, pack};
use crate::memory::DeviceMemory;

/// Bytes that are uploaded at a time.
const PIECE: usize = 64 << 20;

/// The format that a weight is stored in.
fn stored(dtype: DType) -> DType {
    match dtype {
        _ if kernels::format(dtype).is_some() => dtype,
        DType::MXFP4 => DType::BF16,
        _ => DType::F16,
    }
}

pub(crate) fn weight(backend: &CudaBackend, weight: HostWeight) -> Result<Tensor, Error> {
    let HostWeight { dtype, rows, cols, bytes } = weight;
    assert_eq!(Some(bytes.len()), dtype.bytes_for(rows * cols), "a weight's bytes fit its shape");
    let device = &backend.device;
    let to = stored(dtype);
    let size = kernels::packed_bytes(to, rows, cols);
    let size = size.ok_or_else(|| Error::OutOfMemory { device: device.name(), bytes: usize::MAX })?;
    let buffer = device.allocate(size)?;
    if dtype == DType::F32 {
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            device.upload(piece, buffer.address() + (i * PIECE) as u64)?;
        }
        return Ok(Tensor::new(dtype, rows, cols, Box::new(DeviceMemory::new(buffer))));
    }
    let row_bytes = dtype.bytes_for(cols).expect("rows are whole blocks");
    let from_f32 = to != dtype;
    if from_f32 {
        backend.note_conversion(dtype, to);
    }
    let sent_bytes = if from_f32 { cols * 4 } else { row_bytes };
    // Whole tiles of 16 rows.
    let rows_at_once = (PIECE / sent_bytes.max(1) / 16 * 16).max(16);
    let staging = backend.scratch(Purpose::Upload, rows_at_once.min(rows.next_multiple_of(16)) * sent_bytes)?;
    for first_row in (0..rows).step_by(rows_at_once) {
        let num_rows = rows_at_once.min(rows - first_row);
        let piece = &bytes[first_row * row_bytes..(first_row + num_rows) * row_bytes];
        if from_f32 {
            let mut decoded = vec![0.0f32; num_rows * cols];
            quant::decode(dtype, piece, &mut decoded);
            device.upload(&decoded, staging)?;
        } else {
            device.upload(piece, staging)?;
        }
        let parameter = PackWeight {
            from: staging,
            to: buffer.address(),
            row_bytes: sent_bytes as u64,
            rows: rows as u32,
            cols: cols as u32,
            first_row: first_row as u32,
            num_rows: num_rows as u32,
            format: kernels::format(to).expect("a format with tiles"),
            from_f32: u32::from(from_f32),
        };
        pack::pack(device, &parameter)?;
    }
    Ok(Tensor::new(to, rows, cols, Box::new(DeviceMemory::new(buffer))))
}
