//! Weights on their way to the device: raw bytes in pieces. The matrices of products are packed into tiles there, tables stay as they are.
//!
//! Reading a mapped file is work for several threads: each has two pieces of pinned memory, and fills one while the device copies the other.
//! Copies and packing are in the order of the one stream, so whoever uses a weight afterwards finds it whole.
//!
//! A format without kernels of its own is decoded on the host. A table, which is read by rows, becomes F32; a matrix becomes F16 (MXFP4, whose
//! exponents F16 cannot hold, becomes BF16, which is exact for it), and so does one with a scale that its tiles have no room for. The
//! backend keeps count, so that the program can say so.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use pellucid_tensor::{DType, Error, HostWeight, Tensor, quant};

use crate::driver::Device;
use crate::gpu::{Gpu, Purpose};
use crate::kernels::pack::PackWeight;
use crate::kernels::{self, pack};
use crate::memory::DeviceMemory;
use crate::pinned::{Ring, floats_of};

/// Bytes that are uploaded at a time.
const PIECE: usize = 4 << 20;
/// Threads that read, where the machine has as many.
const MAX_READERS: usize = 8;

/// The pinned memory of each reader, kept from weight to weight.
pub(crate) type Staging = Vec<Ring<u8>>;

/// A table or a vector, whose numbers stay exactly what they are.
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
    send(gpu, &Journey { device: &device, weight: &weight, to, packed: None, kept, outgrew })?;
    Ok(Tensor::new(to, rows, cols, Box::new(DeviceMemory::new(buffer))))
}

/// The matrix of a product, which cuBLASLt is to multiply as well where that `is_fast`.
pub(crate) fn matrix(gpu: &mut Gpu, weight: HostWeight, is_fast: bool) -> Result<Tensor, Error> {
    let to = match weight.dtype {
        dtype if kernels::format(dtype).is_some() => dtype,
        DType::MXFP4 => DType::BF16,
        _ => DType::F16,
    };
    let with_plain = is_fast && matches!(weight.dtype, DType::BF16 | DType::F16);
    let (to, tensor) = match store(gpu, &weight, to, with_plain)? {
        Some(tensor) => (to, tensor),
        None => (DType::F16, store(gpu, &weight, DType::F16, false)?.expect("F16 has no scales")),
    };
    if to != weight.dtype {
        gpu.note_conversion(weight.dtype, to);
    }
    Ok(tensor)
}

/// `with_plain` keeps a weight of 16 bits as it is in the file beside its tiles. `None` when the tiles have no room for a scale.
fn store(gpu: &mut Gpu, weight: &HostWeight, to: DType, with_plain: bool) -> Result<Option<Tensor>, Error> {
    let HostWeight { rows, cols, ref bytes, .. } = *weight;
    let device = &gpu.device.clone();
    let size = kernels::packed_bytes(to, rows, cols);
    let size = size.ok_or_else(|| Error::OutOfMemory { device: device.name(), bytes: usize::MAX })?;
    let buffer = device.allocate(size)?;
    let plain = if with_plain { Some(device.allocate(bytes.len())?) } else { None };
    // F32 lies on the device as in the file, and so does what is kept plain.
    let (packed, kept) = match to {
        DType::F32 => (None, Some(buffer.address())),
        _ => (Some(buffer.address()), plain.as_ref().map(|plain| plain.address())),
    };
    let journey = Journey { device, weight, to, packed, kept, outgrew: AtomicBool::new(false) };
    send(gpu, &journey)?;
    if journey.outgrew.into_inner() {
        return Ok(None);
    }
    let mut memory = DeviceMemory::new(buffer);
    memory.plain = plain;
    Ok(Some(Tensor::new(to, rows, cols, Box::new(memory))))
}

