//! The memory that keys and values are written to and read from, in blocks of positions.
//!
//! Which block belongs to which sequence is not known here: block tables come with each [`crate::Batch`].

use pellucid_tensor::{Backend, DType, Error, HeadShape, KvLayer};

use crate::DecoderConfig;

/// Positions in a block.
pub const BLOCK_LEN: usize = 32;

/// Keys and values of every layer, `num_blocks` blocks of [`BLOCK_LEN`] positions.
#[derive(Debug)]
pub struct KvMemory {
    pub(crate) layers: Vec<KvLayer>,
    num_blocks: usize,
}

impl KvMemory {
    pub fn new(config: &DecoderConfig, backend: &dyn Backend, num_blocks: usize) -> Result<Self, Error> {
        let block = config.num_kv_heads * BLOCK_LEN * config.head_size;
        let layers = (0..config.num_layers())
            .map(|_| {
                Ok(KvLayer {
                    keys: backend.zeros(DType::F32, num_blocks, block)?,
                    values: backend.zeros(DType::F32, num_blocks, block)?,
                })
            })
            .collect::<Result<_, Error>>()?;
        Ok(KvMemory { layers, num_blocks })
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn shape(config: &DecoderConfig) -> HeadShape {
        HeadShape {
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_size: config.head_size,
            block_len: BLOCK_LEN,
        }
    }
}
