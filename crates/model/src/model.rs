//! The trait that the engine runs: a batch in, logits out.

use crate::{Batch, DecoderConfig, Error, KvMemory, Logits};

/// Computes logits from token ids. [`Decoder`](crate::Decoder) implements it for every supported family.
pub trait Model: Send {
    /// Returns the configuration.
    fn config(&self) -> &DecoderConfig;

    /// Computes the batch's rows, stores their keys and values, and fills `logits` with the wanted rows or their
    /// digests.
    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error>;

    /// Starts a forward pass. With an asynchronous device, returns while it computes; `logits` are complete after
    /// [`Model::finish`]. At most two steps may be launched at a time, and they must be finished in the same order.
    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.forward(batch, kv, logits)
    }

    /// Waits for the logits of a launched step.
    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        let _ = logits;
        Ok(())
    }

    /// Whether [`Model::launch`] of a step of `num_rows` rows returns while the device still computes it.
    fn is_asynchronous(&self, num_rows: usize) -> bool {
        let _ = num_rows;
        false
    }

    /// Whether chunks of a batch may have a [`queries`](crate::Chunk::queries) for digests.
    fn supports_digests(&self) -> bool {
        false
    }

    /// Reads a wanted row of logits of the batch that was launched last, for which only the digest was returned.
    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let _ = (row, out);
        unreachable!("a model without digests returns every row")
    }
}
