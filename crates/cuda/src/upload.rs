//! Sends weights to the device: raw bytes in pieces. There the matrices of linear maps are packed into tiles; tables
//! stay as they are.
//!
//! Several threads read a mapped file: each has two pieces of pinned memory, and fills one while the device copies the
//! other. Copies and packing are in the order of the one stream, so every later operation finds the weight complete.
//!
//! A format without kernels is decoded on the host. A table, which is read by rows, becomes F32; a matrix becomes F16,
//! and so does a matrix with a scale that its tiles cannot hold (of MXFP4 BF16, which is exact for it). The backend
//! counts conversions for
//! [`Backend::remarks`](pellucid_tensor::Backend::remarks).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use pellucid_tensor::{DType, Error, HostWeight, Tensor, quant};

use crate::driver::Device;
use crate::gpu::{Gpu, Purpose};
use crate::kernels;
use crate::kernels::matmul::pack_weight::{self, PackWeight};
use crate::memory::DeviceMemory;
use crate::pinned::{Ring, floats_of};

/// Bytes of an upload.
const PIECE: usize = 4 << 20;
/// Maximum threads that read.
const MAX_READERS: usize = 8;

/// The pinned memory of each reader, kept from weight to weight.
pub(crate) type Staging = Vec<Ring<u8, 2>>;

/// Sends a table or a vector, whose values stay exactly what they are.
pub(crate) fn table(gpu: &mut Gpu, weight: HostWeight) -> Result<Tensor, Error> {
    let HostWeight { dtype, rows, cols, .. } = weight;
    let to = if kernels::format(dtype).is_some() { dtype } else { DType::F32 };
    if to != dtype {
        gpu.note_conversion(dtype, to);
    }
    let size = rows.checked_mul(cols).and_then(|len| to.bytes_for(len));
    let size = size.ok_or_else(|| Error::OutOfMemory { device: gpu.device.name(), bytes: usize::MAX })?;
    let device = gpu.device.clone();
    let buffer = device.allocate(size)?;
    let kept = Some(buffer.address());
    let outgrew = AtomicBool::new(false);
    send(gpu, &Transfer { device: &device, weight: &weight, to, packed: None, kept, outgrew })?;
    Ok(Tensor::new(to, rows, cols, Box::new(DeviceMemory::new(buffer))))
}

/// Returns the format in which a matrix is stored, if its tiles can hold its scales.
pub(crate) fn stored_dtype(dtype: DType) -> DType {
    if kernels::format(dtype).is_some() { dtype } else { DType::F16 }
}

/// Sends the matrix of a linear map; with `is_fast`, for cuBLASLt too.
pub(crate) fn matrix(gpu: &mut Gpu, weight: HostWeight, is_fast: bool) -> Result<Tensor, Error> {
    let to = stored_dtype(weight.dtype);
    let without_scales = if weight.dtype == DType::MXFP4 { DType::BF16 } else { DType::F16 };
    let with_plain = is_fast && matches!(weight.dtype, DType::BF16 | DType::F16);
    let (to, tensor) = match store(gpu, &weight, to, with_plain)? {
        Some(tensor) => (to, tensor),
        None => {
            let stored = store(gpu, &weight, without_scales, false)?;
            (without_scales, stored.expect("16-bit formats have no scales"))
        }
    };
    if to != weight.dtype {
        gpu.note_conversion(weight.dtype, to);
    }
    Ok(tensor)
}

/// Sends a matrix as tiles of format `to`. `with_plain` keeps a weight of 16 bits row by row too. Returns `None` if the
/// tiles cannot hold a scale.
fn store(gpu: &mut Gpu, weight: &HostWeight, to: DType, with_plain: bool) -> Result<Option<Tensor>, Error> {
    let HostWeight { rows, cols, ref bytes, .. } = *weight;
    let device = &gpu.device.clone();
    let size = kernels::packed_bytes(to, rows, cols);
    let size = size.ok_or_else(|| Error::OutOfMemory { device: device.name(), bytes: usize::MAX })?;
    let buffer = device.allocate(size)?;
    let plain = if with_plain { Some(device.allocate(bytes.len())?) } else { None };
    // F32 is stored as in the file, and so is the plain copy.
    let (packed, kept) = match to {
        DType::F32 => (None, Some(buffer.address())),
        _ => (Some(buffer.address()), plain.as_ref().map(|plain| plain.address())),
    };
    let transfer = Transfer { device, weight, to, packed, kept, outgrew: AtomicBool::new(false) };
    send(gpu, &transfer)?;
    if transfer.outgrew.into_inner() {
        return Ok(None);
    }
    let mut memory = DeviceMemory::new(buffer);
    memory.plain = plain;
    Ok(Some(Tensor::new(to, rows, cols, Box::new(memory))))
}

