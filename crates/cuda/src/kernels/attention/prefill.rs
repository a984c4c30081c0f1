//! Launches of `prefill.cu`, and the choice of a kernel by format, head and block length.

use std::ops::Range;

use pellucid_tensor::{DType, Error, HeadShape, KvLayer};

use super::store_kv::storage;
use super::{decode, merge_tiles, prefill_wgmma};
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &[
    "attention_f32_1",
    "attention_f32_2",
    "attention_f32_4",
    "attention_f32_8",
    "attention_f16_1",
    "attention_f16_2",
    "attention_f16_4",
    "attention_f16_8",
    "attention_bf16_1",
    "attention_bf16_2",
    "attention_bf16_4",
    "attention_bf16_8",
    "attention_q8_1",
    "attention_q8_2",
    "attention_q8_4",
    "attention_q8_8",
    "flash_f16_64",
    "flash_split_f16_64",
    "flash_f16_80",
    "flash_split_f16_80",
    "flash_f16_96",
    "flash_split_f16_96",
    "flash_f16_128",
    "flash_split_f16_128",
    "flash_bf16_64",
    "flash_split_bf16_64",
    "flash_bf16_80",
    "flash_split_bf16_80",
    "flash_bf16_96",
    "flash_split_bf16_96",
    "flash_bf16_128",
    "flash_split_bf16_128",
    "flash_f16_256",
    "flash_bf16_256",
    "attention_wide_f32_1",
    "attention_wide_f32_2",
    "attention_wide_f32_4",
    "attention_wide_f32_8",
    "attention_wide_f16_1",
    "attention_wide_f16_2",
    "attention_wide_f16_4",
    "attention_wide_f16_8",
    "attention_wide_bf16_1",
    "attention_wide_bf16_2",
    "attention_wide_bf16_4",
    "attention_wide_bf16_8",
    "attention_wide_q8_1",
    "attention_wide_q8_2",
    "attention_wide_q8_4",
    "attention_wide_q8_8",
];

/// Indices in [`KERNELS`] at which families begin. `PLAIN`: by storage and log2 of the heads that a block takes.
/// `CHUNK`: tensor-core kernels for 16 bits, by storage and head size. `CHUNK_LARGE`: those for heads of 256, by
/// storage. `WIDE`: like `PLAIN`, for wide heads and for values that are parts of keys.
const PLAIN: usize = 0;
const CHUNK: usize = 16;
const CHUNK_LARGE: usize = 32;
const WIDE: usize = 34;

/// Positions in a tile of keys of the plain kernel; tiles begin at multiples of it.
const TILE: usize = 128;
/// Positions in a tile of keys on the tensor cores.
pub(crate) const FLASH_TILE: usize = 64;
/// Warps of a block on the tensor cores; fewer if each has a tile and they do not fit.
const FLASH_WARPS: u32 = 4;
/// The largest head of the plain kernel, with two dimensions a thread, and of the wide one, with five.
const MAX_PLAIN_HEAD: usize = 2 * TILE;
const MAX_HEAD_SIZE: usize = 5 * TILE;

/// `Attention` of attention_scores.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AttentionParameter {
    pub(crate) queries: u64,
    pub(crate) key_blocks: u64,
    pub(crate) value_blocks: u64,
    pub(crate) out: u64,
    pub(crate) positions: u64,
    pub(crate) first_blocks: u64,
    pub(crate) block_tables: u64,
    pub(crate) partial: u64,
    pub(crate) num_rows: u32,
    pub(crate) num_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_size: u32,
    pub(crate) block_len: u32,
    pub(crate) window: u32,
    pub(crate) max_tiles: u32,
    pub(crate) tile_len: u32,
    pub(crate) scale: f32,
    pub(crate) cap: f32,
    pub(crate) first_rows: u64,
    pub(crate) end_rows: u64,
    pub(crate) runs: u64,
    pub(crate) num_runs: u32,
    pub(crate) in_panels: u32,
    pub(crate) num_stored: u64,
    pub(crate) sinks: u64,
}

