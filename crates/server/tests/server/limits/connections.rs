//! Connections: their number, idle ones, half-closed ones, clients that are gone or slow, and wrong keys by address.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use crate::support::socket::Socket;
use crate::support::{Response, Server, Setup, chat_body, tenant};
use pellucid_server::{ForwardedHeader, Limits, Proxies};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

fn bounded(max_connections: usize) -> Server {
    let limits = Limits { max_connections, header_timeout: Duration::from_secs(3600), ..Limits::default() };
    Server::with(Setup { limits, ..Setup::default() })
}

/// Sends a request over an open connection.
fn ask_over(connection: &mut BufReader<TcpStream>, path: &str) -> Response {
    write!(connection.get_mut(), "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    Response::read(connection)
}

/// Waits until the server closes a connection, on which nothing more may arrive.
fn assert_closes(connection: &mut impl Read) {
    match connection.read(&mut [0; 64]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("still open: {other:?}"),
    }
}

#[test]
fn busy_connections_leave_some_for_health_checks_and_refusals() {
    let server = bounded(2);
    server.slow_down(50);
    let long = chat_body("\"stream\":true,\"ignore_eos\":true,\"max_tokens\":200");
    let streams = [0, 1].map(|_| server.stream(CHAT, &long));
    // Connections that send nothing do not make the next ones wait, however many there are.
    let silent: Vec<TcpStream> = (0..100).map(|_| server.connect()).collect();
    for _ in 0..3 {
        let refused = server.get("/v1/models");
        assert_eq!(refused.refused(503).1.as_deref(), Some("too_many_connections"));
        assert!(refused.header("retry-after").is_some());
        assert_eq!(refused.header("connection"), Some("close"));
        assert_eq!(server.get("/health").status, 200);
    }
    drop((streams, silent));
    server.slow_down(0);
    server.until_status("/v1/models", 200);
    assert!(server.metric("pellucid_connections_refused_total") >= 100.0);
}

#[test]
fn an_idle_connection_makes_way_for_a_new_one() {
    let server = bounded(2);
    let mut first = BufReader::new(server.connect());
    let mut second = BufReader::new(server.connect());
    assert_eq!(ask_over(&mut first, "/v1/models").status, 200);
    assert_eq!(ask_over(&mut second, "/v1/models").status, 200);
    assert_eq!(ask_over(&mut first, "/v1/models").status, 200, "the second has now been idle for longer");
    let mut third = BufReader::new(server.connect());
    assert_eq!(ask_over(&mut third, "/v1/models").status, 200);
    assert_closes(&mut second);
    // One that has sent half of its headers is idle as well.
    third.get_mut().write_all(b"GET /v1/models HTTP/1.1\r\nHo").unwrap();
    let fourth = server.connect();
    assert_closes(&mut first);
    assert_eq!(server.get("/v1/models").status, 200);
    assert_closes(&mut third);
    drop(fourth);
}

#[test]
fn idle_connections_are_closed_after_the_header_timeout() {
    let limits = Limits { header_timeout: Duration::from_millis(300), ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    for begin in ["", "GET /hea", "GET /health HTTP/1.1\r\nHost: localhost\r\n"] {
        let mut connection = server.connect();
        connection.write_all(begin.as_bytes()).unwrap();
        assert_closes(&mut connection);
    }
    let mut used = BufReader::new(server.connect());
    for _ in 0..3 {
        assert_eq!(ask_over(&mut used, "/health").status, 200);
    }
    assert_closes(&mut used);
}

/// Reads a reply after any number of interim responses; returns these as well.
fn read_final(connection: TcpStream) -> (usize, Response) {
    let mut reader = BufReader::new(connection);
    let mut num_interim = 0;
    loop {
        let response = Response::read(&mut reader);
        if response.status != 100 {
            return (num_interim, response);
        }
        num_interim += 1;
    }
}

#[test]
fn a_half_closed_client_gets_its_reply() {
    let server = Server::start();
    let seeded = "\"seed\":3,\"max_tokens\":20,\"ignore_eos\":true";
    let expected = server.chat(seeded).ok();
    let text = |reply: &Response| reply.ok()["choices"][0]["message"]["content"].clone();
    server.hold_steps();
    let half_closed = |body: &str| {
        let connection = server.send("POST", CHAT, &JSON, body.as_bytes());
        connection.shutdown(Shutdown::Write).unwrap();
        connection
    };
    let whole = half_closed(&chat_body(seeded));
    let streamed = half_closed(&chat_body(&format!("{seeded},\"stream\":true")));
    // A client of HTTP/1.0 does not know interim responses.
    let mut old = server.connect();
    let body = chat_body(seeded);
    let head =
        format!("POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
    old.write_all(format!("{head}{body}").as_bytes()).unwrap();
    old.shutdown(Shutdown::Write).unwrap();
    // The interim response shows that the server has seen the end before it has the reply.
    let mut line = String::new();
    let mut reader = BufReader::new(whole.try_clone().unwrap());
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "HTTP/1.1 100 Continue\r\n");
    reader.read_line(&mut line).unwrap();
    server.release_steps();
    assert_eq!(text(&Response::read(&mut reader)), expected["choices"][0]["message"]["content"]);
    let (num_interim, reply) = read_final(old);
    assert_eq!((num_interim, text(&reply)), (0, expected["choices"][0]["message"]["content"].clone()));
    let (_, reply) = read_final(streamed);
    assert!(reply.text().ends_with("data: [DONE]\n\n"), "{}", reply.text());
    assert_eq!(server.metric("pellucid_engine_cancels_total"), 0.0);
}

#[test]
fn a_client_that_is_gone_is_noticed_while_its_reply_is_computed() {
    let server = Server::start();
    server.slow_down(50);
    let long = "\"ignore_eos\":true,\"max_tokens\":230";
    // Closed with nothing unread (a FIN on the wire), half-closed before that, and with the next request on the way.
    let closed = server.send("POST", CHAT, &JSON, chat_body(long).as_bytes());
    let half_closed = server.send("POST", CHAT, &JSON, chat_body(long).as_bytes());
    let mut pipelined = server.send("POST", CHAT, &JSON, chat_body(long).as_bytes());
    server.until("pellucid_sequences_running", 3.0);
    half_closed.shutdown(Shutdown::Write).unwrap();
    pipelined.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    drop((closed, half_closed, pipelined));
    server.settles();
    assert_eq!(server.metric("pellucid_engine_cancels_total"), 3.0);
}

/// Sends a body of which one byte arrives now and then, until the server answers.
fn trickle(server: &Server) -> Response {
    let mut connection = server.connect();
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000";
    write!(connection, "{head}\r\n\r\n{{").unwrap();
    let mut sender = connection.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        while sender.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let response = Response::read(&mut BufReader::new(&connection));
    // Fails if the server has closed the connection already, which ends the sender too.
    let _ = connection.shutdown(Shutdown::Both);
    sending.join().unwrap();
    response
}

#[test]
fn a_body_that_trickles_in_is_cut_off() {
    let with_rate = |min_transfer_rate: u32| {
        let limits = Limits { body_timeout: Duration::from_secs(3), min_transfer_rate, ..Limits::default() };
        Server::with(Setup { limits, ..Setup::default() })
    };
    assert_eq!(trickle(&with_rate(1024)).refused(408).1.as_deref(), Some("body_too_slow"));
    // The control: without a minimum, only the time for the whole body ends it.
    assert_eq!(trickle(&with_rate(0)).refused(408).1.as_deref(), Some("body_timeout"));
}

#[test]
fn wrong_keys_are_throttled_by_address() {
    let trusted = vec!["127.0.0.1".parse().unwrap()];
    let server = Server::with(Setup {
        tenants: vec![tenant("a", "key-of-a"), tenant("b", "key-of-b")],
        limits: Limits { max_wrong_keys: 3, ..Limits::default() },
        proxies: Proxies { trusted, header: ForwardedHeader::XForwardedFor },
        ..Setup::default()
    });
    let ask = |address: &str, key: &str| {
        server.request("GET", "/v1/models", &[("X-Forwarded-For", address), ("X-Api-Key", key)], b"")
    };
    let (guesser, other) = ("203.0.113.1", "203.0.113.2");
    assert_eq!(ask(guesser, "key-of-a").status, 200);
    for number in 0..3 {
        ask(guesser, &format!("guess-{number}")).refused(401);
    }
    let refused = ask(guesser, "guess-3");
    assert_eq!(refused.refused(429).1.as_deref(), Some("too_many_wrong_keys"));
    assert!(refused.header("retry-after").is_some());
    // A correct guess is refused like a wrong one; a key that was used there before and other addresses are not.
    ask(guesser, "key-of-b").refused(429);
    assert_eq!(ask(guesser, "key-of-a").status, 200);
    assert_eq!(ask(other, "key-of-b").status, 200);
    // The client cannot choose another address: the proxy appends the true one.
    ask(&format!("198.51.100.9, {guesser}"), "key-of-b").refused(429);
    assert_eq!(server.request("GET", "/health", &[("X-Forwarded-For", guesser)], b"").status, 200);
    server.request("GET", "/v1/models", &[("X-Forwarded-For", guesser)], b"").refused(401);
    let (status, _) = Socket::open(&server, &format!("X-Forwarded-For: {guesser}\r\nX-Api-Key: guess-4\r\n"));
    assert_eq!(status, 429);
}

/// A short body leaves the threads of connections if the template takes long, whatever the length.
#[test]
fn a_costly_template_delays_no_other_client() {
    let template = "{% for a in range(500) %}{% for b in range(200) %}{% endfor %}{% endfor %}\
                    {% for m in messages %}{{ m.content }}{% endfor %}";
    let server = Server::with(Setup { template, ..Setup::default() });
    let (path, body) = ("/apply-template", r#"{"messages":[{"role":"user","content":"hi"}]}"#);
    // The first rendering tells that it is costly.
    server.post(path, body).ok();
    let clients: Vec<_> = (0..24).map(|_| server.send("POST", path, &JSON, body.as_bytes())).collect();
    server.get("/health").ok();
    let is_answered = |client: &TcpStream| {
        client.set_nonblocking(true).unwrap();
        client.peek(&mut [0]).is_ok()
    };
    let num_answered = clients.iter().filter(|client| is_answered(client)).count();
    assert!(num_answered < 12, "{num_answered} of 24 renderings were answered before /health");
}
