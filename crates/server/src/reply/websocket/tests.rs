//! Tests of a socket over a pipe in memory: cases of the protocol, and the bound of each buffer.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};

use super::assembler::{Assembler, FRAMES_PER_MINUTE, PAUSE_BYTES, Step};
use super::close_reason::CloseReason;
use super::socket::{Socket, SocketTimes};
use crate::http::error::ApiError;
use crate::limits::client_memory::ClientMemory;
use crate::limits::tenants::Tenants;

const MASK: [u8; 4] = [9, 8, 7, 6];
/// A message of the maximum length in [`feed`].
const LARGEST: &str = match str::from_utf8(&[b'x'; 1000]) {
    Ok(text) => text,
    Err(_) => "",
};
const NEVER: Duration = Duration::from_secs(3600);
const CALM: SocketTimes = SocketTimes { ping: NEVER, pong: NEVER, message: NEVER, bytes_per_s: 0, grace: NEVER };

/// Returns a frame of a client; `first` is its first byte.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    super::frame::write(super::frame::Opcode::Text, payload, &mut frame);
    let head_len = frame.len() - payload.len();
    frame[0] = first;
    frame[1] |= 0x80;
    let masked: Vec<u8> = payload.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
    [&frame[..head_len], &MASK, &masked].concat()
}

/// Returns an assembler with `total` bytes of memory for clients, and the gauge of the bytes in use.
fn assembler(total: usize, max_message: usize) -> (Assembler, Gauge) {
    let used = Gauge::default();
    let memory = Arc::new(ClientMemory::new(total, 1, used.clone()));
    let tenant = Tenants::open().find(None).unwrap();
    (Assembler::new(memory, tenant, max_message), used)
}

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(test)
}

fn connect(times: SocketTimes, assembler: Assembler) -> (Socket<DuplexStream>, DuplexStream) {
    let (server, client) = duplex(64 << 10);
    (Socket::new(server, times, assembler), client)
}

/// Feeds `bytes` in parts of `part` bytes. Returns the messages, the answers, and the reason to close.
fn feed(bytes: &[u8], part: usize) -> (Vec<String>, Vec<u8>, Option<CloseReason>) {
    let (mut assembler, _) = assembler(1 << 20, 1000);
    let (mut messages, mut answers, mut buffer) = (Vec::new(), Vec::new(), Vec::new());
    for part in bytes.chunks(part) {
        buffer.extend_from_slice(part);
        loop {
            let (mut rest, mut output) = (&buffer[..], Vec::new());
            let step = assembler.process(&mut rest, &mut output);
            let num_left = rest.len();
            buffer.drain(..buffer.len() - num_left);
            answers.extend(output);
            match step {
                Ok(Step::Message(message)) => messages.push(String::from_utf8(message.bytes).unwrap()),
                Ok(Step::Begun | Step::NeedsFlush) => {}
                Ok(Step::NeedsInput) => break,
                Err(reason) => return (messages, answers, Some(reason)),
            }
        }
    }
    (messages, answers, None)
}

