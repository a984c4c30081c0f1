//! OpenAI's streams: `data: {...}` for each piece, then `data: [DONE]`, or an error event if the reply failed.

use pellucid_generate::{Delta, Summary};

use super::{ChunkWriter, Envelope, LongPiece};
use crate::http::error::ApiError;
use crate::openai::shared_fields::Streaming;
use crate::openai::usage::{Extension, Usage};
use crate::reply::Sampling;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::form::{ReplyForm, StreamWriter};
use crate::reply::parts::JsonParts;

/// Bytes before and after the data of an event.
const DATA: &str = "data: ";
const END: &str = "\n\n";

impl ReplyForm for Envelope {
    fn whole(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts {
        self.parts(choices, sampling, summary)
    }

    fn stream(self: Box<Self>, streaming: Streaming) -> Box<dyn StreamWriter> {
        Box::new(EventWriter { writer: ChunkWriter::new(*self, streaming), long: None, last: None })
    }
}

/// Writes chunks as server-sent events.
#[derive(Debug)]
struct EventWriter {
    writer: ChunkWriter,
    /// A piece that is partly written.
    long: Option<LongPiece>,
    /// The last piece of the choice that ended most recently, held back until usage is known.
    last: Option<Delta>,
}

impl EventWriter {
    fn write(
        &mut self,
        delta: &Delta,
        extension: Option<&Extension>,
        out: &mut ReplyBuffer,
    ) -> Result<(), OutOfMemory> {
        out.push(DATA)?;
        self.writer.delta(delta, extension, out)?;
        out.push(END)
    }
}

impl StreamWriter for EventWriter {
    fn open(&mut self, num_choices: usize, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        for index in 0..num_choices {
            let start = out.len();
            out.push(DATA)?;
            if self.writer.opening(index, out)? {
                out.push(END)?;
            } else {
                out.truncate(start);
            }
        }
        Ok(())
    }

    /// The piece that ends a choice is held back, because the last one of a reply also carries usage.
    fn delta(&mut self, delta: Delta, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if delta.finish.is_some() {
            match self.last.replace(delta) {
                Some(before) => self.write(&before, None, out),
                None => Ok(()),
            }
        } else if self.writer.is_long(&delta) {
            out.push(DATA)?;
            self.long = Some(self.writer.begin_long(delta, out)?);
            Ok(())
        } else {
            self.write(&delta, None, out)
        }
    }

    fn continue_long(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        let Some(mut long) = self.long.take() else { return Ok(false) };
        if self.writer.continue_long(&mut long, limit, out)? {
            out.push(END)?;
        } else {
            self.long = Some(long);
        }
        Ok(true)
    }

    fn finish(&mut self, sampling: &Sampling, summary: &Summary, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let extension = Extension::new(sampling, summary);
        if let Some(last) = self.last.take() {
            let own_chunk = self.writer.includes_usage();
            self.write(&last, (!own_chunk).then_some(&extension), out)?;
        }
        if self.writer.includes_usage() {
            out.push(DATA)?;
            self.writer.usage(&Usage::new(summary), &extension, out)?;
            out.push(END)?;
        }
        event("[DONE]", out)
    }

    /// The error takes the place of `[DONE]`.
    fn fail(&mut self, error: &ApiError, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        event(&error.to_json(), out)
    }
}

fn event(data: &str, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
    out.push(DATA)?;
    out.push(data)?;
    out.push(END)
}