/// Sends every piece of a weight, by as many readers as there are pieces for.
fn send(gpu: &mut Gpu, journey: &Journey<'_>) -> Result<(), Error> {
    let HostWeight { dtype, rows, cols, ref bytes } = *journey.weight;
    assert_eq!(Some(bytes.len()), dtype.bytes_for(rows * cols), "a weight's bytes fit its shape");
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let num_readers = journey.num_pieces().min(MAX_READERS).min(cores);
    let piece_bytes = journey.rows_at_once().min(journey.weight.rows.next_multiple_of(16)) * journey.sent_bytes();
    // On the device every reader has a place of its own: between a copy there and its packing come those of others.
    let place_bytes = piece_bytes.next_multiple_of(256);
    let places = gpu.scratch(Purpose::Upload, num_readers * place_bytes)?;
    let place = |reader: usize| places + (reader * place_bytes) as u64;
    let staging = &mut gpu.staging;
    let num_rings = staging.len().max(num_readers);
    staging.resize_with(num_rings, Ring::default);
    let next = &AtomicUsize::new(0);
    let Some((own, others)) = staging[..num_readers].split_first_mut() else { return Ok(()) };
    thread::scope(|scope| {
        let readers: Vec<_> = (others.iter_mut().enumerate())
            .map(|(i, ring)| scope.spawn(move || journey.read_pieces(next, ring, place(i + 1))))
            .collect();
        let own = journey.read_pieces(next, own, place(0));
        let others = readers.into_iter().map(|reader| reader.join().expect("reading does not panic"));
        others.fold(own, Result::and)
    })
}

/// A weight, and where on the device it goes.
struct Journey<'a> {
    device: &'a Arc<Device>,
    weight: &'a HostWeight,
    to: DType,
    /// Where its tiles go.
    packed: Option<u64>,
    /// Where its rows are kept as they are sent.
    kept: Option<u64>,
    /// Its tiles have no room for one of its scales.
    outgrew: AtomicBool,
}

/// Whether the tiles of a format have room for the scales of these blocks, which they hold times a power of two (formats.cu).
fn has_room(dtype: DType, blocks: &[u8]) -> bool {
    // The bits of the largest f16 scale: 65504 / 2^18, 65504 / 2^16, and a 63rd of that.
    let (block_bytes, largest) = match dtype {
        DType::Q8_0 => (34, 0x33ff),
        DType::Q4_0 => (18, 0x3bff),
        DType::Q4_K => (144, 0x240f),
        _ => return true,
    };
    blocks.chunks_exact(block_bytes).all(|block| u16::from_le_bytes([block[0], block[1]]) & 0x7fff <= largest)
}

impl Journey<'_> {
    /// Bytes of a row as it is sent: decoded where there are no tiles for its format.
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

    /// Sends pieces that no other reader has taken, through `ring` and a place of the device.
    fn read_pieces(&self, next: &AtomicUsize, ring: &mut Ring<u8>, place: u64) -> Result<(), Error> {
        loop {
            let first_row = next.fetch_add(1, Ordering::Relaxed) * self.rows_at_once();
            if first_row >= self.weight.rows || self.outgrew.load(Ordering::Relaxed) {
                return Ok(());
            }
            let rows = first_row..(first_row + self.rows_at_once()).min(self.weight.rows);
            self.send_rows(rows, ring, place)?;
        }
    }

    fn send_rows(&self, rows: Range<usize>, ring: &mut Ring<u8>, place: u64) -> Result<(), Error> {
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
        let place = self.kept.map_or(place, |kept| kept + (rows.start * self.sent_bytes()) as u64);
        piece.upload(len, place)?;
        let Some(packed) = self.packed else { return Ok(()) };
        if !self.is_decoded() && !has_room(dtype, from) {
            self.outgrew.store(true, Ordering::Relaxed);
        }
        let parameter = PackWeight {
            from: place,
            to: packed,
            row_bytes: self.sent_bytes() as u64,
            cols: cols as u32,
            first_row: rows.start as u32,
            num_rows: rows.len() as u32,
            format: kernels::format(self.to).expect("a format with tiles"),
            from_f32: u32::from(self.is_decoded()),
        };
        pack::pack(self.device, &parameter)
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
    fn tiles_have_room_up_to_the_largest_half() {
        for (dtype, block_bytes, by, times) in
            [(DType::Q8_0, 34, 262_144.0, 1.0), (DType::Q4_0, 18, 65_536.0, 1.0), (DType::Q4_K, 144, 65_536.0, 63.0)]
        {
            for bits in 0..=u16::MAX {
                let scale = f16_to_f32(f32_to_f16(f16_to_f32(bits) * times));
                let mut blocks = vec![0; 2 * block_bytes];
                blocks[block_bytes..][..2].copy_from_slice(&bits.to_le_bytes());
                assert_eq!(has_room(dtype, &blocks), is_finite_half(scale * by), "{dtype:?} {bits:#x}");
            }
        }
    }
}
