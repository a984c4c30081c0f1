//! Launches of `decode.cu`: attention of single tokens.

use pellucid_tensor::Error;

use super::merge_tiles;
use super::prefill::{AttentionParameter, FLASH_TILE, Work};
use super::store_kv::{Q8, RotateParameter};
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

/// Kernel names by storage, from F16 on, and by head size.
const TILE: [[&str; 3]; 3] = decode_kernels!("tile": "f16", "bf16", "q8");
const SHARE: [[&str; 3]; 3] = decode_kernels!("share": "f16", "bf16", "q8");
const ALL: [[&str; 3]; 2] = decode_kernels!("all": "f16", "bf16");
/// Kernel names by storage and head size; there are none for the largest head size.
const TEAMS: [[&str; 2]; 3] = [
    ["decode_teams_f16_64", "decode_teams_f16_128"],
    ["decode_teams_bf16_64", "decode_teams_bf16_128"],
    ["decode_teams_q8_64", "decode_teams_q8_128"],
];

pub(crate) const KERNELS: &[&str] = &{
    let mut names = [""; 30];
    let mut i = 0;
    while i < names.len() {
        names[i] = match i {
            0..9 => TILE[i / 3][i % 3],
            9..18 => SHARE[i / 3 - 3][i % 3],
            18..24 => ALL[i / 3 - 6][i % 3],
            _ => TEAMS[i / 2 - 12][i % 2],
        };
        i += 1;
    }
    names
};

const THREADS: u32 = 128;
/// Maximum tiles of a row that the four teams of a block take: one each. (With two each, a block for every tile was
/// faster.)
const TEAMS_TILES: u32 = 4;
/// Maximum rows of a step in which every tile may have its own block.
const MAX_ROWS_OF_TILES: u32 = 2;
/// Blocks of one team that run at once on a multiprocessor.
const TEAM_BLOCKS: u32 = 4;
/// Shared memory of a block besides its stages is less than this; of a block of four teams, less than
/// `TEAMS_OTHER_BYTES`.
const OTHER_BYTES: u32 = 12 << 10;
const TEAMS_OTHER_BYTES: u32 = 17 << 10;
/// Maximum tiles of the longest context with which a block may take a whole row: the others would wait for one long
/// row.
const MAX_TAKEN: usize = 64;

/// Maximum tiles that the last block of a row merges; more are merged by a separate kernel.
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
    group: u32,
    piece_len: u32,
    num_pieces: u32,
}

/// Shared memory of four teams: two stages each, and their tiles (`TeamTiles` in decode.cu).
fn teams_bytes(head_size: u32) -> u32 {
    4 * 2 * stage_bytes(head_size) + 4 * 16 * (head_size + 8 + 2) * 4
}

/// Whether a block of four teams takes all tiles of a row: if there are few, and a multiprocessor for each block.
fn takes_teams(device: &Device, attention: &AttentionParameter) -> bool {
    attention.max_tiles <= TEAMS_TILES
        && attention.head_size <= 128
        && num_pieces(attention) <= device.num_multiprocessors()
        && teams_bytes(attention.head_size) + TEAMS_OTHER_BYTES <= device.shared_limit
}

/// Bytes of the keys or values of a tile.
fn stage_bytes(head_size: u32) -> u32 {
    FLASH_TILE as u32 * head_size * 2
}

/// Whether three stages fit into shared memory: with them a block loads a tile while it works on another.
fn fits_three_stages(device: &Device, head_size: u32) -> bool {
    3 * stage_bytes(head_size) + OTHER_BYTES <= device.shared_limit
}

/// Whether a block takes all tiles of a row: if there are enough rows for all multiprocessors.
pub(crate) fn takes_all(device: &Device, storage: usize, work: Work) -> bool {
    storage as u32 != Q8
        && fits_three_stages(device, work.head_size as u32)
        && work.longest.div_ceil(FLASH_TILE) <= MAX_TAKEN
        && work.num_rows * work.num_kv_heads >= 3 * device.num_multiprocessors() as usize
}

/// Counters that the tiles of a step need.
pub(crate) fn num_counters(attention: &AttentionParameter) -> usize {
    num_pieces(attention) as usize
}

/// Number of blocks if each takes all tiles of its row.
fn num_pieces(attention: &AttentionParameter) -> u32 {
    attention.num_rows * blocks_of_row(attention)
}

fn blocks_of_row(attention: &AttentionParameter) -> u32 {
    attention.num_kv_heads * attention.group().div_ceil(piece_len(attention))
}

/// Maximum query heads that a block takes: a divisor of 16.
fn piece_len(attention: &AttentionParameter) -> u32 {
    attention.group().next_power_of_two().min(16)
}

/// Whether every tile has a block: with few rows, if all blocks run at once.
fn tiles_run_at_once(device: &Device, attention: &AttentionParameter) -> bool {
    attention.num_rows <= MAX_ROWS_OF_TILES
        && num_pieces(attention) * attention.max_tiles <= TEAM_BLOCKS * device.num_multiprocessors()
}

/// Blocks over which the tiles of a row are distributed, so that all run at once.
fn num_shares(device: &Device, attention: &AttentionParameter) -> u32 {
    (TEAM_BLOCKS * device.num_multiprocessors() / num_pieces(attention)).clamp(1, attention.max_tiles)
}

/// Launches attention of single tokens, after rotating and storing them as `rotate` says. `arrived` has a zero for
/// every counter.
pub(crate) fn attend(
    device: &Device,
    storage: usize,
    attention: &AttentionParameter,
    rotate: Option<&RotateParameter>,
    arrived: u64,
) -> Result<(), Error> {
    let splits = attention.partial != 0;
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
        group: attention.group(),
        piece_len: piece_len(attention),
        num_pieces: attention.group().div_ceil(piece_len(attention)),
    };
    if let Some(rotate) = rotate {
        let store = &rotate.store;
        (parameter.keys, parameter.values, parameter.slots) = (store.keys, store.values, store.slots);
        (parameter.angles, parameter.pairs, parameter.interleaved) = (rotate.angles, rotate.pairs, rotate.interleaved);
        parameter.num_blocks = store.num_blocks;
    }
    let size = attention.head_size.ilog2() as usize - 6;
    if splits && takes_teams(device, attention) {
        let blocks = [attention.num_rows, blocks_of_row(attention), 1];
        let grid = Grid { blocks, threads: 4 * THREADS, shared_bytes: teams_bytes(attention.head_size) };
        return device.launch(TEAMS[storage - 1][size], grid, &parameter);
    }
    let (kernels, shares, stages) = match splits {
        true if !tiles_run_at_once(device, attention) && fits_three_stages(device, attention.head_size) => {
            (&SHARE[..], num_shares(device, attention), 3)
        }
        true => (&TILE[..], attention.max_tiles, 2),
        false => (&ALL[..], 1, 3),
    };
    // If there is a multiprocessor for each block, blocks are kept apart by requesting half of the shared memory:
    // otherwise the first free multiprocessor takes several.
    let least_bytes =
        if num_pieces(attention) * shares > device.num_multiprocessors() { 0 } else { device.shared_limit / 2 };
    let shared_bytes = (stages * stage_bytes(attention.head_size)).max(least_bytes);
    let blocks = [attention.num_rows, blocks_of_row(attention), shares];
    device.launch(kernels[storage - 1][size], Grid { blocks, threads: THREADS, shared_bytes }, &parameter)?;
    if splits && !merges { merge_tiles::merge_parts(device, attention) } else { Ok(()) }
}
