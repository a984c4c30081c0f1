//! The socket of a client: cuts readers off that are too slow, and notices clients that are gone.
//!
//! A client may close its sending half after a request and still read the reply, as `shutdown(SHUT_WR)` does. On the
//! wire this looks like a client that has closed everything. Only bytes sent to it tell the difference: a closed socket
//! answers them with a reset. `connection::exchange` sends such bytes; a reset, or keep-alive probes without an answer,
//! appear here as an error of the socket.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::transfer_rate::TransferRate;
use crate::state::Limits;

/// Time without traffic after which the system asks whether the client is still there.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(60);
/// Time between such questions.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Unanswered questions after which the connection counts as lost.
const KEEP_ALIVE_COUNT: u32 = 4;
/// Minimum time after which bytes that nobody acknowledges end the connection.
const UNACKNOWLEDGED: Duration = Duration::from_secs(120);
/// Interval at which a socket with unread bytes is checked for its end.
const PIPELINED_CHECK: Duration = Duration::from_secs(1);

/// A TCP stream whose writes fail when the client reads more slowly than the minimum rate.
#[derive(Debug)]
pub(crate) struct ClientSocket {
    tcp: Arc<TcpStream>,
    rate: TransferRate,
    /// Runs while a write is pending.
    timer: Option<Pin<Box<Sleep>>>,
}

/// Watches a socket that something else reads and writes.
#[derive(Debug, Clone)]
pub(crate) struct SocketWatch(Arc<TcpStream>);

impl ClientSocket {
    pub(crate) fn new(tcp: TcpStream, limits: &Limits) -> ClientSocket {
        // Fails only if the client has already reset the connection, which the first read reports.
        let _ = set_options(&tcp, limits);
        let rate = TransferRate::new(limits.min_transfer_rate, limits.write_timeout);
        ClientSocket { tcp: Arc::new(tcp), rate, timer: None }
    }

    pub(crate) fn watch(&self) -> SocketWatch {
        SocketWatch(self.tcp.clone())
    }

    /// Tries `write` until the socket takes bytes, would block, or has blocked for too long.
    fn poll_try(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if let Poll::Ready(ready) = self.tcp.poll_write_ready(context) {
                ready?;
                match write(&self.tcp) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Ok(num_bytes) => {
                        self.rate.moved(num_bytes, Instant::now());
                        self.timer = None;
                        return Poll::Ready(Ok(num_bytes));
                    }
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            let deadline = self.rate.wait(Instant::now());
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            ready!(timer.as_mut().poll(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
    }
}

#[cfg(target_os = "linux")]
fn set_options(tcp: &TcpStream, limits: &Limits) -> io::Result<()> {
    use rustix::net::sockopt;
    // Tokens are small and must be sent at once.
    tcp.set_nodelay(true)?;
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(tcp, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(tcp, KEEP_ALIVE_COUNT)?;
    // Also ends connections whose client accepts nothing, so it must not be shorter than `write_timeout`.
    let timeout = UNACKNOWLEDGED.max(limits.write_timeout);
    Ok(sockopt::set_tcp_user_timeout(tcp, timeout.as_millis() as u32)?)
}

#[cfg(not(target_os = "linux"))]
fn set_options(tcp: &TcpStream, _: &Limits) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    Ok(rustix::net::sockopt::set_socket_keepalive(tcp, true)?)
}

impl SocketWatch {
    /// Waits until the connection is reset, or lost without an answer.
    pub(crate) async fn lost(&self) {
        let _ = self.0.ready(Interest::ERROR).await;
    }

    /// Waits until the client sends nothing more. It may still read.
    pub(crate) async fn finished_sending(&self) {
        while let Ok(ready) = self.0.ready(Interest::READABLE).await {
            if ready.is_read_closed() {
                return;
            }
            // The client has sent its next request before it has read the reply, and the end may come after that.
            sleep(PIPELINED_CHECK).await;
        }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.tcp.poll_read_ready(context))?;
            match self.tcp.try_read_buf(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                outcome => return Poll::Ready(outcome.map(drop)),
            }
        }
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_try(context, |tcp| tcp.try_write(bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = rustix::net::shutdown(&*self.tcp, rustix::net::Shutdown::Write);
        Poll::Ready(closed.map_err(io::Error::from))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_try(context, |tcp| tcp.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use tokio::io::AsyncWriteExt;

    /// Writes 16 MiB, more than the system buffers, to a client that pauses before each read of 1,000 bytes.
    fn write_to(pause: Duration) -> io::Result<()> {
        let limits =
            Limits { write_timeout: Duration::from_millis(500), min_transfer_rate: 1 << 20, ..Limits::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (tcp, _) = listener.accept().await.unwrap();
            let reading = std::thread::spawn(move || {
                let mut buffer = vec![0; if pause.is_zero() { 1 << 20 } else { 1000 }];
                while client.read(&mut buffer).is_ok_and(|num_bytes| num_bytes > 0) {
                    std::thread::sleep(pause);
                }
            });
            let mut socket = ClientSocket::new(tcp, &limits);
            let outcome = socket.write_all(&vec![0; 16 << 20]).await;
            drop(socket);
            if pause.is_zero() {
                reading.join().unwrap();
            }
            outcome
        })
    }

    #[test]
    fn a_reader_below_the_minimum_rate_is_cut_off() {
        assert_eq!(write_to(Duration::from_millis(10)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        write_to(Duration::ZERO).expect("the control: a reader above the rate gets everything");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_vanished_client_is_found_by_keep_alive_probes() {
        use rustix::net::sockopt;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (tcp, _) = listener.accept().await.unwrap();
            assert!(!sockopt::socket_keepalive(&tcp).unwrap(), "the control");
            let socket = ClientSocket::new(tcp, &Limits::default());
            assert!(sockopt::socket_keepalive(&*socket.tcp).unwrap());
            assert_eq!(sockopt::tcp_keepidle(&*socket.tcp).unwrap(), KEEP_ALIVE_IDLE);
            assert_eq!(sockopt::tcp_user_timeout(&*socket.tcp).unwrap(), UNACKNOWLEDGED.as_millis() as u32);
        });
    }
}
