//! Decodes a tile of keys or of values to f32 for all queries that read it. Decoding is exact in every format.

use std::ops::Range;

use pellucid_tensor::DType;
use pellucid_tensor::quant::{bf16_to_f32, f16_to_f32};

use super::kv_layout::{GROUP, KvBytes, KvLayout};
use super::lanes::{LANES, LaneKernel, Lanes};
use super::new_rows::KeyOrValue;
use crate::shared_slice::SharedSlice;

/// Positions in a tile. Tiles begin at multiples of it, whatever the length of a block.
pub(super) const TILE: usize = 64;
const CACHE_LINE: usize = 64;

/// The keys and values of one kv head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct HeadPages<'a> {
    pub(super) layout: KvLayout,
    memory: KvBytes<'a>,
    pub(super) blocks: &'a [u32],
    pub(super) kv_head: usize,
}

/// The positions of one block that belong to a tile.
struct BlockRun<'a> {
    region: &'a [u8],
    /// The first position, counted from the block's start and from the tile's.
    offset: usize,
    at: usize,
    len: usize,
    /// Start of the region that is read after this one, to prefetch it. It is a pointer because the task of the next
    /// span may write there.
    next: Option<*const u8>,
}

impl<'a> HeadPages<'a> {
    /// # Safety
    /// While the value is in use, no other thread writes the regions of `kv_head` in `blocks` that are read through it.
    pub(super) unsafe fn new(layout: KvLayout, memory: KvBytes<'a>, blocks: &'a [u32], kv_head: usize) -> Self {
        HeadPages { layout, memory, blocks, kv_head }
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn memory(&self) -> &KvBytes<'a> {
        &self.memory
    }

    /// The parts of blocks that hold `positions`, which belong to the tile that begins at position `tile`.
    #[inline(always)]
    fn runs<'b>(
        &'b self,
        bytes: &'b SharedSlice<'_, u8>,
        tile: usize,
        positions: Range<usize>,
    ) -> impl Iterator<Item = BlockRun<'b>> {
        let block_len = self.layout.shape.block_len;
        (positions.start / block_len..positions.end.div_ceil(block_len)).map(move |index| {
            // Whole blocks as far as the tile goes, so that vectors are whole; positions beyond `positions` are not
            // used later.
            let first = (index * block_len).max(tile);
            let last = ((index + 1) * block_len).min(tile + TILE);
            BlockRun {
                region: self.region(bytes, index * block_len),
                offset: first - index * block_len,
                at: first - tile,
                len: last - first,
                next: self
                    .blocks
                    .get(index + 1)
                    .map(|&block| bytes.address(self.layout.region(block as usize, self.kv_head))),
            }
        })
    }

    /// The region that holds a position.
    #[inline(always)]
    pub(super) fn region<'b>(&self, bytes: &'b SharedSlice<'_, u8>, position: usize) -> &'b [u8] {
        let block = self.blocks[position / self.layout.shape.block_len] as usize;
        // SAFETY: the caller of `new` guarantees that no other thread writes the region.
        unsafe { bytes.read(self.layout.region(block, self.kv_head), self.layout.region_bytes()) }
    }
}

/// Decodes the keys or the values of a tile: keys as `[head_size][TILE]`, values as `[TILE][stride]`.
pub(super) struct DecodeTile<'a> {
    pub(super) pages: &'a HeadPages<'a>,
    pub(super) kind: KeyOrValue,
    /// First position of the tile.
    pub(super) tile: usize,
    /// Positions of the tile that must be decoded.
    pub(super) positions: Range<usize>,
    pub(super) out: &'a mut [f32],
}

impl LaneKernel for DecodeTile<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.kind {
            KeyOrValue::Key => self.keys(lanes),
            KeyOrValue::Value => self.values(lanes),
        }
    }
}