impl AttentionParameter {
    /// The parameter for a range of rows, if tiles are distributed over blocks: the kernel then takes each row as a
    /// sequence.
    pub(crate) fn of_rows(&self, rows: Range<usize>, values: ValuePart) -> AttentionParameter {
        let numbers = |size: u32| 4 * (rows.start * (self.num_heads * size) as usize) as u64;
        let words = 4 * rows.start as u64;
        AttentionParameter {
            queries: self.queries + numbers(self.head_size),
            out: self.out + numbers(values.size),
            positions: self.positions + words,
            first_blocks: self.first_blocks + words,
            num_rows: rows.len() as u32,
            ..*self
        }
    }

    /// Query heads that share a kv head.
    pub(crate) fn group(&self) -> u32 {
        (self.num_heads / self.num_kv_heads).max(1)
    }
}

/// The dimensions of stored values that attention sums: all, except where values are parts of keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValuePart {
    pub(crate) first: u32,
    pub(crate) size: u32,
}

/// `WideAttention` of prefill.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct WideParameter {
    pub(crate) attention: AttentionParameter,
    first_value: u32,
    value_size: u32,
}

impl WideParameter {
    pub(crate) fn new(attention: AttentionParameter, values: ValuePart) -> WideParameter {
        WideParameter { attention, first_value: values.first, value_size: values.size }
    }
}

/// Returns why there is no kernel for heads of this shape, if so.
pub(crate) fn refusal(shape: HeadShape) -> Option<String> {
    (shape.head_size > MAX_HEAD_SIZE)
        .then(|| format!("heads of {} values; the maximum is {MAX_HEAD_SIZE}", shape.head_size))
}

/// The kernels for a format, a head and a block length. They depend on these alone, because they differ in bits and in
/// the layout of blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kernel {
    /// The index of the first of a family of four in [`KERNELS`].
    Plain(usize),
    /// The index of the first of a family of four in [`KERNELS`].
    Wide(usize),
    /// The index of the one without split; the other follows.
    Flash(usize),
    /// For keys and values in panels: the index of the kernel for chunks, and the storage.
    Panels { chunk: usize, storage: usize },
}

impl Kernel {
    /// The kernels for a layer's keys and values.
    pub(crate) fn of_layer(kv: &KvLayer, shape: HeadShape) -> Option<Kernel> {
        let are_in_keys = kv.values.rows() == 0;
        match storage(kv.keys.dtype())? as usize {
            storage if are_in_keys || shape.head_size > MAX_PLAIN_HEAD => Some(Kernel::Wide(WIDE + 4 * storage)),
            _ => Kernel::of(kv.keys.dtype(), shape),
        }
    }

    pub(crate) fn of(dtype: DType, shape: HeadShape) -> Option<Kernel> {
        let storage = storage(dtype)? as usize;
        let plain = Kernel::Plain(PLAIN + 4 * storage);
        let fits_panels =
            shape.head_size.is_multiple_of(64) && shape.block_len >= 8 && shape.block_len.is_power_of_two();
        // Chunks of 8 bits use the kernel of f16, see `expands`.
        let in_half = if storage == 3 { 0 } else { storage.saturating_sub(1) };
        let chunk = match [64, 80, 96, 128].iter().position(|&size| size == shape.head_size) {
            Some(size) => CHUNK + 8 * in_half + 2 * size,
            None if shape.head_size == 256 && fits_panels => CHUNK_LARGE + in_half,
            None => return Some(plain),
        };
        Some(match storage {
            0 => plain,
            _ if fits_panels => Kernel::Panels { chunk, storage },
            3 => plain,
            _ => Kernel::Flash(chunk),
        })
    }

    /// Whether the keys and values of chunks are converted to f16 first.
    pub(crate) fn expands(self) -> bool {
        matches!(self, Kernel::Panels { storage: 3, .. })
    }

    pub(crate) fn in_panels(self) -> u32 {
        u32::from(matches!(self, Kernel::Panels { .. }))
    }

    pub(crate) fn tile_len(self) -> usize {
        match self {
            Kernel::Plain(_) | Kernel::Wide(_) => TILE,
            Kernel::Flash(_) | Kernel::Panels { .. } => FLASH_TILE,
        }
    }

