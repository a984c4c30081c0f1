//! [`Pellucid::generate_all`]: submits requests while the engine's queue has places, and reads all streams in turns.
//!
//! Reading one stream to its end before the next would be slow: the engine pauses a request whose reader falls behind.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use crate::stream::ReplyStream;
use crate::{Error, Pellucid, Reply, Request};

/// Answers all requests and returns the replies in their order. The first error cancels the rest.
pub(crate) fn generate_all(model: &Pellucid, requests: Vec<Request>) -> Result<Vec<Reply>, Error> {
    let mut replies: Vec<Option<Reply>> = requests.iter().map(|_| None).collect();
    let mut waiting: VecDeque<(usize, Request)> = requests.into_iter().enumerate().collect();
    let mut running: Vec<(usize, ReplyStream)> = Vec::new();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    while !(waiting.is_empty() && running.is_empty()) {
        submit(model, &mut waiting, &mut running)?;
        let mut has_finished = false;
        let mut still_running = Vec::with_capacity(running.len());
        for (index, mut stream) in running {
            loop {
                match stream.poll_piece(&mut context) {
                    Poll::Ready(Some(piece)) => {
                        piece?;
                    }
                    Poll::Ready(None) => {
                        replies[index] = Some(stream.whole());
                        has_finished = true;
                        break;
                    }
                    Poll::Pending => {
                        still_running.push((index, stream));
                        break;
                    }
                }
            }
        }
        running = still_running;
        // A stream that had an event since it was polled has already unparked this thread.
        if !has_finished {
            std::thread::park();
        }
    }
    Ok(replies.into_iter().flatten().collect())
}

/// Submits requests until all are submitted or the engine's queue is full.
fn submit(
    model: &Pellucid,
    waiting: &mut VecDeque<(usize, Request)>,
    running: &mut Vec<(usize, ReplyStream)>,
) -> Result<(), Error> {
    while let Some((index, request)) = waiting.pop_front() {
        match ReplyStream::submit(model, request.clone()) {
            Ok(stream) => running.push((index, stream)),
            // One of the submitted requests will end and free a place in the queue.
            Err(error) if error.is_temporary() && !running.is_empty() => {
                waiting.push_front((index, request));
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Wakes the thread that waits for the streams.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