impl DecodeTile<'_> {
    #[inline(always)]
    fn keys<L: Lanes>(self, lanes: L) {
        let layout = self.pages.layout;
        let KvLayout { dtype, shape, .. } = layout;
        for run in self.pages.runs(&self.pages.memory.keys, self.tile, self.positions) {
            let out = &mut self.out[run.at..];
            if dtype == DType::Q8_0 {
                decode_q8_keys(lanes, &run, layout, out);
                continue;
            }
            let matrix = Matrix {
                bytes: &run.region[run.offset * dtype.block_bytes()..],
                row_bytes: shape.block_len * dtype.block_bytes(),
                rows: shape.head_size,
                cols: run.len,
                next: run.next,
            };
            matrix.decode(lanes, dtype, out, TILE);
        }
    }

    #[inline(always)]
    fn values<L: Lanes>(self, lanes: L) {
        let stride = self.out.len() / TILE;
        let layout = self.pages.layout;
        let row_bytes = layout.head_bytes();
        for run in self.pages.runs(&self.pages.memory.values, self.tile, self.positions) {
            let out = &mut self.out[run.at * stride..];
            if layout.dtype == DType::Q8_0 {
                decode_q8_values(lanes, &run, layout, out, stride);
                continue;
            }
            let bytes = &run.region[run.offset * row_bytes..];
            let cols = layout.shape.head_size;
            let matrix = Matrix { bytes, row_bytes, rows: run.len, cols, next: run.next };
            matrix.decode(lanes, layout.dtype, out, stride);
        }
    }
}

/// Rows of values in a region.
struct Matrix<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    rows: usize,
    cols: usize,
    next: Option<*const u8>,
}

impl Matrix<'_> {
    #[inline(always)]
    fn decode<L: Lanes>(&self, lanes: L, dtype: DType, out: &mut [f32], stride: usize) {
        match dtype {
            DType::F32 => self.decode_floats::<L, KvF32>(lanes, out, stride),
            DType::F16 => self.decode_floats::<L, KvF16>(lanes, out, stride),
            _ => self.decode_floats::<L, KvBf16>(lanes, out, stride),
        }
    }

    #[inline(always)]
    fn decode_floats<L: Lanes, P: FloatFormat>(&self, lanes: L, out: &mut [f32], stride: usize) {
        assert!((self.rows - 1) * self.row_bytes + self.cols * P::BYTES <= self.bytes.len());
        assert!((self.rows - 1) * stride + self.cols <= out.len());
        let vectors = self.cols / LANES;
        let mut done = 0;
        while done < vectors {
            // SAFETY: the assertions say that every row lies within both slices, with `vectors` vectors.
            done += unsafe {
                match vectors - done {
                    8.. => self.decode_vectors::<L, P, 8>(lanes, done * LANES, out, stride),
                    4.. => self.decode_vectors::<L, P, 4>(lanes, done * LANES, out, stride),
                    2.. => self.decode_vectors::<L, P, 2>(lanes, done * LANES, out, stride),
                    _ => self.decode_vectors::<L, P, 1>(lanes, done * LANES, out, stride),
                }
            };
        }
        for row in 0..self.rows {
            for col in vectors * LANES..self.cols {
                out[row * stride + col] = P::decode(&self.bytes[row * self.row_bytes + col * P::BYTES..]);
            }
        }
    }

    /// Decodes `V` vectors of every row, from column `col` on; returns `V`.
    ///
    /// # Safety
    /// The vectors are within every row of `self.bytes` and of `out`.
    #[inline(always)]
    unsafe fn decode_vectors<L: Lanes, P: FloatFormat, const V: usize>(
        &self,
        lanes: L,
        col: usize,
        out: &mut [f32],
        stride: usize,
    ) -> usize {
        let ahead = self.ahead();
        let (from, to) = (self.bytes.as_ptr().wrapping_add(col * P::BYTES), out.as_mut_ptr().wrapping_add(col));
        for row in 0..self.rows {
            // SAFETY: passed on from the caller.
            unsafe {
                let (from, to) = (from.add(row * self.row_bytes), to.add(row * stride));
                for v in 0..V {
                    lanes.store(P::load(lanes, from.add(v * LANES * P::BYTES)), to.add(v * LANES));
                }
                for line in (0..V * LANES * P::BYTES).step_by(CACHE_LINE) {
                    lanes.prefetch(from.wrapping_offset(ahead).wrapping_add(line));
                }
            }
        }
        V
    }

    /// Distance in bytes to the same position of the region that is read next, to prefetch it.
    #[inline(always)]
    fn ahead(&self) -> isize {
        self.next.map_or(0, |next| (next as isize).wrapping_sub(self.bytes.as_ptr() as isize))
    }
}