    /// Number of tiles that are distributed over blocks: a power of two, so that a recorded step serves many lengths; 0
    /// if one block does all tiles of a row.
    pub(crate) fn split_tiles(self, device: &Device, work: Work) -> usize {
        let tiles = work.longest.div_ceil(self.tile_len());
        let splits = match self {
            Kernel::Plain(_) | Kernel::Wide(_) => {
                tiles > 1 && work.num_rows * work.num_kv_heads < 4 * device.num_multiprocessors() as usize
            }
            Kernel::Flash(_) => work.row_by_row,
            Kernel::Panels { storage, .. } => work.row_by_row && !decode::takes_all(device, storage, work),
        };
        if splits { tiles.next_power_of_two() } else { 0 }
    }
}

/// The amount of attention in a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) num_rows: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_size: usize,
    pub(crate) longest: usize,
    /// Every row attends as if it were a sequence of its own.
    pub(crate) row_by_row: bool,
}

/// `TILE_EXTRA` of attention_scores.cu.
const TILE_EXTRA: usize = 4;

/// Bytes of the results of the tiles of one row, with `value_size` values for each head.
pub(crate) fn partial_bytes(num_heads: usize, value_size: usize, tiles: usize) -> usize {
    num_heads * tiles * (value_size + TILE_EXTRA) * 4
}

/// Launches attention of chunks, or of single tokens where decode.cu does not serve.
pub(crate) fn attend(
    device: &Device,
    kernel: Kernel,
    parameter: &AttentionParameter,
    values: ValuePart,
) -> Result<(), Error> {
    let group = parameter.group();
    let splits = parameter.partial != 0;
    match kernel {
        Kernel::Plain(family) | Kernel::Wide(family) => {
            // Heads that a block takes: the group, or pieces of eight.
            let piece = group.next_power_of_two().min(8);
            let tiles = if splits { parameter.max_tiles } else { 1 };
            let blocks = [parameter.num_rows, parameter.num_kv_heads * group.div_ceil(piece), tiles];
            let shared_bytes = piece * (parameter.head_size.next_multiple_of(4) + TILE as u32) * 4;
            let name = KERNELS[family + piece.ilog2() as usize];
            let grid = Grid { blocks, threads: TILE as u32, shared_bytes };
            if let Kernel::Wide(_) = kernel {
                let parameter = WideParameter::new(*parameter, values);
                device.launch(name, grid, &parameter)?;
                return if splits { merge_tiles::merge_wide(device, &parameter) } else { Ok(()) };
            }
            device.launch(name, grid, parameter)?;
        }
        Kernel::Panels { storage, .. } if device.has_wgmma && parameter.head_size <= 128 => {
            prefill_wgmma::launch(device, storage, parameter)?;
        }
        Kernel::Flash(chunk) | Kernel::Panels { chunk, .. } => {
            let piece = group.next_power_of_two().min(16);
            // Keys and values of a tile for each warp, or twice for all of them; or once, and the queries of each
            // warp's 16 rows.
            let row_bytes = parameter.head_size * 2 + 16;
            let pair_bytes = 2 * FLASH_TILE as u32 * row_bytes;
            let warps = if splits { FLASH_WARPS.min(device.shared_limit / pair_bytes) } else { FLASH_WARPS };
            let shares = if splits { parameter.max_tiles.div_ceil(warps) } else { 1 };
            let blocks = [parameter.num_rows, parameter.num_kv_heads * group.div_ceil(piece), shares];
            let shared_bytes = match (splits, parameter.head_size) {
                (true, _) => pair_bytes * warps,
                (false, 256) => pair_bytes + warps * 16 * row_bytes,
                (false, _) => pair_bytes * 2,
            };
            let name = KERNELS[chunk + usize::from(splits)];
            device.launch(name, Grid { blocks, threads: 32 * warps, shared_bytes }, parameter)?;
        }
    }
    if splits { merge_tiles::merge(device, parameter) } else { Ok(()) }
}
