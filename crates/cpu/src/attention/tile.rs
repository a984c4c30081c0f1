//! A tile of keys or of values, decoded to f32 for all queries that read it. Decoding is exact in every format.

use pellucid_tensor::DType;
use pellucid_tensor::quant::{bf16_to_f32, f16_to_f32};

use super::lanes::{LANES, Lanes};
use super::pages::{GROUP, Layout};

/// Positions in a tile. Its edges are multiples of it, whatever the length of a block is.
pub(super) const TILE: usize = 64;
const CACHE_LINE: usize = 64;

/// The keys and values of one kv head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Pages<'a> {
    pub(super) layout: Layout,
    pub(super) keys: &'a [u8],
    pub(super) values: &'a [u8],
    pub(super) blocks: &'a [u32],
    pub(super) kv_head: usize,
}

/// Positions of one block that a tile takes.
struct Run<'a> {
    region: &'a [u8],
    /// Of the first position, in the block and in the tile.
    offset: usize,
    at: usize,
    len: usize,
    /// The region that will be read after this one; asking for it early hides the memory's latency.
    next: Option<&'a [u8]>,
}

impl<'a> Pages<'a> {
    /// The parts of blocks that hold the positions `start..end`, which lie in the tile at `tile`.
    #[inline(always)]
    fn runs(&self, bytes: &'a [u8], tile: usize, start: usize, end: usize) -> impl Iterator<Item = Run<'a>> {
        let Pages { layout, blocks, kv_head, .. } = *self;
        let block_len = layout.shape.block_len;
        let region = move |index: usize| {
            blocks.get(index).map(|&block| &bytes[layout.region(block as usize, kv_head)..][..layout.region_bytes()])
        };
        (start / block_len..end.div_ceil(block_len)).map(move |index| {
            // Whole blocks, as far as the tile goes: what lies beyond `end` is not looked at later, and vectors stay whole.
            let first = (index * block_len).max(tile);
            let last = ((index + 1) * block_len).min(tile + TILE);
            Run {
                region: region(index).expect("the block table holds every visible position"),
                offset: first - index * block_len,
                at: first - tile,
                len: last - first,
                next: region(index + 1),
            }
        })
    }

    /// Decodes keys as `[head_size][TILE]`. Only the columns of `start..end` are promised.
    #[inline(always)]
    pub(super) fn decode_keys<L: Lanes>(&self, lanes: L, tile: usize, start: usize, end: usize, out: &mut [f32]) {
        let head_size = self.layout.shape.head_size;
        assert!(out.len() >= head_size * TILE);
        for run in self.runs(self.keys, tile, start, end) {
            match self.layout.dtype {
                DType::F32 => decode_key_run::<L, F32>(lanes, &run, self.layout, out),
                DType::F16 => decode_key_run::<L, F16>(lanes, &run, self.layout, out),
                DType::BF16 => decode_key_run::<L, BF16>(lanes, &run, self.layout, out),
                _ => decode_key_run_q8(lanes, &run, self.layout, out),
            }
        }
    }

    /// Decodes values as `[TILE][stride]`. Only the rows of `start..end` and the columns below `head_size` are promised.
    #[inline(always)]
    pub(super) fn decode_values<L: Lanes>(&self, lanes: L, tile: usize, start: usize, end: usize, out: &mut [f32]) {
        let stride = out.len() / TILE;
        let (head_size, head_bytes) = (self.layout.shape.head_size, self.layout.head_bytes());
        for run in self.runs(self.values, tile, start, end) {
            for i in 0..run.len {
                let row = &run.region[(run.offset + i) * head_bytes..][..head_bytes];
                let out = &mut out[(run.at + i) * stride..][..head_size];
                match self.layout.dtype {
                    DType::F32 => decode_row::<L, F32>(lanes, row, out),
                    DType::F16 => decode_row::<L, F16>(lanes, row, out),
                    DType::BF16 => decode_row::<L, BF16>(lanes, row, out),
                    _ => decode_row_q8(lanes, row, out),
                }
                prefetch_beside(lanes, &run, (run.offset + i) * head_bytes, head_bytes);
            }
        }
    }
}

/// Asks for the part of the next region that lies where `from..from + len` lies in this one.
#[inline(always)]
fn prefetch_beside<L: Lanes>(lanes: L, run: &Run<'_>, from: usize, len: usize) {
    if let Some(next) = run.next {
        for line in (from..from + len).step_by(CACHE_LINE) {
            lanes.prefetch(next[line..].as_ptr());
        }
    }
}

/// A format whose numbers stand by themselves.
trait Plain {
    const BYTES: usize;
    fn decode(bytes: &[u8]) -> f32;
    /// # Safety
    /// Sixteen numbers of the format can be read from `from`.
    unsafe fn load<L: Lanes>(lanes: L, from: *const u8) -> L::Vector;
}

struct F32;
struct F16;
struct BF16;

impl Plain for F32 {
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

impl Plain for F16 {
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

impl Plain for BF16 {
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

/// A contiguous stretch of a plain format.
#[inline(always)]
fn decode_row<L: Lanes, P: Plain>(lanes: L, row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len(), out.len() * P::BYTES);
    let whole = out.len() / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: i + 16 numbers lie within both slices.
        unsafe { lanes.store(P::load(lanes, row.as_ptr().add(i * P::BYTES)), out.as_mut_ptr().add(i)) };
    }
    for i in whole..out.len() {
        out[i] = P::decode(&row[i * P::BYTES..]);
    }
}

#[inline(always)]
fn decode_key_run<L: Lanes, P: Plain>(lanes: L, run: &Run<'_>, layout: Layout, out: &mut [f32]) {
    for d in 0..layout.shape.head_size {
        let from = (d * layout.shape.block_len + run.offset) * P::BYTES;
        let row = &run.region[from..from + run.len * P::BYTES];
        decode_row::<L, P>(lanes, row, &mut out[d * TILE + run.at..][..run.len]);
        prefetch_beside(lanes, run, from, run.len * P::BYTES);
    }
}

/// The product of a signed byte and a half is exact in f32: 8 and 11 bits.
#[inline(always)]
fn decode_key_run_q8<L: Lanes>(lanes: L, run: &Run<'_>, layout: Layout, out: &mut [f32]) {
    let block_len = layout.shape.block_len;
    let whole = run.len / LANES * LANES;
    for group in 0..layout.shape.head_size / GROUP {
        let from = (group * block_len + run.offset) * 2;
        let scales = &run.region[from..from + run.len * 2];
        let quants = &run.region[layout.quants() + group * GROUP * block_len + run.offset..];
        let out = &mut out[group * GROUP * TILE + run.at..];
        assert!(quants.len() >= (GROUP - 1) * block_len + run.len && out.len() >= (GROUP - 1) * TILE + run.len);
        for i in (0..whole).step_by(LANES) {
            // SAFETY: i + 16 positions lie within the run; the assertion covers the last row of the group.
            unsafe {
                let scale = lanes.load_f16(scales.as_ptr().add(i * 2));
                for d in 0..GROUP {
                    let quant = lanes.load_i8(quants.as_ptr().add(d * block_len + i));
                    lanes.store(lanes.multiply(quant, scale), out.as_mut_ptr().add(d * TILE + i));
                }
            }
        }
        for i in whole..run.len {
            let scale = F16::decode(&scales[i * 2..]);
            for d in 0..GROUP {
                out[d * TILE + i] = f32::from(quants[d * block_len + i] as i8) * scale;
            }
        }
        prefetch_beside(lanes, run, from, run.len * 2);
        let rows = layout.quants() + group * GROUP * block_len;
        prefetch_beside(lanes, run, rows, GROUP * block_len);
    }
}

/// Blocks of 32 with their scale in front.
#[inline(always)]
fn decode_row_q8<L: Lanes>(lanes: L, row: &[u8], out: &mut [f32]) {
    const BYTES: usize = DType::Q8_0.block_bytes();
    assert_eq!(row.len() / BYTES, out.len() / GROUP);
    for (block, out) in row.chunks_exact(BYTES).zip(out.chunks_exact_mut(GROUP)) {
        let scale = lanes.splat(F16::decode(block));
        for i in [0, LANES] {
            // SAFETY: a block is two bytes and 32 more, and `out` has 32 numbers.
            unsafe {
                let quant = lanes.load_i8(block.as_ptr().add(2 + i));
                lanes.store(lanes.multiply(quant, scale), out.as_mut_ptr().add(i));
            }
        }
    }
}