/// Decodes keys in Q8_0. A vector has one value of sixteen positions, each with its own scale. The product of a signed
/// byte and an f16 is exact in f32: 8 and 11 bits.
#[inline(always)]
fn decode_q8_keys<L: Lanes>(lanes: L, run: &BlockRun<'_>, layout: KvLayout, out: &mut [f32]) {
    let block_len = layout.shape.block_len;
    let whole = run.len / LANES * LANES;
    for group in 0..layout.shape.head_size / GROUP {
        let scales = &run.region[(group * block_len + run.offset) * 2..][..run.len * 2];
        let quants = &run.region[layout.quants() + group * GROUP * block_len + run.offset..];
        let out = &mut out[group * GROUP * TILE..];
        assert!(quants.len() >= (GROUP - 1) * block_len + run.len && out.len() >= (GROUP - 1) * TILE + run.len);
        let ahead = run.next.map_or(0, |next| (next as isize).wrapping_sub(run.region.as_ptr() as isize));
        lanes.prefetch(scales.as_ptr().wrapping_offset(ahead));
        for line in (0..GROUP * block_len).step_by(CACHE_LINE) {
            lanes.prefetch(quants.as_ptr().wrapping_offset(ahead).wrapping_add(line));
        }
        for i in (0..whole).step_by(LANES) {
            // SAFETY: i + 16 positions are within the run; the assertion covers the last row of the group.
            unsafe {
                let scale = lanes.load_f16(scales.as_ptr().add(i * 2));
                for d in 0..GROUP {
                    let from = quants.as_ptr().add(d * block_len + i);
                    lanes.store(lanes.multiply(lanes.load_i8(from), scale), out.as_mut_ptr().add(d * TILE + i));
                }
            }
        }
        for i in whole..run.len {
            let scale = KvF16::decode(&scales[i * 2..]);
            for d in 0..GROUP {
                out[d * TILE + i] = f32::from(quants[d * block_len + i] as i8) * scale;
            }
        }
    }
}

/// Decodes values in Q8_0. A vector has sixteen values of one position and one scale. Scales are decoded sixteen at a
/// time.
#[inline(always)]
fn decode_q8_values<L: Lanes>(lanes: L, run: &BlockRun<'_>, layout: KvLayout, out: &mut [f32], stride: usize) {
    let head_size = layout.shape.head_size;
    let groups = head_size / GROUP;
    let (first, count) = (run.offset * groups, run.len * groups);
    let quants = &run.region[layout.quants() + run.offset * head_size..];
    assert!(quants.len() >= run.len * head_size && out.len() >= (run.len - 1) * stride + head_size);
    let ahead = run.next.map_or(0, |next| (next as isize).wrapping_sub(run.region.as_ptr() as isize));
    for part in (0..count).step_by(LANES) {
        // SAFETY: sixteen scales from here on are within the region, because 32 bytes for each group follow the scales.
        let scales = lanes.to_array(unsafe { lanes.load_f16(run.region[(first + part) * 2..].as_ptr()) });
        for i in part..count.min(part + LANES) {
            let (row, col) = (i / groups, i % groups * GROUP);
            let scale = lanes.splat(scales[i - part]);
            // SAFETY: the assertion covers the last group of the last row.
            unsafe {
                let (from, to) = (quants.as_ptr().add(i * GROUP), out.as_mut_ptr().add(row * stride + col));
                lanes.store(lanes.multiply(lanes.load_i8(from), scale), to);
                lanes.store(lanes.multiply(lanes.load_i8(from.add(LANES)), scale), to.add(LANES));
                lanes.prefetch(from.wrapping_offset(ahead));
            }
        }
        lanes.prefetch(run.region[(first + part) * 2..].as_ptr().wrapping_offset(ahead));
    }
}

/// A format in which each value is stored separately.
trait FloatFormat {
    const BYTES: usize;
    fn decode(bytes: &[u8]) -> f32;
    /// # Safety
    /// Sixteen values of the format can be read from `from`.
    unsafe fn load<L: Lanes>(lanes: L, from: *const u8) -> L::Vector;
}

struct KvF32;
struct KvF16;
struct KvBf16;

impl FloatFormat for KvF32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const u8) -> L::Vector {
        // SAFETY: passed on from the caller; `load` takes any alignment.
        unsafe { lanes.load(from.cast()) }
    }
}

impl FloatFormat for KvF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        f16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const u8) -> L::Vector {
        // SAFETY: passed on from the caller.
        unsafe { lanes.load_f16(from) }
    }
}

impl FloatFormat for KvBf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        bf16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const u8) -> L::Vector {
        // SAFETY: passed on from the caller.
        unsafe { lanes.load_bf16(from) }
    }
}
