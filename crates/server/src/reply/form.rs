//! The form of a reply: how one API writes what was generated. `respond` and `stream` send it.

use pellucid_generate::{Delta, Summary};

use super::Sampling;
use super::buffer::{OutOfMemory, ReplyBuffer};
use super::parts::JsonParts;
use crate::http::error::ApiError;
use crate::openai::shared_fields::Streaming;

/// `Content-Type` of server-sent events.
pub(crate) const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// Writes the reply to one request in the form of the API that was called.
pub(crate) trait ReplyForm: Send + Sync {
    /// Returns the JSON of a whole reply; `choices` holds the joined pieces of each choice.
    fn whole(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts;

    /// Returns the writer of a streamed reply.
    fn stream(self: Box<Self>, streaming: Streaming) -> Box<dyn StreamWriter>;
}

/// Writes the events of a streamed reply, each complete with what separates it from the next.
pub(crate) trait StreamWriter: Send {
    /// Value of the `Content-Type` header.
    fn content_type(&self) -> &'static str {
        EVENT_STREAM
    }

    /// Writes what precedes the first piece.
    fn open(&mut self, num_choices: usize, out: &mut ReplyBuffer) -> Result<(), OutOfMemory>;

    /// Writes a piece, or keeps it for later.
    fn delta(&mut self, delta: Delta, out: &mut ReplyBuffer) -> Result<(), OutOfMemory>;

    /// Continues a piece that is too long to be written at once, until `out` has `limit` bytes or a little more.
    /// Returns false if there is no such piece.
    fn continue_long(&mut self, _limit: usize, _out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        Ok(false)
    }

    /// Whether [`StreamWriter::continue_long`] has more to write.
    fn has_rest(&self) -> bool {
        false
    }

    /// Writes what follows the last piece, or keeps it for [`StreamWriter::continue_long`].
    fn finish(&mut self, sampling: &Sampling, summary: &Summary, out: &mut ReplyBuffer) -> Result<(), OutOfMemory>;

    /// Ends a stream that has begun with an error.
    fn fail(&mut self, error: &ApiError, out: &mut ReplyBuffer) -> Result<(), OutOfMemory>;

    /// Returns the bytes that keep an idle connection open and that clients ignore.
    fn keep_alive(&self) -> &'static str {
        ": still at work\n\n"
    }
}
