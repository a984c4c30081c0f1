//! Connections: accepted with limits on number, header size and time, with or without TLS; and the steps of a shutdown.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pellucid_engine::Liveness;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::drain::Phase;
use crate::connection::client_socket::{ClientSocket, SocketWatch};
use crate::connection::connections::{Connections, Slot};
use crate::connection::descriptors;
use crate::connection::exchange::{Exchange, ProbedStream};
use crate::connection::tls::Tls;
use crate::state::{App, SharedApp};

/// Maximum bytes of a request's headers; larger ones are answered with 431.
pub(crate) const MAX_HEADER_BYTES: usize = 64 << 10;
/// Time for written bytes to reach the clients after the last reply.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to wait before the next connection is accepted while many others are closing.
const CLOSING_WAIT: Duration = Duration::from_millis(500);
/// Pause before accepting again when the system is out of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// Minimum interval between warnings that no connection can be accepted.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time for the headers of a connection that is refused.
const REFUSING_TIMEOUT: Duration = Duration::from_secs(5);
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

/// An open connection. Requests hold it, and so does a WebSocket, which outlives its request.
#[derive(Debug, Clone)]
pub(crate) struct Connection(Arc<OpenConnection>);

#[derive(Debug)]
struct OpenConnection {
    app: SharedApp,
    slot: Slot,
    /// Address of the other end, which may be a proxy.
    peer: IpAddr,
    /// When the last receiver is dropped, all connections are closed.
    _open: watch::Receiver<()>,
}

impl Connection {
    fn new(app: SharedApp, slot: Slot, peer: IpAddr, open: watch::Receiver<()>) -> Connection {
        app.metrics.connections.inc();
        if let Some(refusal) = slot.refusal {
            app.metrics.count_refused_connection(refusal);
        }
        Connection(Arc::new(OpenConnection { app, slot, peer, _open: open }))
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.0.slot
    }

    pub(crate) fn peer(&self) -> IpAddr {
        self.0.peer
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.app.metrics.connections.dec();
    }
}

/// Accepts connections until the server is shut down and replies in flight have ended.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Tls>, router: Router, app: SharedApp) -> Ended {
    let bounds = descriptors::connection_bounds(app.limits.max_connections);
    let connections = Connections::new(bounds, app.limits.max_connections_per_address);
    let (open, all_closed) = watch::channel(());
    let finished = watch::Sender::new(false);
    let mut shutdown = std::pin::pin!(shutdown(&app));
    let mut last_warning: Option<Instant> = None;
    let ended = loop {
        let (stream, peer) = tokio::select! {
            ended = &mut shutdown => break ended,
            accepted = accept(&listener, &connections) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Another part of the process, or another process, holds the descriptors.
                    connections.close_idle();
                    if last_warning.is_none_or(|last| last.elapsed() >= WARNING_INTERVAL) {
                        tracing::warn!(%error, "a connection could not be accepted");
                        last_warning = Some(Instant::now());
                    }
                    sleep(ACCEPT_RETRY).await;
                    continue;
                }
            },
        };
        let peer = peer.ip().to_canonical();
        let slot = connections.admit(peer, app.proxies.is_shared(peer));
        let connection = Connection::new(app.clone(), slot, peer, open.subscribe());
        let (router, tls) = (TowerToHyperService::new(router.clone()), tls.clone());
        let finish = finished.subscribe();
        tokio::spawn(async move { serve_stream(stream, tls, router, connection, finish).await });
    };
    drop(all_closed);
    finished.send_replace(true);
    let _ = timeout(FLUSH_TIMEOUT, open.closed()).await;
    ended
}

async fn accept(listener: &TcpListener, connections: &Connections) -> io::Result<(TcpStream, SocketAddr)> {
    // A connection that does not close in time must not keep others out.
    let _ = timeout(CLOSING_WAIT, connections.wait_for_closing()).await;
    listener.accept().await
}