/// The cases of the Autobahn test suite that concern a server of text messages.
#[test]
fn frames_become_messages() {
    type Case = (&'static str, Vec<u8>, Vec<&'static str>, Vec<u8>, Option<u16>);
    let close = |payload: &[u8]| frame(0x88, payload);
    let text = |text: &str| frame(0x81, text.as_bytes());
    let cases: Vec<Case> = vec![
        ("1.1 whole messages", [text(""), text("hello")].concat(), vec!["", "hello"], vec![], None),
        ("1.2 binary", frame(0x82, b"x"), vec![], vec![], Some(1003)),
        ("2.1 ping", frame(0x89, b""), vec![], vec![0x8a, 0], None),
        ("2.2 ping with payload", frame(0x89, b"\xff\x00a"), vec![], vec![0x8a, 3, 0xff, 0, b'a'], None),
        ("2.4 ping of 125 bytes", frame(0x89, &[1; 125]), vec![], [vec![0x8a, 125], vec![1; 125]].concat(), None),
        ("2.5 ping of 126 bytes", frame(0x89, &[1; 126]), vec![], vec![], Some(1002)),
        ("2.7 pong that nothing asked for", [frame(0x8a, b"x"), text("a")].concat(), vec!["a"], vec![], None),
        ("2.10 pings in order", frame(0x89, b"1").repeat(3), vec![], [0x8a, 1, b'1'].repeat(3), None),
        ("3.1 reserved bit", frame(0xc1, b"x"), vec![], vec![], Some(1002)),
        ("3.2 reserved bit after a message", [text("a"), frame(0x91, b"")].concat(), vec!["a"], vec![], Some(1002)),
        ("4.1 reserved opcode", frame(0x83, b""), vec![], vec![], Some(1002)),
        ("4.2 reserved control opcode", frame(0x8b, b""), vec![], vec![], Some(1002)),
        ("5.1 fragmented ping", frame(0x09, b"x"), vec![], vec![], Some(1002)),
        ("5.3 fragments", [frame(0x01, b"ab"), frame(0x80, b"cd")].concat(), vec!["abcd"], vec![], None),
        (
            "5.6 a ping between fragments",
            [frame(0x01, b"ab"), frame(0x89, b"p"), frame(0x00, b""), frame(0x80, b"cd")].concat(),
            vec!["abcd"],
            vec![0x8a, 1, b'p'],
            None,
        ),
        ("5.9 nothing to continue", frame(0x80, b"x"), vec![], vec![], Some(1002)),
        (
            "5.15 nothing to continue after a message",
            [frame(0x01, b"a"), frame(0x80, b"b"), frame(0x00, b"c")].concat(),
            vec!["ab"],
            vec![],
            Some(1002),
        ),
        ("5.18 a message inside another", [frame(0x01, b"a"), frame(0x81, b"b")].concat(), vec![], vec![], Some(1002)),
        (
            "6.2 UTF-8 across fragments",
            [frame(0x01, &"κόσμε".as_bytes()[..3]), frame(0x80, &"κόσμε".as_bytes()[3..])].concat(),
            vec!["κόσμε"],
            vec![],
            None,
        ),
        ("6.3 invalid UTF-8", frame(0x81, b"a\xed\xa0\x80b"), vec![], vec![], Some(1007)),
        ("6.4 UTF-8 that ends early", frame(0x81, &"κ".as_bytes()[..1]), vec![], vec![], Some(1007)),
        ("7.1 nothing after a close", [close(&[3, 232]), text("a")].concat(), vec![], vec![], Some(1000)),
        ("7.3 empty close", close(b""), vec![], vec![], Some(1000)),
        ("7.3 close of one byte", close(b"\x03"), vec![], vec![], Some(1002)),
        ("7.5 close reason that is not UTF-8", close(b"\x03\xe8\xff"), vec![], vec![], Some(1007)),
        ("7.7 close code", close(&[0x0b, 0xb8]), vec![], vec![], Some(3000)),
        ("7.9 close code that must not be sent", close(&[0x03, 0xed]), vec![], vec![], Some(1002)),
        ("a close between fragments", [frame(0x01, b"a"), close(&[3, 233])].concat(), vec![], vec![], Some(1001)),
        ("no mask", vec![0x81, 1, b'a'], vec![], vec![], Some(1002)),
        ("the largest message", frame(0x81, &[b'x'; 1000]), vec![LARGEST], vec![], None),
        ("too large a message", frame(0x81, &[b'x'; 1001]), vec![], vec![], Some(1009)),
        (
            "too large in fragments",
            [frame(0x01, &[b'x'; 600]), frame(0x80, &[b'x'; 401])].concat(),
            vec![],
            vec![],
            Some(1009),
        ),
        (
            "a length of 2^63 - 1",
            vec![0x81, 0xff, 0x7f, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0],
            vec![],
            vec![],
            Some(1009),
        ),
        (
            "a length of 2^64 - 1",
            vec![0x81, 0xff, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0],
            vec![],
            vec![],
            Some(1002),
        ),
    ];
    for (name, bytes, messages, answers, code) in cases {
        for part in [1, 2, 3, 7, bytes.len()] {
            let (found, replies, reason) = feed(&bytes, part);
            assert_eq!(found, messages, "{name}, parts of {part}");
            assert_eq!(replies, answers, "{name}, parts of {part}");
            assert_eq!(reason.and_then(|reason| reason.code()), code, "{name}, parts of {part}");
        }
    }
}

/// Frames that carry nothing are counted, whatever their kind.
#[test]
fn frames_without_content_are_limited() {
    let limit = FRAMES_PER_MINUTE as usize;
    let fragments = |count: usize| [frame(0x01, b"a"), frame(0x00, b"").repeat(count)].concat();
    for (name, of) in [
        ("pings", &(|count| frame(0x89, b"").repeat(count)) as &dyn Fn(usize) -> Vec<u8>),
        ("pongs", &|count| frame(0x8a, b"x").repeat(count)),
        ("empty fragments", &fragments),
    ] {
        assert_eq!(feed(&of(limit), 1000).2, None, "{name}");
        assert_eq!(feed(&of(2 * limit), 1000).2, Some(CloseReason::TooManyFrames), "{name}");
    }
}

