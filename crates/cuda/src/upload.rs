//! Weights on their way to the device: raw bytes in pieces, packed into tiles there.
//!
//! A format without tiles of its own is decoded on the host. A table, which is read by rows, becomes F32; a matrix becomes F16 (MXFP4, whose
//! exponents F16 cannot hold, becomes BF16, which is exact for it). The backend keeps count, so that the program can say so.

use pellucid_tensor::{DType, Error, HostWeight, Tensor, quant};

use crate::backend::{CudaBackend, Purpose};
use crate::kernels::pack::PackWeight;
use crate::kernels::{self, pack};
use crate::memory::DeviceMemory;

/// Bytes that are uploaded at a time.
const PIECE: usize = 64 << 20;

/// A table or a vector, whose numbers stay exactly what they are.
pub(crate) fn table(backend: &CudaBackend, weight: HostWeight) -> Result<Tensor, Error> {
    let to = if kernels::format(weight.dtype).is_some() { weight.dtype } else { DType::F32 };
    store(backend, weight, to, false)
}

/// The matrix of a product.
pub(crate) fn matrix(backend: &CudaBackend, weight: HostWeight) -> Result<Tensor, Error> {
    let to = match weight.dtype {
        dtype if kernels::format(dtype).is_some() => dtype,
        DType::MXFP4 => DType::BF16,
        _ => DType::F16,
    };
    if to != weight.dtype {
        backend.note_conversion(weight.dtype, to);
    }
    let with_plain = backend.has_fast_products() && weight.dtype == DType::BF16;
    store(backend, weight, to, with_plain)
}

/// `with_plain` keeps a weight of 16 bits as it is in the file beside its tiles.
fn store(backend: &CudaBackend, weight: HostWeight, to: DType, with_plain: bool) -> Result<Tensor, Error> {
    let HostWeight { dtype, rows, cols, bytes } = weight;
    assert_eq!(Some(bytes.len()), dtype.bytes_for(rows * cols), "a weight's bytes fit its shape");
    let device = &backend.device;
    let size = kernels::packed_bytes(to, rows, cols);
    let size = size.ok_or_else(|| Error::OutOfMemory { device: device.name(), bytes: usize::MAX })?;
    let buffer = device.allocate(size)?;
    let plain = if with_plain { Some(device.allocate(bytes.len())?) } else { None };
    let row_bytes = dtype.bytes_for(cols).expect("rows are whole blocks");
    let from_f32 = to != dtype;
    let sent_bytes = if from_f32 { cols * 4 } else { row_bytes };
    // Whole tiles of 16 rows.
    let rows_at_once = (PIECE / sent_bytes.max(1) / 16 * 16).max(16);
    let staging = backend.scratch(Purpose::Upload, rows_at_once.min(rows.next_multiple_of(16)) * sent_bytes)?;
    for first_row in (0..rows).step_by(rows_at_once) {
        let num_rows = rows_at_once.min(rows - first_row);
        // F32 lies on the device as in the file, and so does what is kept plain.
        let kept = if to == DType::F32 { Some(&buffer) } else { plain.as_ref() };
        let staging = kept.map_or(staging, |buffer| buffer.address() + (first_row * sent_bytes) as u64);
        let piece = &bytes[first_row * row_bytes..(first_row + num_rows) * row_bytes];
        if from_f32 {
            let mut decoded = vec![0.0f32; num_rows * cols];
            quant::decode(dtype, piece, &mut decoded);
            device.upload(&decoded, staging)?;
        } else {
            device.upload(piece, staging)?;
        }
        if to == DType::F32 {
            continue;
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
    let mut memory = DeviceMemory::new(buffer);
    memory.plain = plain;
    Ok(Tensor::new(to, rows, cols, Box::new(memory)))
}