/// Waits for a shutdown signal, and then for the replies in flight.
async fn shutdown(app: &SharedApp) -> Ended {
    let (drain, limits) = (&app.drain, &app.limits);
    tokio::select! {
        () = drain.reached(Phase::Draining) => {}
        () = stopped(app) => {
            tracing::error!(in_flight = drain.num_in_flight(), "shutting down: the engine has stopped");
            // Replies in flight send their error and end.
            let _ = timeout(FLUSH_TIMEOUT, drain.finished()).await;
            return Ended::EngineStopped;
        }
    }
    tracing::info!(
        in_flight = drain.num_in_flight(),
        timeout_s = limits.drain_timeout.as_secs(),
        "draining: completing replies in flight, refusing new requests; press Ctrl-C again (or send the signal again) \
         to stop at once"
    );
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

/// Waits until a thread that computes has ended.
async fn stopped(app: &App) {
    while app.liveness() != Liveness::Stopped {
        sleep(LIVENESS_INTERVAL).await;
    }
}

async fn serve_stream(
    stream: TcpStream,
    tls: Option<Tls>,
    router: TowerToHyperService<Router>,
    connection: Connection,
    finish: watch::Receiver<bool>,
) {
    let limits = connection.0.app.limits.clone();
    let socket = ClientSocket::new(stream, &limits);
    let watch = socket.watch();
    let exchange = Arc::new(Exchange::default());
    let service = ConnectionService { router, connection: connection.clone(), exchange: exchange.clone() };
    let watched = Watched { connection, exchange, watch };
    let Some(tls) = tls else { return serve_http(socket, service, watched, finish).await };
    let handshake = tokio::select! {
        handshake = timeout(limits.header_timeout, tls.accept(socket)) => handshake,
        () = watched.connection.slot().closed() => return,
    };
    match handshake {
        Ok(Ok(stream)) => serve_http(stream, service, watched, finish).await,
        // Port scanners and clients without TLS; an operator cannot do anything about them.
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

/// Passes the requests of one connection to the router, each with its [`Connection`].
struct ConnectionService {
    router: TowerToHyperService<Router>,
    connection: Connection,
    exchange: Arc<Exchange>,
}

impl Service<Request<Incoming>> for ConnectionService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let (mut request, in_exchange) = self.exchange.start(request, &self.connection);
        request.extensions_mut().insert(self.connection.clone());
        let response = self.router.call(request);
        Box::pin(async move { response.await.map(|response| in_exchange.answer(response)) })
    }
}

/// The connection that [`serve_http`] serves, as seen beside its stream.
struct Watched {
    connection: Connection,
    exchange: Arc<Exchange>,
    watch: SocketWatch,
}

/// Serves the HTTP requests of one connection.
async fn serve_http<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    service: ConnectionService,
    watched: Watched,
    mut finish: watch::Receiver<bool>,
) {
    let Watched { connection, exchange, watch } = watched;
    let limits = &connection.0.app.limits;
    let is_refusing = connection.slot().refusal.is_some();
    let header_timeout = if is_refusing { REFUSING_TIMEOUT.min(limits.header_timeout) } else { limits.header_timeout };
    let http = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        .keep_alive(!is_refusing)
        // A client that has closed its sending half gets its reply; `client_gone` finds out whether it still reads.
        .half_close(true)
        .serve_connection(TokioIo::new(ProbedStream::new(stream, exchange.clone())), service)
        .with_upgrades();
    let mut http = std::pin::pin!(http);
    let mut finish = std::pin::pin!(async move { drop(finish.wait_for(|finished| *finished).await) });
    let mut closed = std::pin::pin!(connection.slot().closed());
    let mut gone = std::pin::pin!(exchange.client_gone(&watch));
    let mut is_closing = false;
    let outcome = loop {
        tokio::select! {
            outcome = http.as_mut() => break outcome,
            // Dropping the connection cancels its request.
            () = &mut gone => return tracing::debug!("a client is gone"),
            () = &mut finish, if !is_closing => is_closing = true,
            () = &mut closed, if !is_closing => {
                // Without a request there is nothing to complete, not even half a head.
                if !exchange.is_busy() {
                    return;
                }
                is_closing = true;
            }
        }
        http.as_mut().graceful_shutdown();
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection ended");
    }
}
