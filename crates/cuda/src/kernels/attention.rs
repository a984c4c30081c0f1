//! Launches of `attention.cu`.

use pellucid_tensor::{DType, Error, HeadShape};

use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &[
    "store_kv",
    "turn_and_store",
    "attention_merge",
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
];

/// Positions in a tile of keys; tiles begin at multiples of it.
pub(crate) const TILE: usize = 128;
/// The largest head: two dimensions a thread.
const MAX_HEAD_SIZE: usize = 2 * TILE;

/// `StoreKv` of attention.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct StoreParameter {
    pub(crate) keys: u64,
    pub(crate) values: u64,
    pub(crate) key_blocks: u64,
    pub(crate) value_blocks: u64,
    pub(crate) slots: u64,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_size: u32,
    pub(crate) block_len: u32,
    pub(crate) num_blocks: u32,
    pub(crate) storage: u32,
}

/// `TurnAndStore` of attention.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TurnParameter {
    pub(crate) store: StoreParameter,
    pub(crate) queries: u64,
    pub(crate) angles: u64,
    pub(crate) num_rows: u32,
    pub(crate) num_heads: u32,
    pub(crate) pairs: u32,
    pub(crate) interleaved: u32,
}

/// Turns queries and keys, and stores keys and values.
pub(crate) fn turn_and_store(device: &Device, parameter: &TurnParameter) -> Result<(), Error> {
    let TurnParameter { store, num_rows, num_heads, pairs, .. } = parameter;
    let turned = (num_heads + store.num_kv_heads) * (store.head_size - pairs);
    let items = (turned + store.num_kv_heads * store.head_size) as usize * *num_rows as usize;
    device.launch("turn_and_store", Grid::items(items, 256), parameter)
}

/// `Attention` of attention.cu.
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
    pub(crate) scale: f32,
    pub(crate) cap: f32,
}

/// How keys and values are stored: the code of attention.cu, or `None` for a format without a kernel.
pub(crate) fn storage(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::BF16 => Some(2),
        _ => None,
    }
}

/// Why heads of this shape cannot be attended, if so.
pub(crate) fn refusal(shape: HeadShape) -> Option<String> {
    (shape.head_size > MAX_HEAD_SIZE)
        .then(|| format!("heads of {} numbers; {MAX_HEAD_SIZE} is the most", shape.head_size))
}

/// Tiles that blocks of their own are launched for: whole powers of two, so that a recorded step serves many lengths; 0 when one block
/// does all tiles of a row.
pub(crate) fn split_tiles(device: &Device, num_rows: usize, num_kv_heads: usize, longest: usize) -> usize {
    let tiles = longest.div_ceil(TILE);
    let few = num_rows * num_kv_heads < 4 * device.num_multiprocessors() as usize;
    if few && tiles > 1 { tiles.next_power_of_two() } else { 0 }
}

/// Bytes of the tiles' results.
pub(crate) fn partial_bytes(num_rows: usize, shape: HeadShape, tiles: usize) -> usize {
    num_rows * shape.num_heads * tiles * (shape.head_size + 2) * 4
}

pub(crate) fn attend(device: &Device, dtype: DType, parameter: &AttentionParameter) -> Result<(), Error> {
    let group = (parameter.num_heads / parameter.num_kv_heads).max(1);
    // Heads that a block takes at once: the group, or pieces of eight.
    let piece = group.next_power_of_two().min(8);
    let family = 3 + 4 * storage(dtype).expect("checked by the caller") as usize;
    let kernel = KERNELS[family + piece.ilog2() as usize];
    let tiles = if parameter.partial == 0 { 1 } else { parameter.max_tiles };
    let blocks = [parameter.num_rows, parameter.num_kv_heads * group.div_ceil(piece), tiles];
    let shared_bytes = piece * (parameter.head_size.next_multiple_of(4) + TILE as u32) * 4;
    device.launch(kernel, Grid { blocks, threads: TILE as u32, shared_bytes }, parameter)?;
    if parameter.partial == 0 {
        return Ok(());
    }
    let threads = parameter.head_size.next_multiple_of(32).min(128);
    let grid = Grid { blocks: [parameter.num_rows, parameter.num_heads, 1], threads, shared_bytes: 0 };
    device.launch("attention_merge", grid, parameter)
}