/// However much input there is, answers wait in a bounded buffer until they are written.
#[test]
fn answers_to_pings_pause_the_input() {
    let mut assembler = assembler(1 << 20, 1000).0;
    let pings = frame(0x89, &[b'x'; 125]).repeat(200);
    let (mut rest, mut output, mut num_pauses) = (pings.as_slice(), Vec::new(), 0);
    while let Step::NeedsFlush = assembler.process(&mut rest, &mut output).unwrap() {
        assert!((PAUSE_BYTES..PAUSE_BYTES + 127).contains(&output.len()), "{} bytes", output.len());
        output.clear();
        num_pauses += 1;
    }
    assert_eq!(num_pauses, 200 * 127 / (PAUSE_BYTES + 127));
    assert!(rest.is_empty());
}

/// Lets the client write frames and the server process them until neither can go on; returns the bytes that the client
/// could write, and the reason to close. The client reads if `reads`.
async fn pump(
    socket: &mut Socket<DuplexStream>,
    client: &mut DuplexStream,
    input: &[u8],
    reads: bool,
) -> (usize, Vec<u8>, Option<CloseReason>) {
    let (mut sent, mut received) = (0, Vec::new());
    let mut next = pin!(socket.next());
    let step = |context: &mut Context<'_>| {
        loop {
            let before = (sent, received.len());
            if sent < input.len()
                && let Poll::Ready(Ok(len)) = Pin::new(&mut *client).poll_write(context, &input[sent..])
            {
                sent += len;
            }
            if let Poll::Ready(outcome) = next.as_mut().poll(context) {
                return Poll::Ready(outcome.err());
            }
            let mut space = [0; 512];
            let mut buffer = ReadBuf::new(&mut space);
            if reads && Pin::new(&mut *client).poll_read(context, &mut buffer).is_ready() {
                received.extend_from_slice(buffer.filled());
            }
            if before == (sent, received.len()) {
                return Poll::Ready(None);
            }
        }
    };
    let reason = tokio::task::coop::unconstrained(std::future::poll_fn(step)).await;
    (sent, received, reason)
}

/// A client that sends pings and does not read them is not read either.
#[test]
fn nothing_is_read_while_the_client_does_not_read() {
    let pings = frame(0x89, &[7; 125]).repeat(500);
    let pong = [vec![0x8a, 125], vec![7; 125]].concat();
    let pipe = 1024;
    run(async {
        let (server, mut client) = duplex(pipe);
        let mut socket = Socket::new(server, CALM, assembler(1 << 20, 1000).0);
        let (sent, _, reason) = pump(&mut socket, &mut client, &pings, false).await;
        assert_eq!(reason, None);
        // Two pipes, one buffer of input, and the pongs that wait; a frame of 131 bytes gets a pong of 127.
        assert!(sent < 2 * pipe + 3 * PAUSE_BYTES, "{sent} of {} bytes were read", pings.len());
        assert!(socket.num_unsent() <= PAUSE_BYTES + pong.len());
        // Positive control: when the client reads, all pings are answered.
        let (rest, received, reason) = pump(&mut socket, &mut client, &pings[sent..], true).await;
        assert_eq!((reason, sent + rest), (None, pings.len()));
        assert_eq!(received, pong.repeat(500));
    });
}

/// Memory is taken as the bytes of a message arrive, not when it is announced, and given back when it is refused.
#[test]
fn an_unfinished_message_takes_memory_as_it_arrives() {
    run(async {
        let (assembler, used) = assembler(64 << 10, 1 << 20);
        let (mut socket, mut client) = connect(CALM, assembler);
        let message = frame(0x81, &[b'x'; 1 << 20]);
        client.write_all(&message[..14]).await.unwrap();
        socket.begun().await.unwrap();
        assert_eq!(used.get(), 0, "the announced length takes nothing");
        let (sent, _, reason) = pump(&mut socket, &mut client, &message[14..20_014], true).await;
        assert_eq!((sent, reason), (20_000, None));
        assert!((20_000..40_000).contains(&used.get()), "{} bytes for 20,000", used.get());
        let (_, _, reason) = pump(&mut socket, &mut client, &message[20_014..], true).await;
        let Some(CloseReason::Refused(ApiError { status, .. })) = reason else { panic!("{reason:?}") };
        assert_eq!(status.as_u16(), 413);
        assert!(used.get() <= 64 << 10);
        let reason = reason.unwrap();
        tokio::join!(socket.close(&reason), async {
            let mut farewell = Vec::new();
            client.read_to_end(&mut farewell).await.unwrap();
            let text = String::from_utf8_lossy(&farewell);
            assert!(text.contains("\"code\":\"request_too_large\""), "{text}");
            assert!(farewell.windows(4).any(|bytes| bytes == [0x88, 19, 0x03, 0xf1]), "close code 1009: {text}");
            drop(client);
        });
        assert_eq!(used.get(), 0);
    });
}

