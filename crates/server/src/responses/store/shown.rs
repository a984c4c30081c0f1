//! Writes the JSON of a stored response from the texts that the store has.

use std::sync::Arc;

use super::StoredResponse;
use crate::reply::parts::JsonParts;

impl StoredResponse {
    /// Adds the JSON of the response to `parts`, with what `write_items` writes between the brackets of `output`.
    pub(in crate::responses) fn write_around(
        self: &Arc<Self>,
        parts: &mut JsonParts,
        write_items: impl FnOnce(&mut JsonParts),
    ) {
        parts.raw(self.shown(StoredResponse::before), 0);
        write_items(parts);
        parts.raw(self.shown(StoredResponse::after), 0);
    }

    /// Adds the JSON of the response to `parts`.
    pub(in crate::responses) fn write(self: &Arc<Self>, parts: &mut JsonParts) {
        self.write_around(parts, |parts| {
            for index in 0..self.num_output() {
                parts.literal(if index > 0 { "," } else { "" });
                parts.raw(self.shown(move |response| response.output(index)), 0);
            }
        });
    }

    /// Returns one of the response's texts, which keeps the response in memory.
    fn shown<F: Fn(&StoredResponse) -> &str + Send + 'static>(self: &Arc<Self>, text: F) -> Shown<F> {
        Shown { response: self.clone(), text }
    }
}

/// A text of a stored response.
struct Shown<F> {
    response: Arc<StoredResponse>,
    text: F,
}

impl<F: Fn(&StoredResponse) -> &str> AsRef<str> for Shown<F> {
    fn as_ref(&self) -> &str {
        (self.text)(&self.response)
    }
}
