//! Launches of `store_kv.cu`: stores keys and values into their blocks.

use std::ops::Range;

use pellucid_tensor::{DType, Error};

use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &["store_kv", "store_q8", "expand_q8", "rotate_and_store"];

/// `STORE_Q8` of attention_scores.cu.
pub(crate) const Q8: u32 = 3;

/// The storage code of attention_scores.cu for keys and values of a format; `None` if there is no kernel for it.
pub(crate) fn storage(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::BF16 => Some(2),
        DType::Q8_0 => Some(3),
        _ => None,
    }
}

/// `StoreKv` of store_kv.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct StoreParameter {
    pub(crate) keys: u64,
    /// 0 if keys alone are stored.
    pub(crate) values: u64,
    pub(crate) key_blocks: u64,
    pub(crate) value_blocks: u64,
    pub(crate) slots: u64,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_size: u32,
    pub(crate) block_len: u32,
    pub(crate) num_blocks: u32,
    pub(crate) storage: u32,
    /// Whether keys and values lie in panels.
    pub(crate) in_panels: u32,
}

/// Stores the keys and values of `num_rows` rows.
pub(crate) fn store(device: &Device, num_rows: usize, parameter: &StoreParameter) -> Result<(), Error> {
    let name = if parameter.storage == Q8 { "store_q8" } else { "store_kv" };
    let threads =
        crate::kernels::rows::elementwise::row_threads((parameter.num_kv_heads * parameter.head_size) as usize)
            .min(256);
    device.launch(name, Grid::linear(num_rows as u32, threads), parameter)
}

/// `RotateAndStore` of store_kv.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RotateParameter {
    pub(crate) store: StoreParameter,
    pub(crate) queries: u64,
    pub(crate) angles: u64,
    pub(crate) num_rows: u32,
    pub(crate) num_heads: u32,
    pub(crate) pairs: u32,
    pub(crate) interleaved: u32,
}

impl RotateParameter {
    /// The parameter for a range of rows, of which values are stored too.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> RotateParameter {
        let StoreParameter { num_kv_heads, head_size, .. } = self.store;
        let numbers = |cols: u32| 4 * (rows.start * cols as usize) as u64;
        RotateParameter {
            store: StoreParameter {
                keys: self.store.keys + numbers(num_kv_heads * head_size),
                values: self.store.values + numbers(num_kv_heads * head_size),
                slots: self.store.slots + numbers(1),
                ..self.store
            },
            queries: self.queries + numbers(self.num_heads * head_size),
            angles: self.angles + numbers(2 * self.pairs),
            num_rows: rows.len() as u32,
            ..*self
        }
    }
}

/// Rotates queries and keys, and stores keys and values.
pub(crate) fn rotate_and_store(device: &Device, parameter: &RotateParameter) -> Result<(), Error> {
    let RotateParameter { store, num_rows, num_heads, pairs, .. } = parameter;
    let rotated = (num_heads + store.num_kv_heads) * (store.head_size - pairs);
    let values = if store.values == 0 { 0 } else { store.num_kv_heads * store.head_size };
    let items = (rotated + values) as usize * *num_rows as usize;
    device.launch("rotate_and_store", Grid::items(items, 256), parameter)
}

/// `ExpandKv` of store_kv.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ExpandParameter {
    pub(crate) key_blocks: u64,
    pub(crate) value_blocks: u64,
    pub(crate) block_tables: u64,
    pub(crate) keys: u64,
    pub(crate) values: u64,
    pub(crate) own_tables: u64,
    pub(crate) num_stored: u64,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_size: u32,
    pub(crate) block_len: u32,
}

/// Converts `num_entries` blocks from 8 bits to f16.
pub(crate) fn expand(device: &Device, num_entries: usize, parameter: &ExpandParameter) -> Result<(), Error> {
    let blocks = [num_entries as u32, parameter.num_kv_heads, 2];
    device.launch("expand_q8", Grid { blocks, threads: 128, shared_bytes: 0 }, parameter)
}
