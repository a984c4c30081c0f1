//! The result of one rewrite while it is made: the new text, and on request the bytes that each part of it came from.
//!
//! Text that a rewrite does not change is not copied: a copy begins at the first difference.

use std::collections::TryReserveError;
use std::ops::Range;

/// The output of a rewrite of `source`. The first failure to get memory is kept, and nothing is written after it.
pub(super) struct Rewritten<'s> {
    source: &'s str,
    /// Bytes of `source` that were kept from its beginning. Nothing else was written while `changed` is `None`.
    num_kept: usize,
    changed: Option<String>,
    trace: Option<Trace<'s>>,
    result: Result<(), TryReserveError>,
}

/// For each byte of a text, the bytes of the original text that it came from.
pub(super) type Origin = Range<usize>;

struct Trace<'s> {
    before: &'s [Origin],
    after: Vec<Origin>,
}

impl<'s> Rewritten<'s> {
    pub(super) fn new(source: &'s str) -> Rewritten<'s> {
        Rewritten { source, num_kept: 0, changed: None, trace: None, result: Ok(()) }
    }

    /// Returns an output that traces each byte; `origins` has those of `source`.
    pub(super) fn traced(source: &'s str, origins: &'s [Origin]) -> Rewritten<'s> {
        Rewritten { trace: Some(Trace { before: origins, after: Vec::new() }), ..Rewritten::new(source) }
    }

    /// Appends these bytes of the source, unchanged.
    pub(super) fn keep(&mut self, at: Range<usize>) {
        if self.changed.is_none() && at.start == self.num_kept {
            self.num_kept = at.end;
        } else if !at.is_empty() {
            self.append(&self.source[at.clone()]);
        }
        if let Some(trace) = &mut self.trace
            && self.result.is_ok()
        {
            self.result = trace.after.try_reserve(at.len());
            if self.result.is_ok() {
                trace.after.extend_from_slice(&trace.before[at]);
            }
        }
    }

    /// Appends a text that stands for these bytes of the source; for an empty range it is inserted there.
    pub(super) fn put(&mut self, text: &str, from: Range<usize>) {
        if self.changed.is_none() && self.source[from.clone()] == *text {
            return self.keep(from);
        }
        self.append(text);
        if let Some(trace) = &mut self.trace
            && self.result.is_ok()
        {
            self.result = trace.after.try_reserve(text.len());
            if self.result.is_ok() {
                let origin = covered(trace.before, from);
                trace.after.extend(std::iter::repeat_n(origin, text.len()));
            }
        }
    }

    /// Appends a character that stands for these bytes of the source.
    pub(super) fn put_char(&mut self, c: char, from: Range<usize>) {
        self.put(c.encode_utf8(&mut [0; 4]), from);
    }

    fn append(&mut self, text: &str) {
        if self.result.is_err() {
            return;
        }
        let (source, num_kept) = (self.source, self.num_kept);
        let is_first = self.changed.is_none();
        let changed = self.changed.get_or_insert_default();
        // The first reservation has room for a text of the same length; later ones double it.
        let more = if is_first { source.len().max(num_kept + text.len()) } else { text.len() };
        self.result = changed.try_reserve(more);
        if self.result.is_ok() {
            if is_first {
                changed.push_str(&source[..num_kept]);
            }
            changed.push_str(text);
        }
    }

    /// Returns the new text, or `None` if it is the source; and the origins of its bytes if they were traced.
    pub(super) fn finish(mut self) -> Result<(Option<String>, Vec<Origin>), TryReserveError> {
        if self.changed.is_none() && self.num_kept < self.source.len() {
            // The end of the source was left out.
            self.append("");
        }
        self.result?;
        Ok((self.changed, self.trace.map(|trace| trace.after).unwrap_or_default()))
    }
}

/// Returns the original bytes from which the bytes `at` came. For an empty range this is the place between two bytes.
pub(super) fn covered(origins: &[Origin], at: Range<usize>) -> Origin {
    match &origins[at.clone()] {
        [] => {
            let place = at.start.checked_sub(1).map_or(0, |before| origins[before].end);
            place..place
        }
        // Marks may have changed their order, so the first byte is not always the first of the original.
        [first, rest @ ..] => {
            rest.iter().fold(first.clone(), |all, one| all.start.min(one.start)..all.end.max(one.end))
        }
    }
}
