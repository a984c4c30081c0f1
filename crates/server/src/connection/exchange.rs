//! The request that a connection is serving: keeps the connection busy, and finds out whether its client is gone.
//!
//! While a whole reply is generated, nothing is sent, so a client that has closed its connection cannot be told from
//! one that has closed its sending half only (see `connection::client_socket`). Then an interim response,
//! `100 Continue`, is sent: clients of HTTP/1.1 must skip it (RFC 9110, section 15.2), and a closed socket answers it
//! with a reset. Streams need none, because their own bytes have the same effect.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use super::client_socket::SocketWatch;
use crate::http::listen::Connection;

const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// State of a connection's current request.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    /// Requests whose response has not ended; at most one, as HTTP/1.1 answers them in turn.
    num_requests: AtomicUsize,
    /// Whether the request's body has arrived.
    is_received: AtomicBool,
    /// Whether bytes were sent since the request arrived.
    has_sent: AtomicBool,
    /// Whether the client understands interim responses.
    is_probe_allowed: AtomicBool,
    /// Whether the client has finished sending, so that it may be gone.
    is_doubtful: AtomicBool,
    changed: Notify,
}

impl Exchange {
    /// Whether a request is being served.
    pub(crate) fn is_busy(&self) -> bool {
        self.num_requests.load(Ordering::Relaxed) > 0
    }

    fn is_generating(&self) -> bool {
        self.is_busy() && self.is_received.load(Ordering::Relaxed)
    }

    fn wants_probe(&self) -> bool {
        self.is_doubtful.load(Ordering::Relaxed)
            && self.is_generating()
            && self.is_probe_allowed.load(Ordering::Relaxed)
            && !self.has_sent.load(Ordering::Relaxed)
    }

    /// Counts a request, and returns it with a body that reports its end.
    pub(crate) fn start(
        self: &Arc<Exchange>,
        request: Request<Incoming>,
        connection: &Connection,
    ) -> (Request<Body>, InExchange) {
        connection.slot().start_request();
        self.num_requests.fetch_add(1, Ordering::Relaxed);
        self.has_sent.store(false, Ordering::Relaxed);
        self.is_probe_allowed.store(request.version() >= Version::HTTP_11, Ordering::Relaxed);
        self.is_received.store(request.body().is_end_stream(), Ordering::Relaxed);
        self.changed.notify_waiters();
        let request = request.map(|body| Body::new(RequestBody { body, exchange: self.clone() }));
        (request, InExchange { exchange: self.clone(), connection: Some(connection.clone()) })
    }

    fn set_received(&self) {
        if !self.is_received.swap(true, Ordering::Relaxed) {
            // Until here, only the interim response that the client asked for with `Expect` was sent.
            self.has_sent.store(false, Ordering::Relaxed);
            self.changed.notify_waiters();
        }
    }

    /// Waits until the client of a request is gone. Must be polled by the task that polls the connection, which sends
    /// the probe.
    pub(crate) async fn client_gone(&self, socket: &SocketWatch) {
        let watch = async {
            loop {
                let changed = self.changed.notified();
                if !self.is_generating() {
                    changed.await;
                    continue;
                }
                tokio::select! {
                    () = socket.finished_sending() => break,
                    () = changed => {}
                }
            }
            self.is_doubtful.store(true, Ordering::Relaxed);
            // The connection is polled again and sends the probe; the answer is an error of the socket.
            tokio::task::yield_now().await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = socket.lost() => {}
            () = watch => {}
        }
    }
}

/// Exists while a request is served.
#[derive(Debug)]
pub(crate) struct InExchange {
    exchange: Arc<Exchange>,
    /// `None` once the connection has become a WebSocket, which is busy until it ends.
    connection: Option<Connection>,
}

impl InExchange {
    /// Returns a response whose body ends the exchange.
    pub(crate) fn answer(mut self, response: Response<Body>) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            self.connection = None;
            return response;
        }
        response.map(|body| Body::new(ResponseBody { body, _exchange: self }))
    }
}

impl Drop for InExchange {
    fn drop(&mut self) {
        self.exchange.num_requests.fetch_sub(1, Ordering::Relaxed);
        if let Some(connection) = &self.connection {
            connection.slot().end_request();
        }
    }
}

/// A request's body that reports when it has arrived.
struct RequestBody {
    body: Incoming,
    exchange: Arc<Exchange>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.exchange.set_received();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct ResponseBody {
    body: Body,
    _exchange: InExchange,
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that sends the probe when the exchange wants one.
#[derive(Debug)]
pub(crate) struct ProbedStream<S> {
    stream: S,
    exchange: Arc<Exchange>,
    /// Bytes of the probe that are still to be sent.
    probe: &'static [u8],
}

impl<S: AsyncWrite + Unpin> ProbedStream<S> {
    pub(crate) fn new(stream: S, exchange: Arc<Exchange>) -> ProbedStream<S> {
        ProbedStream { stream, exchange, probe: &[] }
    }

    /// Sends the rest of a probe that has begun, which must not be mixed with other bytes.
    fn poll_probe(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.probe.is_empty() {
            let num_sent = ready!(Pin::new(&mut self.stream).poll_write(context, self.probe))?;
            self.probe = &self.probe[num_sent..];
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ProbedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ProbedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_probe(context))?;
        self.exchange.has_sent.store(true, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    /// The connection flushes whenever it is polled, and writes first what it has to write. So at this point it is
    /// between two messages, if nothing was written since the request arrived.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.exchange.wants_probe() {
            self.exchange.has_sent.store(true, Ordering::Relaxed);
            self.probe = PROBE;
        }
        ready!(self.poll_probe(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_probe(context))?;
        self.exchange.has_sent.store(true, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
