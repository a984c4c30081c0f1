//! Replies as they are generated: an iterator that blocks, and a stream for async tasks of any runtime.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use pellucid_generate::{Delta, Generation, GenerationEvent, GenerationRequest, Summary};

use crate::{Error, Pellucid, Reply, Request};

/// The pieces of a reply, as an iterator that blocks until the next one is there.
///
/// Dropping it cancels the request: the engine frees its memory before its next step.
///
/// ```
/// use std::io::Write;
/// use pellucid::{Pellucid, Request};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Pellucid::open("models/tiny.gguf")?;
/// for piece in model.stream(Request::text("Once upon a time").max_tokens(20))? {
///     print!("{}", piece?.text);
///     std::io::stdout().flush()?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ReplyStream {
    // Dropped before the model: a request is cancelled before its engine may stop.
    generation: Generation,
    model: Pellucid,
    /// The pieces so far, joined.
    choices: Vec<Delta>,
    seed: u64,
    not_enforced: Vec<String>,
}

impl ReplyStream {
    pub(crate) fn submit(model: &Pellucid, request: Request) -> Result<ReplyStream, Error> {
        let encoded = request.encode(model.model(), &model.loaded.tenants)?;
        let seed = encoded.prompt.request.sampling.seed;
        let not_enforced = encoded.not_enforced;
        let mut request = GenerationRequest { stop: encoded.stops, ..GenerationRequest::new(encoded.prompt) };
        model.model().judge(&mut request).map_err(Error::Blocked)?;
        let generation = Generation::submit(model.model(), request).map_err(Error::Rejected)?;
        let choices = (0..generation.num_choices()).map(Delta::new).collect();
        Ok(ReplyStream { generation, model: model.clone(), choices, seed, not_enforced })
    }

    /// Returns the seed of the first choice.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the parts of the tools' schemas that calls need not satisfy; see [`Reply::not_enforced`].
    pub fn not_enforced(&self) -> &[String] {
        &self.not_enforced
    }

    /// Returns token counts and times so far.
    pub fn summary(&self) -> Summary {
        self.generation.summary()
    }

    /// Returns the model that answers.
    pub fn model(&self) -> &Pellucid {
        &self.model
    }

    /// Blocks until the reply is complete and returns it, the pieces that were read before included.
    pub fn into_reply(mut self) -> Result<Reply, Error> {
        for piece in &mut self {
            piece?;
        }
        Ok(self.whole())
    }

    /// Returns the reply as a stream for async tasks.
    pub fn into_async(self) -> AsyncReplyStream {
        AsyncReplyStream { inner: self }
    }

    /// Polls for the next piece.
    pub(crate) fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Delta, Error>>> {
        loop {
            match self.generation.poll_event(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(event)) => {
                    if let Some(piece) = self.take(event) {
                        return Poll::Ready(Some(piece));
                    }
                }
            }
        }
    }

    /// Returns the joined pieces; the stream must have ended.
    pub(crate) fn whole(self) -> Reply {
        Reply { not_enforced: self.not_enforced, ..Reply::new(self.choices, self.generation.summary(), self.seed) }
    }

    fn take(&mut self, event: Result<GenerationEvent, pellucid_engine::Error>) -> Option<Result<Delta, Error>> {
        match event {
            Err(error) => Some(Err(Error::Failed(error))),
            Ok(GenerationEvent::Delta(piece)) => {
                let joined = self.choices[piece.choice].append(piece.clone());
                Some(joined.map(|()| piece).map_err(Error::Failed))
            }
            Ok(_) => None,
        }
    }
}

impl Iterator for ReplyStream {
    type Item = Result<Delta, Error>;

    fn next(&mut self) -> Option<Result<Delta, Error>> {
        loop {
            let event = self.generation.next()?;
            if let Some(piece) = self.take(event) {
                return Some(piece);
            }
        }
    }
}

/// The pieces of a reply, as a [`Stream`](futures_core::Stream) for async tasks. Works with any runtime.
///
/// Dropping it cancels the request: the engine frees its memory before its next step.
#[derive(Debug)]
pub struct AsyncReplyStream {
    inner: ReplyStream,
}

impl AsyncReplyStream {
    /// Returns the seed of the first choice.
    pub fn seed(&self) -> u64 {
        self.inner.seed
    }

    /// Returns token counts and times so far.
    pub fn summary(&self) -> Summary {
        self.inner.summary()
    }

    /// Waits until the reply is complete and returns it, the pieces that were read before included.
    pub async fn into_reply(mut self) -> Result<Reply, Error> {
        while let Some(piece) = std::future::poll_fn(|context| self.inner.poll_piece(context)).await {
            piece?;
        }
        Ok(self.inner.whole())
    }
}

impl Stream for AsyncReplyStream {
    type Item = Result<Delta, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.inner.poll_piece(context)
    }
}
