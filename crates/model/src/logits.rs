//! What a step gives: rows of logits over the vocabulary, or their digests.

use pellucid_tensor::{Backend, DigestTicket, Error as DeviceError, HostFloats, RowDigest, RowQuery, Tensor};

/// Rows of logits in the order in which they were wanted, each whole or in brief. Kept by the caller from step to step, so that a step
/// allocates nothing.
#[derive(Debug)]
pub struct Logits {
    vocab_size: usize,
    /// Room for as many rows as were ever wanted whole in one step.
    values: Box<dyn HostFloats>,
    /// For each row, where it is among the whole ones.
    places: Vec<Option<usize>>,
    /// Of every row, or of none.
    digests: Vec<RowDigest>,
    /// For the digests that are on their way.
    ticket: Option<DigestTicket>,
}

impl Default for Logits {
    fn default() -> Self {
        Logits { vocab_size: 0, values: Box::new(Vec::new()), places: Vec::new(), digests: Vec::new(), ticket: None }
    }
}

impl Logits {
    /// For models: as many whole rows as are wanted, to be filled.
    pub fn resize(&mut self, num_rows: usize, vocab_size: usize) -> &mut [f32] {
        let len = num_rows * vocab_size;
        if self.values.get().len() < len {
            self.values = Box::new(vec![0.0; len]);
        }
        self.shape(vocab_size, (0..num_rows).map(Some));
        &mut self.values.get_mut()[..len]
    }

    /// For models: a digest for each row, and no row.
    pub fn resize_digests(&mut self, num_rows: usize) -> &mut [RowDigest] {
        self.shape(0, (0..num_rows).map(|_| None));
        self.digests.resize_with(self.digests.len().max(num_rows), RowDigest::default);
        &mut self.digests[..num_rows]
    }

    /// For models that stand before others: the digests of all rows, where there are any.
    pub fn digests_mut(&mut self) -> &mut [RowDigest] {
        let num_rows = self.places.len().min(self.digests.len());
        &mut self.digests[..num_rows]
    }

    /// For what a step will give: whole rows, and the digests that do in the place of others, which set out for the host.
    pub(crate) fn await_rows(
        &mut self,
        backend: &dyn Backend,
        queries: &[Option<RowQuery>],
        vocab_size: usize,
    ) -> Result<(), DeviceError> {
        let mut places = 0..;
        self.shape(vocab_size, queries.iter().map(|query| if query.is_none() { places.next() } else { None }));
        let num_whole = places.start;
        if self.values.get().len() < num_whole * vocab_size {
            self.values = backend.host_floats(num_whole * vocab_size)?;
        }
        self.ticket = if num_whole < queries.len() { Some(backend.fetch_digests(queries.len())?) } else { None };
        Ok(())
    }

    /// Brings the rows that are awaited whole from their device, and takes in the digests.
    pub(crate) fn fill(&mut self, backend: &dyn Backend, rows: &mut Tensor) -> Result<(), DeviceError> {
        let (num_rows, vocab_size) = (self.places.len(), self.vocab_size);
        let Some(ticket) = self.ticket.take() else {
            return backend.read_out(rows, &mut *self.values);
        };
        self.digests.resize_with(self.digests.len().max(num_rows), RowDigest::default);
        backend.read_digests(ticket, &mut self.digests[..num_rows])?;
        for (row, place) in self.places.iter().enumerate() {
            if let Some(place) = *place {
                let values = &mut self.values.get_mut()[place * vocab_size..(place + 1) * vocab_size];
                backend.read_row(rows, row, values)?;
            }
        }
        Ok(())
    }

    fn shape(&mut self, vocab_size: usize, places: impl Iterator<Item = Option<usize>>) {
        self.vocab_size = vocab_size;
        self.places.clear();
        self.places.extend(places);
    }

    pub fn num_rows(&self) -> usize {
        self.places.len()
    }

    /// A row that was wanted whole.
    pub fn row(&self, row: usize) -> &[f32] {
        let place = self.places[row].expect("a row that was wanted whole");
        &self.values.get()[place * self.vocab_size..(place + 1) * self.vocab_size]
    }

    /// The digest of a row for which it does.
    pub fn digest(&self, row: usize) -> Option<&RowDigest> {
        self.places[row].is_none().then(|| &self.digests[row])
    }
}
