//! A WebSocket connection: text messages in both directions, each buffer with a bound.
//!
//! | buffer | bound |
//! |---|---|
//! | bytes read and not processed | [`INPUT_BYTES`] |
//! | the unfinished message | the maximum message, and the memory for all clients, taken as its bytes arrive |
//! | messages read and not processed | none: the next one is read when the caller asks for it |
//! | bytes written that the client has not accepted | one message, and [`PAUSE_BYTES`] of pongs |
//!
//! Nothing is read while the client does not accept what was written, so a client that sends pings and does not read
//! stops itself, until the write timeout of the connection ends it.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::assembler::{Assembler, PAUSE_BYTES, Step, TextMessage};
use super::close_reason::CloseReason;
use super::frame::{self, Opcode};
use crate::connection::transfer_rate::TransferRate;
use crate::limits::client_memory::{HeldMemory, out_of_memory};

/// Bytes that are read at once.
const INPUT_BYTES: usize = 4 << 10;
/// Maximum bytes that are read and discarded while a connection closes.
const DISCARD_BYTES: usize = 16 << 20;
/// Time for a client to receive the close frame and to close its side.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Times after which a silent client is asked for a sign of life, or given up.
#[derive(Debug, Clone, Copy)]
pub(super) struct SocketTimes {
    /// A ping is sent after this time without a byte from the client.
    pub(super) ping: Duration,
    /// Maximum time between a ping and the next byte from the client.
    pub(super) pong: Duration,
    /// Maximum time for a message to arrive after its first byte.
    pub(super) message: Duration,
    /// Minimum bytes a second of a message that has begun, as of a request body, and the time without any.
    pub(super) bytes_per_s: u32,
    pub(super) grace: Duration,
}

impl SocketTimes {
    fn rate(self) -> TransferRate {
        TransferRate::new(self.bytes_per_s, self.grace)
    }
}

/// The server's side of a WebSocket over `stream`.
#[derive(Debug)]
pub(super) struct Socket<S> {
    stream: S,
    times: SocketTimes,
    assembler: Assembler,
    /// Bytes read and not processed.
    input: Vec<u8>,
    /// Bytes to write: `output[written..]`.
    output: Vec<u8>,
    written: usize,
    /// Memory of `output`.
    output_memory: HeldMemory,
    /// The credit of the unfinished message.
    rate: TransferRate,
    /// When the last byte arrived.
    heard: Instant,
    /// When the ping was sent that no byte has followed.
    pinged: Option<Instant>,
    /// Runs out when a time of `times` may have passed.
    timer: Pin<Box<Sleep>>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Socket<S> {
    /// Returns a socket over `stream`, whose handshake is complete.
    pub(super) fn new(stream: S, times: SocketTimes, assembler: Assembler) -> Socket<S> {
        let now = Instant::now();
        Socket {
            stream,
            times,
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            output_memory: assembler.account(),
            assembler,
            rate: times.rate(),
            heard: now,
            pinged: None,
            timer: Box::pin(sleep_until(now + times.ping)),
        }
    }

    /// Applies another limit to messages that begin from now on.
    pub(super) fn set_max_message(&mut self, max_message: usize) {
        self.assembler.set_max_message(max_message);
    }

    /// Waits until a message begins to arrive. Nothing is lost if the future is dropped.
    pub(super) async fn begun(&mut self) -> Result<(), CloseReason> {
        while self.assembler.began().is_none() {
            self.advance().await?;
        }
        Ok(())
    }

    /// Returns the next message. Nothing is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Result<TextMessage, CloseReason> {
        // The time that passed since the message began may be the server's.
        if self.assembler.restart_clock() {
            self.rate = self.times.rate();
            self.set_timer();
        }
        loop {
            if let Some(message) = self.advance().await? {
                return Ok(message);
            }
        }
    }

