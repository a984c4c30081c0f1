//! The output of a step: rows of logits over the vocabulary, or their digests.

use pellucid_tensor::{Backend, DigestTicket, Error as DeviceError, HostFloats, RowDigest, RowQuery, Tensor};

/// The wanted rows of logits, in the order of the batch, each whole or as a digest. The caller keeps it from step to
/// step, so that a step allocates nothing.
#[derive(Debug)]
pub struct Logits {
    vocab_size: usize,
    /// Memory for the largest number of whole rows that a step has had.
    values: Box<dyn HostFloats>,
    /// For each row, its index among the whole rows; `None` if there is only a digest.
    whole_rows: Vec<Option<usize>>,
    /// Digests of all rows, or of none.
    digests: Vec<RowDigest>,
    /// The transfer of the digests, while it is in progress.
    ticket: Option<DigestTicket>,
}

impl Default for Logits {
    fn default() -> Self {
        Logits {
            vocab_size: 0,
            values: Box::new(Vec::new()),
            whole_rows: Vec::new(),
            digests: Vec::new(),
            ticket: None,
        }
    }
}

impl Logits {
    /// For models: sets the number of whole rows, and returns their memory to be filled.
    pub fn resize(&mut self, num_rows: usize, vocab_size: usize) -> &mut [f32] {
        let len = num_rows * vocab_size;
        if self.values.get().len() < len {
            self.values = Box::new(vec![0.0; len]);
        }
        self.set_rows(vocab_size, (0..num_rows).map(Some));
        &mut self.values.get_mut()[..len]
    }

    /// For models: sets the number of rows that are digests, and returns the digests to be filled.
    pub fn resize_digests(&mut self, num_rows: usize) -> &mut [RowDigest] {
        self.set_rows(0, (0..num_rows).map(|_| None));
        self.digests.resize_with(self.digests.len().max(num_rows), RowDigest::default);
        &mut self.digests[..num_rows]
    }

    /// For models that wrap others: returns the digests of all rows, if there are any.
    pub fn digests_mut(&mut self) -> &mut [RowDigest] {
        let num_rows = self.whole_rows.len().min(self.digests.len());
        &mut self.digests[..num_rows]
    }

    /// Prepares for the output of a launched step: memory for whole rows, and the transfer of digests to the host.
    pub(crate) fn await_rows(
        &mut self,
        backend: &dyn Backend,
        queries: &[Option<RowQuery>],
        vocab_size: usize,
    ) -> Result<(), DeviceError> {
        let mut indices = 0..;
        self.set_rows(vocab_size, queries.iter().map(|query| if query.is_none() { indices.next() } else { None }));
        let num_whole = indices.start;
        if self.values.get().len() < num_whole * vocab_size {
            self.values = backend.host_floats(num_whole * vocab_size)?;
        }
        self.ticket = if num_whole < queries.len() { Some(backend.fetch_digests(queries.len())?) } else { None };
        Ok(())
    }

    /// Waits for a launched step, and reads its whole rows and digests from the device.
    pub(crate) fn fill(&mut self, backend: &dyn Backend, rows: &mut Tensor) -> Result<(), DeviceError> {
        let (num_rows, vocab_size) = (self.whole_rows.len(), self.vocab_size);
        // Nothing is read that would wait. Without this, a chunk of a prompt would seem to take no time, and chunks
        // would pile up on the device.
        if num_rows == 0 {
            return backend.wait();
        }
        let Some(ticket) = self.ticket.take() else {
            return backend.read_out(rows, &mut *self.values);
        };
        self.digests.resize_with(self.digests.len().max(num_rows), RowDigest::default);
        backend.read_digests(ticket, &mut self.digests[..num_rows])?;
        for (row, index) in self.whole_rows.iter().enumerate() {
            if let Some(index) = *index {
                let values = &mut self.values.get_mut()[index * vocab_size..(index + 1) * vocab_size];
                backend.read_row(rows, row, values)?;
            }
        }
        Ok(())
    }

    fn set_rows(&mut self, vocab_size: usize, whole_rows: impl Iterator<Item = Option<usize>>) {
        self.vocab_size = vocab_size;
        self.whole_rows.clear();
        self.whole_rows.extend(whole_rows);
    }

    pub fn num_rows(&self) -> usize {
        self.whole_rows.len()
    }

    /// Returns a row that was requested whole.
    pub fn row(&self, row: usize) -> &[f32] {
        let index = self.whole_rows[row].expect("a row that was requested whole");
        &self.values.get()[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// Returns the digest of a row; `None` if the row is whole.
    pub fn digest(&self, row: usize) -> Option<&RowDigest> {
        self.whole_rows[row].is_none().then(|| &self.digests[row])
    }
}
