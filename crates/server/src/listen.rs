//! Connections: accepted, bounded in number, size and time, with or without TLS; and the order in which the server leaves.

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
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{ServerConfig, crypto::ring, version};

use crate::drain::Phase;
use crate::state::{Limits, SharedApp};

/// Bytes of a request's headers; more is answered with 431.
pub(crate) const MAX_HEADER_BYTES: usize = 64 << 10;
/// After the last reply, for what is written to arrive.
const FLUSH: Duration = Duration::from_secs(2);
/// When the system has no descriptor for another connection, it may have one soon.
const EXHAUSTED: Duration = Duration::from_millis(50);
/// How soon it shows that the engine has stopped.
const LISTEN_FOR_PULSE: Duration = Duration::from_millis(200);

/// A certificate and its key.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// Why a certificate or a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the certificate file holds no certificate in PEM form")]
    NoCertificate,
    #[error("the key file holds no private key in PEM form")]
    NoKey,
    #[error("the certificate and the key do not work together: {0}")]
    Refused(String),
}

impl Tls {
    /// From the contents of the files.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Tls, TlsError> {
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<_, _>>()
            .map_err(|_| TlsError::NoCertificate)?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::NoKey)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&version::TLS13, &version::TLS12])
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|error| TlsError::Refused(error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls(TlsAcceptor::from(Arc::new(config))))
    }
}

/// How serving ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every reply in flight was finished.
    Drained,
    /// Replies were cut short, by a second signal or because they took too long.
    CutShort,
    /// The engine stopped by itself, for want of a device to compute with.
    EngineStopped,
}

/// A place among the connections, for as long as something holds it: requests do, and a WebSocket, which goes on after the last request.
#[derive(Debug, Clone)]
pub(crate) struct Connection(#[expect(dead_code)] Arc<Place>);

#[derive(Debug)]
struct Place {
    app: SharedApp,
    _permit: OwnedSemaphorePermit,
    /// When the last is dropped, all connections have closed.
    _open: watch::Receiver<()>,
}

impl Connection {
    fn new(app: SharedApp, permit: OwnedSemaphorePermit, open: watch::Receiver<()>) -> Connection {
        app.metrics.connections.inc();
        Connection(Arc::new(Place { app, _permit: permit, _open: open }))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.app.metrics.connections.dec();
    }
}

/// Accepts connections until the server is told to leave and has finished what was in flight.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Tls>, router: Router, app: SharedApp) -> Ended {
    let connections = Arc::new(Semaphore::new(app.limits.max_connections));
    let (open, all_closed) = watch::channel(());
    let finished = watch::Sender::new(false);
    let mut leaving = std::pin::pin!(leave(&app));
    let ended = loop {
        let (stream, permit) = tokio::select! {
            ended = &mut leaving => break ended,
            accepted = accept(&listener, &connections) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(EXHAUSTED).await;
                    continue;
                }
            },
        };
        let (router, tls, limits) = (router.clone(), tls.clone(), app.limits.clone());
        let connection = Connection::new(app.clone(), permit, open.subscribe());
        let mut finish = finished.subscribe();
        tokio::spawn(async move {
            let close = async move { drop(finish.wait_for(|finished| *finished).await) };
            converse(stream, tls, Door { router: TowerToHyperService::new(router), connection }, &limits, close).await;
        });
    };
    drop(all_closed);
    finished.send_replace(true);
    let _ = timeout(FLUSH, open.closed()).await;
    ended
}

/// Waits for the word to leave, and then for the replies in flight.
async fn leave(app: &SharedApp) -> Ended {
    let (drain, limits) = (&app.drain, &app.limits);
    tokio::select! {
        () = drain.reached(Phase::Draining) => {}
        () = stopped(&app.model.engine) => {
            tracing::error!(in_flight = drain.num_in_flight(), "leaving: the engine has stopped");
            // They send their error and go.
            let _ = timeout(FLUSH, drain.emptied()).await;
            return Ended::EngineStopped;
        }
    }
    tracing::info!(in_flight = drain.num_in_flight(), "draining: replies in flight are finished, new requests refused");
    tokio::select! {
        () = drain.reached(Phase::Ending) => {}
        // What a second signal cut short is no longer in flight either.
        () = drain.emptied() => if drain.phase() < Phase::Ending { return Ended::Drained },
        () = sleep(limits.drain_timeout) => drain.end(),
    }
    // How many there are is no longer to be told: some have left since they were told to.
    tracing::warn!("ending: replies in flight are cut short");
    // They send their error and go.
    let _ = timeout(FLUSH, drain.emptied()).await;
    Ended::CutShort
}

/// Waits until the engine's loop has ended.
async fn stopped(engine: &EngineHandle) {
    while engine.liveness() != Liveness::Stopped {
        sleep(LISTEN_FOR_PULSE).await;
    }
}

async fn accept(listener: &TcpListener, connections: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    // Beyond the bound they wait where the system keeps them.
    let permit = connections.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    // Tokens are small and wanted now.
    stream.set_nodelay(true)?;
    Ok((stream, permit))
}

async fn converse(
    stream: TcpStream,
    tls: Option<Tls>,
    door: Door,
    limits: &Limits,
    close: impl Future<Output = ()> + Send,
) {
    match tls {
        None => answer(Patient::new(stream, limits.write_timeout), door, limits, close).await,
        Some(tls) => match timeout(limits.header_timeout, tls.0.accept(stream)).await {
            Ok(Ok(stream)) => answer(Patient::new(stream, limits.write_timeout), door, limits, close).await,
            // Scanners and plain-text clients; nothing that an operator could do.
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        },
    }
}

/// The routes, as one connection sees them: its requests carry its place.
struct Door {
    router: TowerToHyperService<Router>,
    connection: Connection,
}

impl Service<Request<Incoming>> for Door {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.connection.clone());
        self.router.call(request)
    }
}

/// Answers the requests of one connection.
async fn answer<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: Patient<S>,
    door: Door,
    limits: &Limits,
    close: impl Future<Output = ()> + Send,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), door)
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

/// A stream whose writes must make progress: a client that takes nothing for too long is cut.
#[derive(Debug)]
struct Patient<S> {
    stream: S,
    patience: Duration,
    /// Runs while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    fn new(stream: S, patience: Duration) -> Patient<S> {
        Patient { stream, patience, timer: None }
    }

    fn watch<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.patience)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
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
