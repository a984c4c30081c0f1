//! Kernels of attention and of the memory of keys and values; [`prefill::Kernel`] chooses among them.

pub(crate) mod decode;
pub(crate) mod merge_tiles;
pub(crate) mod prefill;
pub(crate) mod prefill_wgmma;
pub(crate) mod store_kv;