/// Sends every piece of a weight, with up to one reader for each piece.
fn send(gpu: &mut Gpu, transfer: &Transfer<'_>) -> Result<(), Error> {
    let HostWeight { dtype, rows, cols, ref bytes } = *transfer.weight;
    assert_eq!(Some(bytes.len()), dtype.bytes_for(rows * cols), "a weight's bytes fit its shape");
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let num_readers = transfer.num_pieces().min(MAX_READERS).min(cores);
    let piece_bytes = transfer.rows_at_once().min(transfer.weight.rows.next_multiple_of(16)) * transfer.sent_bytes();
    // Every reader has its own memory on the device: copies of others come between a copy and its packing.
    let slot_bytes = piece_bytes.next_multiple_of(256);
    let slots = gpu.scratch(Purpose::Upload, num_readers * slot_bytes)?;
    let slot = |reader: usize| slots + (reader * slot_bytes) as u64;
    let staging = &mut gpu.staging;
    let num_rings = staging.len().max(num_readers);
    staging.resize_with(num_rings, Ring::default);
    let next = &AtomicUsize::new(0);
    let Some((own, others)) = staging[..num_readers].split_first_mut() else { return Ok(()) };
    thread::scope(|scope| {
        let readers: Vec<_> = (others.iter_mut().enumerate())
            .map(|(i, ring)| scope.spawn(move || transfer.read_pieces(next, ring, slot(i + 1))))
            .collect();
        let own = transfer.read_pieces(next, own, slot(0));
        let others = readers.into_iter().map(|reader| reader.join().expect("a reader does not panic"));
        others.fold(own, Result::and)
    })
}

/// The transfer of a weight to the device.
struct Transfer<'a> {
    device: &'a Arc<Device>,
    weight: &'a HostWeight,
    to: DType,
    /// Address of its tiles.
    packed: Option<u64>,
    /// Address of its rows as they are sent.
    kept: Option<u64>,
    /// Whether its tiles cannot hold one of its scales.
    outgrew: AtomicBool,
}

/// Whether the tiles of a format can hold the scales of these blocks, which they hold times a power of two
/// (weight_formats.cu).
fn holds_scales(dtype: DType, blocks: &[u8]) -> bool {
    // The bits of the largest f16 scale: 65504 / 2^18, 65504 / 2^16, and a 63rd of that.
    let (block_bytes, largest) = match dtype {
        DType::Q8_0 => (34, 0x33ff),
        DType::Q4_0 => (18, 0x3bff),
        DType::Q4_K => (144, 0x240f),
        DType::MXFP4 => return blocks.chunks_exact(17).all(holds_float4),
        _ => return true,
    };
    blocks.chunks_exact(block_bytes).all(|block| u16::from_le_bytes([block[0], block[1]]) & 0x7fff <= largest)
}

/// Whether the tiles of MXFP4 hold a block exactly: its scale is 2^-23 to 2, or all of its values are zeros.
fn holds_float4(block: &[u8]) -> bool {
    (104..=128).contains(&block[0]) || block[1..].iter().all(|pair| pair & 0x77 == 0)
}

