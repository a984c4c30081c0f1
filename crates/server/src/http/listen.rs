//! Connections: accepted with limits on number, header size and time, with or without TLS; and the steps of a shutdown.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pellucid_engine::{EngineHandle, Liveness};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};

use super::drain::Phase;
use super::tls::Tls;
use crate::state::{Limits, SharedApp};

/// Maximum bytes of a request's headers; larger ones are answered with 431.
pub(crate) const MAX_HEADER_BYTES: usize = 64 << 10;
/// Time for written bytes to reach the clients after the last reply.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before accepting again when the system is out of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// Interval at which the engine's thread is checked.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(200);

/// Why [`run`](crate::run) returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The server was shut down, and every reply in flight was completed.
    Drained,
    /// The server was shut down, and replies were cut short by a second signal or by the drain timeout.
    CutShort,
    /// The engine stopped because its device was lost.
    EngineStopped,
}

/// One of at most `max_connections` connections. Requests hold it, and so does a WebSocket, which outlives its request.
#[derive(Debug, Clone)]
pub(crate) struct Connection(#[expect(dead_code)] Arc<ConnectionSlot>);

#[derive(Debug)]
struct ConnectionSlot {
    app: SharedApp,
    _permit: OwnedSemaphorePermit,
    /// When the last receiver is dropped, all connections are closed.
    _open: watch::Receiver<()>,
}

impl Connection {
    fn new(app: SharedApp, permit: OwnedSemaphorePermit, open: watch::Receiver<()>) -> Connection {
        app.metrics.connections.inc();
        Connection(Arc::new(ConnectionSlot { app, _permit: permit, _open: open }))
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.app.metrics.connections.dec();
    }
}

/// Accepts connections until the server is shut down and replies in flight have ended.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Tls>, router: Router, app: SharedApp) -> Ended {
    let connections = Arc::new(Semaphore::new(app.limits.max_connections));
    let (open, all_closed) = watch::channel(());
    let finished = watch::Sender::new(false);
    let mut shutdown = std::pin::pin!(shutdown(&app));
    let ended = loop {
        let (stream, permit) = tokio::select! {
            ended = &mut shutdown => break ended,
            accepted = accept(&listener, &connections) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_RETRY).await;
                    continue;
                }
            },
        };
        let (router, tls, limits) = (router.clone(), tls.clone(), app.limits.clone());
        let connection = Connection::new(app.clone(), permit, open.subscribe());
        let mut finish = finished.subscribe();
        tokio::spawn(async move {
            let close = async move { drop(finish.wait_for(|finished| *finished).await) };
            let service = ConnectionService { router: TowerToHyperService::new(router), connection };
            serve_stream(stream, tls, service, &limits, close).await;
        });
    };
    drop(all_closed);
    finished.send_replace(true);
    let _ = timeout(FLUSH_TIMEOUT, open.closed()).await;
    ended
}

/// Waits for a shutdown signal, and then for the replies in flight.
async fn shutdown(app: &SharedApp) -> Ended {
    let (drain, limits) = (&app.drain, &app.limits);
    tokio::select! {
        () = drain.reached(Phase::Draining) => {}
        () = stopped(&app.model.engine) => {
            tracing::error!(in_flight = drain.num_in_flight(), "shutting down: the engine has stopped");
            // Replies in flight send their error and end.
            let _ = timeout(FLUSH_TIMEOUT, drain.finished()).await;
            return Ended::EngineStopped;
        }
    }
    tracing::info!(in_flight = drain.num_in_flight(), "draining: completing replies in flight, refusing new requests");
    tokio::select! {
        () = drain.reached(Phase::Stopping) => {}
        // Replies that a second signal cut short are not in flight any more either.
        () = drain.finished() => if drain.phase() < Phase::Stopping { return Ended::Drained },
        () = sleep(limits.drain_timeout) => drain.stop(),
    }
    // Without a count: some replies may have ended since the signal.
    tracing::warn!("stopping: cutting replies in flight short");
    // Replies in flight send their error and end.
    let _ = timeout(FLUSH_TIMEOUT, drain.finished()).await;
    Ended::CutShort
}

/// Waits until the engine's thread has ended.
async fn stopped(engine: &EngineHandle) {
    while engine.liveness() != Liveness::Stopped {
        sleep(LIVENESS_INTERVAL).await;
    }
}

async fn accept(listener: &TcpListener, connections: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    // Connections beyond the limit wait in the system's queue.
    let permit = connections.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    // Tokens are small and must be sent at once.
    stream.set_nodelay(true)?;
    Ok((stream, permit))
}

async fn serve_stream(
    stream: TcpStream,
    tls: Option<Tls>,
    service: ConnectionService,
    limits: &Limits,
    close: impl Future<Output = ()> + Send,
) {
    match tls {
        None => serve_http(WriteTimeout::new(stream, limits.write_timeout), service, limits, close).await,
        Some(tls) => match timeout(limits.header_timeout, tls.accept(stream)).await {
            Ok(Ok(stream)) => serve_http(WriteTimeout::new(stream, limits.write_timeout), service, limits, close).await,
            // Port scanners and clients without TLS; an operator cannot do anything about them.
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        },
    }
}

/// Passes the requests of one connection to the router, each with its [`Connection`].
struct ConnectionService {
    router: TowerToHyperService<Router>,
    connection: Connection,
}

impl Service<Request<Incoming>> for ConnectionService {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.connection.clone());
        self.router.call(request)
    }
}

/// Serves the HTTP requests of one connection.
async fn serve_http<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: WriteTimeout<S>,
    service: ConnectionService,
    limits: &Limits,
    close: impl Future<Output = ()> + Send,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let mut close = std::pin::pin!(close);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = &mut close => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection ended");
    }
}

/// A stream whose writes fail when the client has accepted no byte for `timeout`.
#[derive(Debug)]
struct WriteTimeout<S> {
    stream: S,
    timeout: Duration,
    /// Runs while a write is pending.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    fn new(stream: S, timeout: Duration) -> WriteTimeout<S> {
        WriteTimeout { stream, timeout, timer: None }
    }

    /// Returns the result of a write, or an error when it has been pending for too long.
    fn watch<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.timeout)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watch(closed, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
