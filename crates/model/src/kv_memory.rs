//! The memory of keys and values, in blocks of positions.
//!
//! Which sequence owns a block is not known here: each [`crate::Batch`] contains the block tables of its sequences.

use pellucid_tensor::{Backend, DType, HeadShape, KvLayer, Tensor};

use crate::{DecoderConfig, Error};

/// Positions in a block, except in tests that use smaller ones. Long enough for efficient reads, and short enough that
/// a half-empty last block wastes little memory.
pub const BLOCK_LEN: usize = 32;

/// Keys and values of every layer, `num_blocks` blocks of `block_len` positions.
#[derive(Debug)]
pub struct KvMemory {
    pub layers: Vec<KvLayer>,
    num_blocks: usize,
    block_len: usize,
}

impl KvMemory {
    /// The formats in which keys and values can be stored. `docs/accuracy.md` states the error of each.
    pub const FORMATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];

    /// Allocates the memory, filled with zeros.
    pub fn new(
        config: &DecoderConfig,
        backend: &dyn Backend,
        dtype: DType,
        num_blocks: usize,
        block_len: usize,
    ) -> Result<Self, Error> {
        check_format(config, dtype)?;
        let block = config.num_kv_heads * block_len * config.head_size;
        let layers = (0..config.num_layers())
            .map(|_| {
                Ok(KvLayer {
                    keys: backend.zeros(dtype, num_blocks, block)?,
                    values: backend.zeros(dtype, num_blocks, block)?,
                })
            })
            .collect::<Result<_, Error>>()?;
        Ok(KvMemory { layers, num_blocks, block_len })
    }

    /// Returns the bytes of one block in all layers, keys and values together. Saturates at `usize::MAX`, which fits no
    /// budget.
    pub fn bytes_per_block(config: &DecoderConfig, dtype: DType, block_len: usize) -> Result<usize, Error> {
        check_format(config, dtype)?;
        let head = dtype.bytes_for(config.head_size).unwrap_or(usize::MAX);
        let factors = [2, config.num_layers(), config.num_kv_heads, block_len];
        Ok(factors.into_iter().fold(head, usize::saturating_mul))
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Returns the bytes of one position's keys and values in all layers.
    pub fn bytes_per_position(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.dtype().bytes_for(tensor.cols()).expect("rows are whole blocks");
        self.layers.iter().map(|layer| bytes(&layer.keys) + bytes(&layer.values)).sum::<usize>() / self.block_len
    }

    /// Copies a block's keys and values in every layer, for copy-on-write.
    pub fn copy_block(&mut self, backend: &dyn Backend, from: u32, to: u32) -> Result<(), Error> {
        for layer in &mut self.layers {
            backend.copy_row(from as usize, to as usize, &mut layer.keys)?;
            backend.copy_row(from as usize, to as usize, &mut layer.values)?;
        }
        Ok(())
    }

    pub(crate) fn shape(config: &DecoderConfig, block_len: usize) -> HeadShape {
        HeadShape {
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_size: config.head_size,
            block_len,
        }
    }
}

/// Checks that the format is supported and that a head, which is stored separately, is a whole number of the format's
/// blocks.
fn check_format(config: &DecoderConfig, dtype: DType) -> Result<(), Error> {
    if !KvMemory::FORMATS.contains(&dtype) {
        return Err(Error::NoKvFormat { dtype });
    }
    if dtype.bytes_for(config.head_size).is_none() {
        return Err(Error::KvHeadSize { dtype, multiple: dtype.block_len(), head_size: config.head_size });
    }
    Ok(())
}
