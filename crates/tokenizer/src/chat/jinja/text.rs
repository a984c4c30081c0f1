//! Text with the origin of every character: written by the template (trusted) or taken from the request (untrusted).
//!
//! A [`Text`] is a range of a shared buffer, so cutting, splitting and stripping copy nothing. Text is immutable, but
//! joining appends to the left text's buffer if that text ends where the buffer ends: a template that builds a string
//! piece by piece takes time proportional to its length.

use std::cell::{Ref, RefCell};
use std::ops::Range;
use std::rc::Rc;

use super::budget::{Budget, Held, reserve_exact};
use super::failure::{Failure, Outcome};

/// Consecutive bytes of one origin, up to `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    end: u32,
    trusted: bool,
}

struct Buffer {
    text: String,
    /// Cover the text; adjacent runs differ in origin.
    runs: Vec<Run>,
    held: Held,
}

impl Buffer {
    /// Appends text after charging for it.
    fn push(&mut self, text: &str, trusted: bool, budget: &Budget<'_>) -> Outcome<()> {
        if text.is_empty() {
            return Ok(());
        }
        budget.charge_bytes(text.len())?;
        let len = self.text.len() + text.len();
        let end = u32::try_from(len).map_err(|_| Failure::error("a string is longer than 4 GiB"))?;
        if len > self.text.capacity() {
            let capacity = len.max(self.text.capacity() * 2);
            self.hold(capacity, self.runs.capacity())?;
            let more = capacity - self.text.len();
            self.text.try_reserve_exact(more).map_err(|_| Failure::out_of_memory(more))?;
        }
        self.text.push_str(text);
        match self.runs.last_mut() {
            Some(last) if last.trusted == trusted => last.end = end,
            _ => {
                if self.runs.len() == self.runs.capacity() {
                    let capacity = (self.runs.capacity() * 2).max(1);
                    self.hold(self.text.capacity(), capacity)?;
                    let more = capacity - self.runs.len();
                    reserve_exact(&mut self.runs, more)?;
                }
                self.runs.push(Run { end, trusted });
            }
        }
        Ok(())
    }

    fn hold(&mut self, text_capacity: usize, num_runs: usize) -> Outcome<()> {
        self.held.grow_to(size_of::<Buffer>() + text_capacity + num_runs * size_of::<Run>())
    }

    /// Returns the origin of each part of a range.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let first = self.runs.partition_point(|run| run.end as usize <= range.start);
        let (mut start, end) = (range.start, range.end);
        self.runs[first..].iter().map_while(move |run| {
            let part = start..(run.end as usize).min(end);
            start = part.end;
            (!part.is_empty()).then_some((part, run.trusted))
        })
    }
}

/// Text with the origin of every character.
#[derive(Clone)]
pub(super) struct Text {
    buffer: Rc<RefCell<Buffer>>,
    start: u32,
    end: u32,
    /// The text is `Markup` in Python: text that is added to it is escaped for HTML.
    pub(super) is_markup: bool,
}

impl Text {
    pub(super) fn new(text: &str, trusted: bool, budget: &Budget<'_>) -> Outcome<Text> {
        let mut builder = TextBuilder::new(budget)?;
        builder.push(text, trusted)?;
        Ok(builder.finish())
    }

