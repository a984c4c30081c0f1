//! The memory that keys and values are written to and read from, in blocks of positions.
//!
//! Which block belongs to which sequence is not known here: block tables come with each [`crate::Batch`].

use pellucid_tensor::{Backend, DType, Error, HeadShape, KvLayer, Tensor};

use crate::DecoderConfig;

/// Positions in a block, unless a test wants smaller ones: long enough to be read in one sweep, short enough that the unused half of a
/// sequence's last block is little.
pub const BLOCK_LEN: usize = 32;

/// Keys and values of every layer, `num_blocks` blocks of `block_len` positions.
#[derive(Debug)]
pub struct KvMemory {
    pub layers: Vec<KvLayer>,
    num_blocks: usize,
    block_len: usize,
}

impl KvMemory {
    pub fn new(
        config: &DecoderConfig,
        backend: &dyn Backend,
        num_blocks: usize,
        block_len: usize,
    ) -> Result<Self, Error> {
        let block = config.num_kv_heads * block_len * config.head_size;
        let layers = (0..config.num_layers())
            .map(|_| {
                Ok(KvLayer {
                    keys: backend.zeros(DType::F32, num_blocks, block)?,
                    values: backend.zeros(DType::F32, num_blocks, block)?,
                })
            })
            .collect::<Result<_, Error>>()?;
        Ok(KvMemory { layers, num_blocks, block_len })
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Bytes that the keys and values of one position take, over all layers.
    pub fn bytes_per_position(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.dtype().bytes_for(tensor.cols()).expect("rows are whole blocks");
        self.layers.iter().map(|layer| bytes(&layer.keys) + bytes(&layer.values)).sum::<usize>() / self.block_len
    }

    /// Copies a block's keys and values in every layer: what copy on write asks for before the next step.
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