#[test]
fn a_silent_client_is_asked_and_then_given_up() {
    run(async {
        let times = SocketTimes { ping: Duration::from_millis(1), pong: Duration::from_millis(1), ..CALM };
        let (mut socket, mut client) = connect(times, assembler(1 << 20, 1000).0);
        assert_eq!(socket.next().await.unwrap_err(), CloseReason::NoPong);
        let mut ping = [0; 2];
        client.read_exact(&mut ping).await.unwrap();
        assert_eq!(ping, [0x89, 0]);
        // Positive control: a client that answers may be silent for as long as it likes.
        let times = SocketTimes { ping: Duration::from_millis(1), ..CALM };
        let (mut socket, mut client) = connect(times, assembler(1 << 20, 1000).0);
        let answering = async {
            for _ in 0..5 {
                client.read_exact(&mut ping).await.unwrap();
                client.write_all(&frame(0x8a, b"")).await.unwrap();
            }
            client.write_all(&frame(0x81, b"still here")).await.unwrap();
        };
        let (message, ()) = tokio::join!(socket.next(), answering);
        assert_eq!(message.unwrap().bytes, b"still here");
    });
}

#[test]
fn a_message_that_stalls_is_given_up() {
    run(async {
        let times = SocketTimes { message: Duration::from_millis(1), ..CALM };
        let (mut socket, mut client) = connect(times, assembler(1 << 20, 1000).0);
        client.write_all(&frame(0x01, b"a part")).await.unwrap();
        assert!(matches!(socket.next().await, Err(CloseReason::Late(_))));
        // Positive control: without a beginning there is nothing to be late.
        let (mut socket, mut client) = connect(times, assembler(1 << 20, 1000).0);
        let (message, ()) = tokio::join!(socket.next(), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            client.write_all(&frame(0x81, b"whole")).await.unwrap();
        });
        assert_eq!(message.unwrap().bytes, b"whole");
    });
}

/// A client that sends a byte now and then would hold its message for the whole time that a message may take.
#[test]
fn a_message_that_trickles_in_is_given_up() {
    run(async {
        let trickle = |times: SocketTimes| async move {
            let (mut socket, mut client) = connect(times, assembler(1 << 20, 1000).0);
            let whole = frame(0x81, &[b'a'; 60]);
            let sending = async {
                for byte in whole {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    if client.write_all(&[byte]).await.is_err() {
                        break;
                    }
                }
            };
            tokio::select! { next = socket.next() => next, () = sending => socket.next().await }
        };
        let slow = SocketTimes { bytes_per_s: 10_000, grace: Duration::from_millis(20), ..CALM };
        assert_eq!(trickle(slow).await.err(), Some(CloseReason::Late("the message arrives too slowly")));
        // Positive control: the same bytes are enough for another rate.
        let patient = SocketTimes { grace: Duration::from_secs(60), ..slow };
        assert_eq!(trickle(patient).await.unwrap().bytes, [b'a'; 60]);
    });
}

/// A large message is charged until the client has accepted it.
#[test]
fn unsent_output_takes_memory() {
    run(async {
        let (assembler, used) = assembler(1 << 20, 1000);
        let (server, mut client) = duplex(1024);
        let mut socket = Socket::new(server, CALM, assembler);
        let text = "x".repeat(100_000);
        {
            let mut sending = pin!(socket.send(text.as_bytes()));
            assert!(std::future::poll_fn(|context| Poll::Ready(sending.as_mut().poll(context).is_pending())).await);
            assert!(used.get() >= 100_000);
            let mut received = vec![0; 100_010];
            let (sent, read) = tokio::join!(sending, client.read_exact(&mut received));
            assert!(sent.is_ok() && read.is_ok());
        }
        assert!(used.get() <= PAUSE_BYTES as i64);
        let refused = socket.send("x".repeat(2 << 20).as_bytes()).await.unwrap_err();
        assert_eq!(refused.code(), Some(1009), "it can never fit");
    });
}