impl Transfer<'_> {
    /// Bytes of a row as it is sent: decoded if there are no tiles for its format.
    fn sent_bytes(&self) -> usize {
        let HostWeight { dtype, cols, .. } = *self.weight;
        if self.is_decoded() { cols * 4 } else { dtype.bytes_for(cols).expect("rows are whole blocks") }
    }

    fn is_decoded(&self) -> bool {
        self.to != self.weight.dtype
    }

    /// Whole tiles of 16 rows.
    fn rows_at_once(&self) -> usize {
        (PIECE / self.sent_bytes().max(1) / 16 * 16).max(16)
    }

    fn num_pieces(&self) -> usize {
        self.weight.rows.div_ceil(self.rows_at_once())
    }

    /// Sends pieces that no other reader has taken, through `ring` and a slot of device memory.
    fn read_pieces(&self, next: &AtomicUsize, ring: &mut Ring<u8, 2>, slot: u64) -> Result<(), Error> {
        loop {
            let first_row = next.fetch_add(1, Ordering::Relaxed) * self.rows_at_once();
            if first_row >= self.weight.rows || self.outgrew.load(Ordering::Relaxed) {
                return Ok(());
            }
            let rows = first_row..(first_row + self.rows_at_once()).min(self.weight.rows);
            self.send_rows(rows, ring, slot)?;
        }
    }

    fn send_rows(&self, rows: Range<usize>, ring: &mut Ring<u8, 2>, slot: u64) -> Result<(), Error> {
        let HostWeight { dtype, cols, ref bytes, .. } = *self.weight;
        let row_bytes = dtype.bytes_for(cols).expect("rows are whole blocks");
        let from = &bytes[rows.start * row_bytes..rows.end * row_bytes];
        let len = rows.len() * self.sent_bytes();
        let piece = ring.next(self.device, len)?;
        let staged = &mut piece.values_mut()?[..len];
        if self.is_decoded() {
            quant::decode(dtype, from, floats_of(staged));
        } else {
            staged.copy_from_slice(from);
        }
        let address = self.kept.map_or(slot, |kept| kept + (rows.start * self.sent_bytes()) as u64);
        piece.upload(len, address)?;
        let Some(packed) = self.packed else { return Ok(()) };
        if !self.is_decoded() && !holds_scales(dtype, from) {
            self.outgrew.store(true, Ordering::Relaxed);
        }
        let parameter = PackWeight {
            from: address,
            to: packed,
            row_bytes: self.sent_bytes() as u64,
            cols: cols as u32,
            first_row: rows.start as u32,
            num_rows: rows.len() as u32,
            format: kernels::format(self.to).expect("a format with tiles"),
            from_f32: u32::from(self.is_decoded()),
        };
        pack_weight::pack(self.device, &parameter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pellucid_tensor::quant::{f16_to_f32, f32_to_f16};

    fn is_finite_half(number: f32) -> bool {
        f16_to_f32(f32_to_f16(number)).is_finite()
    }

    #[test]
    fn float4_that_tiles_hold_is_exact_in_f16() {
        let block = |e: u8, pair: u8| [vec![e], vec![pair; 16]].concat();
        for e in 0..=u8::MAX {
            let is_exact = (0..16u8).all(|bits| {
                let mut values = [0.0; 32];
                quant::decode(DType::MXFP4, &block(e, bits), &mut values);
                f16_to_f32(f32_to_f16(values[0])) == values[0]
            });
            assert!(!holds_scales(DType::MXFP4, &block(e, 0x21)) || is_exact, "{e}");
            assert!(holds_scales(DType::MXFP4, &block(e, 0x80)), "zeros need no scale");
        }
        // 2^-23 and 2, the ends of the range.
        let held = [103, 104, 128, 129].map(|e| holds_scales(DType::MXFP4, &block(e, 0x01)));
        assert_eq!(held, [false, true, true, false]);
    }

    #[test]
    fn tiles_hold_scales_up_to_the_largest_half() {
        for (dtype, block_bytes, by, times) in
            [(DType::Q8_0, 34, 262_144.0, 1.0), (DType::Q4_0, 18, 65_536.0, 1.0), (DType::Q4_K, 144, 65_536.0, 63.0)]
        {
            for bits in 0..=u16::MAX {
                let scale = f16_to_f32(f32_to_f16(f16_to_f32(bits) * times));
                let mut blocks = vec![0; 2 * block_bytes];
                blocks[block_bytes..][..2].copy_from_slice(&bits.to_le_bytes());
                assert_eq!(holds_scales(dtype, &blocks), is_finite_half(scale * by), "{dtype:?} {bits:#x}");
            }
        }
    }
}