    /// Waits for `work` and answers control frames meanwhile. Fails when the client closes or disconnects first.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, CloseReason> {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return Ok(done),
            begun = self.begun() => begun?,
        }
        Ok(work.await)
    }

    /// Sends a message of UTF-8 and waits until the connection has taken it.
    pub(super) async fn send(&mut self, text: &[u8]) -> Result<(), CloseReason> {
        self.output_memory.grow_to(self.output.len().saturating_add(text.len()))?;
        self.output.try_reserve(frame::MAX_HEAD_BYTES + text.len()).map_err(|_| out_of_memory())?;
        frame::write(Opcode::Text, text, &mut self.output);
        self.flush().await
    }

    /// Sends the reason and waits for the client to close its side.
    pub(super) async fn close(mut self, reason: &CloseReason) {
        let Some(code) = reason.code() else { return };
        self.assembler.discard();
        if let Some(error) = reason.error() {
            frame::write(Opcode::Text, error.to_json().as_bytes(), &mut self.output);
        }
        frame::write(Opcode::Close, &frame::close_payload(code, reason.text()), &mut self.output);
        let farewell = async {
            self.flush().await?;
            self.stream.shutdown().await.map_err(failed)?;
            // Closing a connection with unread bytes resets it, and the client would lose the reason.
            let (mut unread, mut left) = ([0; INPUT_BYTES], DISCARD_BYTES);
            while left > 0 {
                match self.stream.read(&mut unread).await {
                    Ok(0) | Err(_) => break,
                    Ok(len) => left = left.saturating_sub(len),
                }
            }
            Ok::<(), CloseReason>(())
        };
        // If it fails, there is nobody to tell.
        let _ = timeout(CLOSE_TIMEOUT, farewell).await;
    }

    /// Returns the bytes that wait to be written.
    #[cfg(test)]
    pub(super) fn num_unsent(&self) -> usize {
        self.output.len() - self.written
    }

    /// Processes input that has arrived, or waits for more.
    async fn advance(&mut self) -> Result<Option<TextMessage>, CloseReason> {
        // Back-pressure: the bytes of a client that does not read are not read either.
        self.flush().await?;
        let mut rest = self.input.as_slice();
        let step = self.assembler.process(&mut rest, &mut self.output);
        let num_processed = self.input.len() - rest.len();
        self.input.drain(..num_processed);
        match step? {
            Step::Message(message) => return Ok(Some(message)),
            Step::Begun => {
                self.rate = self.times.rate();
                self.set_timer();
            }
            Step::NeedsFlush => {}
            Step::NeedsInput => {
                self.flush().await?;
                self.fill().await?;
            }
        }
        Ok(None)
    }

    /// Writes all pending output.
    async fn flush(&mut self) -> Result<(), CloseReason> {
        if self.output.is_empty() {
            return Ok(());
        }
        while self.written < self.output.len() {
            match self.stream.write(&self.output[self.written..]).await.map_err(failed)? {
                0 => return Err(CloseReason::Disconnected),
                len => self.written += len,
            }
        }
        self.stream.flush().await.map_err(failed)?;
        self.written = 0;
        self.output.clear();
        self.output.shrink_to(PAUSE_BYTES);
        self.output_memory.shrink_to(PAUSE_BYTES);
        Ok(())
    }

    /// Waits for bytes, or for a time to pass.
    async fn fill(&mut self) -> Result<(), CloseReason> {
        self.input.reserve(INPUT_BYTES - self.input.len().min(INPUT_BYTES));
        tokio::select! {
            biased;
            read = self.stream.read_buf(&mut self.input) => match read {
                Ok(0) | Err(_) => Err(CloseReason::Disconnected),
                Ok(len) => {
                    self.heard = Instant::now();
                    self.rate.moved(len, self.heard);
                    // Without an unfinished message, only the answer to a ping changes what is waited for.
                    if self.pinged.take().is_some() || self.assembler.began().is_some() {
                        self.set_timer();
                    }
                    Ok(())
                }
            },
            () = self.timer.as_mut() => self.check_times(Instant::now()),
        }
    }

    /// Gives up a client that is late, sends a ping if one is due, and sets the timer again.
    fn check_times(&mut self, now: Instant) -> Result<(), CloseReason> {
        if self.assembler.began().is_some_and(|began| now >= began + self.times.message) {
            return Err(CloseReason::Late("the message did not arrive in time"));
        }
        if self.assembler.began().is_some() && now >= self.rate.wait(now) {
            return Err(CloseReason::Late("the message arrives too slowly"));
        }
        match self.pinged {
            Some(pinged) if now >= pinged + self.times.pong => return Err(CloseReason::NoPong),
            None if now >= self.heard + self.times.ping => {
                self.pinged = Some(now);
                frame::write(Opcode::Ping, b"", &mut self.output);
            }
            _ => {}
        }
        self.set_timer();
        Ok(())
    }

    /// Sets the timer to the next time that matters.
    fn set_timer(&mut self) {
        let life = self.pinged.map_or(self.heard + self.times.ping, |pinged| pinged + self.times.pong);
        let message =
            self.assembler.began().map(|began| (began + self.times.message).min(self.rate.wait(Instant::now())));
        self.timer.as_mut().reset(message.map_or(life, |message| message.min(life)));
    }
}

/// Returns the reason that a failed write means.
fn failed(error: io::Error) -> CloseReason {
    match error.kind() {
        io::ErrorKind::TimedOut => CloseReason::SlowReader,
        _ => CloseReason::Disconnected,
    }
}