    /// Returns the characters. The guard must be dropped before text is joined.
    pub(super) fn str(&self) -> Ref<'_, str> {
        Ref::map(self.buffer.borrow(), |buffer| &buffer.text[self.range()])
    }

    pub(super) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    fn range(&self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    /// Returns a part of the text, by bytes.
    pub(super) fn slice(&self, bytes: Range<usize>) -> Text {
        Text { start: self.start + bytes.start as u32, end: self.start + bytes.end as u32, ..self.clone() }
    }

    pub(super) fn with_markup(&self, is_markup: bool) -> Text {
        Text { is_markup, ..self.clone() }
    }

    /// Whether the template wrote every character.
    pub(super) fn is_trusted(&self) -> bool {
        self.buffer.borrow().parts(self.range()).all(|(_, trusted)| trusted)
    }

    /// Calls `take` with every part of one origin.
    pub(super) fn for_each_part(&self, mut take: impl FnMut(&str, bool)) {
        let buffer = self.buffer.borrow();
        for (part, trusted) in buffer.parts(self.range()) {
            take(&buffer.text[part], trusted);
        }
    }

    /// Returns this text followed by another one.
    pub(super) fn join(&self, other: &Text, budget: &Budget<'_>) -> Outcome<Text> {
        if other.len() == 0 {
            return Ok(self.clone());
        }
        let is_last = self.end as usize == self.buffer.borrow().text.len() && self.len() > 0;
        if !is_last {
            let mut builder = TextBuilder::new(budget)?;
            builder.push_text(self)?;
            builder.push_text(other)?;
            return Ok(builder.finish().with_markup(self.is_markup));
        }
        let copy;
        let other = if Rc::ptr_eq(&self.buffer, &other.buffer) {
            let mut builder = TextBuilder::new(budget)?;
            builder.push_text(other)?;
            copy = builder.finish();
            &copy
        } else {
            other
        };
        let mut buffer = self.buffer.borrow_mut();
        let source = other.buffer.borrow();
        for (part, trusted) in source.parts(other.range()) {
            buffer.push(&source.text[part], trusted, budget)?;
        }
        Ok(Text { end: buffer.text.len() as u32, ..self.clone() })
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&*self.str(), f)
    }
}

/// Ranges of bytes of a text, each with whether the template wrote it.
pub(super) type OriginParts = Vec<(Range<usize>, bool)>;

/// Makes a text from parts.
pub(super) struct TextBuilder<'b, 'c> {
    buffer: Buffer,
    budget: &'b Budget<'c>,
}

impl<'b, 'c> TextBuilder<'b, 'c> {
    pub(super) fn new(budget: &'b Budget<'c>) -> Outcome<TextBuilder<'b, 'c>> {
        let held = budget.hold(size_of::<Buffer>())?;
        Ok(TextBuilder { buffer: Buffer { text: String::new(), runs: Vec::new(), held }, budget })
    }

    pub(super) fn push(&mut self, text: &str, trusted: bool) -> Outcome<()> {
        self.buffer.push(text, trusted, self.budget)
    }

    pub(super) fn len(&self) -> usize {
        self.buffer.text.len()
    }

    pub(super) fn push_char(&mut self, c: char, trusted: bool) -> Outcome<()> {
        self.push(c.encode_utf8(&mut [0; 4]), trusted)
    }

    /// Appends a text `count` times.
    pub(super) fn push_repeated(&mut self, text: &Text, count: usize) -> Outcome<()> {
        let len = text.len().saturating_mul(count);
        self.budget.charge_bytes(len)?;
        if len > 0 {
            (0..count).try_for_each(|_| self.push_text(text))?;
        }
        Ok(())
    }

    pub(super) fn push_text(&mut self, text: &Text) -> Outcome<()> {
        let source = text.buffer.borrow();
        source.parts(text.range()).try_for_each(|(part, trusted)| self.push(&source.text[part], trusted))
    }

    pub(super) fn push_slice(&mut self, text: &Text, bytes: Range<usize>) -> Outcome<()> {
        self.push_text(&text.slice(bytes))
    }

    pub(super) fn finish(self) -> Text {
        let end = self.buffer.text.len() as u32;
        Text { buffer: Rc::new(RefCell::new(self.buffer)), start: 0, end, is_markup: false }
    }

    /// Takes the text out, with the origin of its parts as ranges of bytes.
    pub(super) fn into_parts(self) -> Outcome<(String, OriginParts)> {
        let mut parts = Vec::new();
        reserve_exact(&mut parts, self.buffer.runs.len())?;
        parts.extend(self.buffer.parts(0..self.buffer.text.len()));
        Ok((self.buffer.text, parts))
    }
}
