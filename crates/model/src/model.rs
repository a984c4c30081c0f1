//! The trait that the engine runs: a batch in, logits out.

use pellucid_tensor::TokenSlots;

use crate::{AttentionRows, Batch, DecoderConfig, Devices, Error, KvMemory, Logits, ProbeQuery};

/// Computes logits from token ids. [`Decoder`](crate::Decoder) implements it for every supported family.
pub trait Model: Send {
    /// Returns the configuration.
    fn config(&self) -> &DecoderConfig;

    /// Returns the devices that have the parts of the model; `None` if the caller's backend has them all.
    fn placed_on(&self) -> Option<&Devices> {
        None
    }

    /// Computes the batch's rows, stores their keys and values, and fills `logits` with the wanted rows or their
    /// digests.
    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error>;

    /// Starts a forward pass. With an asynchronous device, returns while it computes; `logits` are complete after
    /// [`Model::finish`]. At most two steps may be launched at a time, and they must be finished in the same order.
    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.forward(batch, kv, logits)
    }

    /// Waits until a launched step is done, also if it has no logits: the engine learns the time of steps from it.
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

    /// Returns the slots of the device for the tokens of [`Model::launch_draft`].
    fn token_slots(&self) -> TokenSlots {
        TokenSlots::default()
    }

    /// Starts a forward pass of which only the tokens are used that the device assumes for the wanted rows, each of
    /// which has a query. The device keeps them in a slot, from which the rows of later steps of every model on it can
    /// take them ([`TokenSource::Kept`](pellucid_tensor::TokenSource::Kept)). Such steps are not finished, and any
    /// number of them may be launched; steps that were launched before must be finished first if their whole rows of
    /// logits are wanted.
    fn launch_draft(&mut self, batch: &Batch, kv: &mut KvMemory, slot: usize) -> Result<(), Error> {
        let _ = (batch, kv, slot);
        unreachable!("`token_slots` says that there are none")
    }

    /// Starts to copy the tokens of the first `num_slots` slots to the host.
    fn fetch_drafts(&mut self, num_slots: usize) -> Result<(), Error> {
        let _ = num_slots;
        unreachable!("`token_slots` says that there are none")
    }

    /// Waits for the tokens that were fetched last, and appends them to `out`: [`TokenSlots::num_rows`] for each slot,
    /// of which those that were kept have a meaning.
    fn read_drafts(&mut self, out: &mut Vec<u32>) -> Result<(), Error> {
        let _ = out;
        unreachable!("`token_slots` says that there are none")
    }

    /// Computes the rows of one sequence again, whose positions are the last that are stored, and reports what is
    /// inside: calls `on_layer` with the logits that follow from each layer at the last row, and returns the attention
    /// weights of all rows. Keys and values get the bits that they had.
    fn probe(
        &mut self,
        batch: &Batch,
        kv: &mut KvMemory,
        query: &ProbeQuery,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Result<Option<AttentionRows>, Error> {
        let _ = (batch, kv, query, on_layer);
        Err(Error::NoProbe)
    }

    /// Computes rows with the layer that predicts the token after the next ([`DecoderConfig::predictor`]), and fills
    /// `logits` with the wanted ones: a row of token t at position p gives the logits of position p + 1. It reads the
    /// row that the step of position p - 1 stored, whether of the whole model or of this layer, and stores its own.
    fn predict(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        let _ = (batch, kv, logits);
        unreachable!("the configuration has no predictor")
    }

    /// Reads a wanted row of logits of the batch that was launched last, for which only the digest was returned.
    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let _ = (row, out);
        unreachable!("a model without digests returns every row")
    }
}
