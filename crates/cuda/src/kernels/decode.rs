//! Launches of `decode.cu`: attention of tokens that come one by one.

use pellucid_tensor::Error;

use super::attention::{self, AttentionParameter, FLASH_TILE, Work};
use super::store::{Q8, TurnParameter};
use crate::driver::{Device, Grid};

macro_rules! decode_kernels {
    ($kind:literal: $($storage:literal),*) => {
        [$([
            concat!("decode_", $kind, "_", $storage, "_64"),
            concat!("decode_", $kind, "_", $storage, "_128"),
            concat!("decode_", $kind, "_", $storage, "_256"),
        ]),*]
    };
}

/// By storage (from F16 on) and head.
const TILE: [[&str; 3]; 3] = decode_kernels!("tile": "f16", "bf16", "q8");
const ALL: [[&str; 3]; 2] = decode_kernels!("all": "f16", "bf16");

pub(crate) const KERNELS: &[&str] = &{
    let mut names = [""; 15];
    let mut i = 0;
    while i < names.len() {
        names[i] = if i < 9 { TILE[i / 3][i % 3] } else { ALL[i / 3 - 3][i % 3] };
        i += 1;
    }
    names
};

const THREADS: u32 = 128;
/// Tiles of the longest context up to which a block may take all of a row: one long row among short ones would keep the others waiting.
const MAX_TAKEN: usize = 64;

/// Tiles up to which the last block of a row merges them; more are shared out over blocks of their own.
const MAX_MERGED: u32 = 16;

/// `OneToken` of decode.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct OneToken {
    attention: AttentionParameter,
    keys: u64,
    values: u64,
    angles: u64,
    slots: u64,
    arrived: u64,
    pairs: u32,
    interleaved: u32,
    num_blocks: u32,
}

/// Whether a block takes all tiles of a row: where there are rows enough for all multiprocessors.
pub(crate) fn takes_all(device: &Device, storage: usize, work: Work) -> bool {
    storage as u32 != Q8
        && work.longest.div_ceil(FLASH_TILE) <= MAX_TAKEN
        && work.num_rows * work.num_kv_heads >= 3 * device.num_multiprocessors() as usize
}

/// Whether the kernel turns and stores what a `turn_and_store` before it would have.
pub(crate) fn takes_turn(attention: &AttentionParameter, turn: &TurnParameter) -> bool {
    let store = &turn.store;
    (turn.queries, store.key_blocks, store.value_blocks)
        == (attention.queries, attention.key_blocks, attention.value_blocks)
        && (turn.num_rows, store.num_kv_heads, store.head_size, store.block_len)
            == (attention.num_rows, attention.num_kv_heads, attention.head_size, attention.block_len)
        && store.storage != Q8
}

/// Counters that the tiles of a step need.
pub(crate) fn num_counters(attention: &AttentionParameter) -> usize {
    (attention.num_rows * blocks_of_row(attention)) as usize
}

fn blocks_of_row(attention: &AttentionParameter) -> u32 {
    let group = attention.group();
    attention.num_kv_heads * group.div_ceil(group.next_power_of_two().min(16))
}

/// `arrived` has zeros for every counter.
pub(crate) fn attend(
    device: &Device,
    storage: usize,
    attention: &AttentionParameter,
    turn: Option<&TurnParameter>,
    arrived: u64,
) -> Result<(), Error> {
    let splits = attention.partial != 0;
    let stage_bytes = FLASH_TILE as u32 * attention.head_size * 2;
    let shared_bytes = stage_bytes * if splits { 2 } else { 3 };
    let merges = splits && attention.max_tiles <= MAX_MERGED;
    let mut parameter = OneToken {
        attention: *attention,
        keys: 0,
        values: 0,
        angles: 0,
        slots: 0,
        arrived: if merges { arrived } else { 0 },
        pairs: 0,
        interleaved: 0,
        num_blocks: 0,
    };
    if let Some(turn) = turn {
        let store = &turn.store;
        (parameter.keys, parameter.values, parameter.slots) = (store.keys, store.values, store.slots);
        (parameter.angles, parameter.pairs, parameter.interleaved) = (turn.angles, turn.pairs, turn.interleaved);
        parameter.num_blocks = store.num_blocks;
    }
    let size = attention.head_size.ilog2() as usize - 6;
    let name = if splits { TILE[storage - 1][size] } else { ALL[storage - 1][size] };
    let blocks = [attention.num_rows, blocks_of_row(attention), attention.max_tiles.max(1)];
    device.launch(name, Grid { blocks, threads: THREADS, shared_bytes }, &parameter)?;
    if splits && !merges { attention::merge(device, attention) } else { Ok(()) }
}
