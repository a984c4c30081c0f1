//! Standard output and standard error that cannot be written: a full disk, a reader that has exited, and a pipe that
//! nobody reads. `serve` goes on; `run` ends with an error, ends quietly, or waits for its reader.

#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write, pipe};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::tiny_model::{TEMPLATE, tiny_model};
use crate::support::{Home, Ran};

/// Bytes that a pipe of Linux holds.
const PIPE_BYTES: usize = 64 << 10;
/// Time in which everything here ends on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

fn full_disk() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

/// A pipe whose reader has exited.
fn dead_pipe() -> PipeWriter {
    pipe().unwrap().1
}

/// A server whose log is not readable, so that the test chooses the port.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    fn start(home: &Home, model: &str, more: &[&str], log: impl Into<Stdio>) -> Served {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let port = address.port().to_string();
        let base = ["serve", "--model", model, "--device", "cpu", "--port", &port];
        Served::spawn(home.command(&[&base, more].concat()), address, log)
    }

    fn spawn(mut command: Command, address: SocketAddr, log: impl Into<Stdio>) -> Served {
        let mut child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let address = address.to_string();
        while TcpStream::connect(&address).is_err() {
            assert_eq!(child.try_wait().unwrap(), None, "the server ended at its start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Served { child, address }
    }

    /// Sends requests over one connection and counts those that were answered by 200.
    fn answered(&self, num_requests: usize) -> usize {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let id = "i".repeat(64);
        (0..num_requests)
            .take_while(|_| {
                let head = format!("GET /v1/models HTTP/1.1\r\nHost: {}\r\nX-Request-Id: {id}\r\n\r\n", self.address);
                stream.write_all(head.as_bytes()).is_ok() && read_reply(&mut reader).is_some()
            })
            .count()
    }

    fn metrics(&self) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    fn dropped(&self, reason: &str) -> u64 {
        let (metrics, name) = (self.metrics(), format!("pellucid_log_lines_dropped_total{{reason=\"{reason}\"}} "));
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap_or_else(|| panic!("{name} in {metrics}")).parse().unwrap()
    }

    /// Waits until this many lines could not be written: the log is behind the replies.
    fn wait_for_failed_lines(&self, num_lines: u64) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while self.dropped("write_failed") < num_lines {
            assert!(Instant::now() < deadline, "{}", self.metrics());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the server by SIGTERM and returns its status.
    fn terminate(mut self) -> Option<i32> {
        signal(&self.child, "-TERM");
        self.child.wait().unwrap().code()
    }
}

/// Reads one reply with a Content-Length; returns its body if its status is 200.
fn read_reply(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut lines = reader.by_ref().lines().map_while(Result::ok);
    let is_ok = lines.next()?.contains(" 200 ");
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).map(|line| line.to_lowercase()).collect();
    let len = headers.iter().find_map(|line| line.strip_prefix("content-length: "))?.parse().ok()?;
    let mut body = vec![0; len];
    reader.read_exact(&mut body).ok()?;
    is_ok.then_some(body)
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_log_on_a_full_disk_stops_no_request() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let served = Served::start(&home, &model, &[], full_disk());
    assert_eq!(served.answered(60), 60);
    served.wait_for_failed_lines(60);
    assert_eq!(served.dropped("queue_full"), 0);
    assert_eq!(served.terminate(), Some(143));
}

#[test]
fn a_log_at_the_limit_of_file_sizes_stops_no_request() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let port = address.port().to_string();
    let command = home.command(&["serve", "--model", &model, "--device", "cpu", "--port", &port]);
    let mut limited = Command::new("/bin/sh");
    limited.args(["-c", "ulimit -f 4; exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
    limited.env_clear().env("PELLUCID_HOME", home.path());
    let log = File::create(home.path().join("log")).unwrap();
    let served = Served::spawn(limited, address, log);
    assert_eq!(served.answered(60), 60);
    served.wait_for_failed_lines(1);
    assert_eq!(served.terminate(), Some(143));
}

#[test]
fn a_log_whose_reader_has_exited_stops_no_request() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let served = Served::start(&home, &model, &["--log-format", "json"], dead_pipe());
    assert_eq!(served.answered(60), 60);
    served.wait_for_failed_lines(60);
    assert_eq!(served.terminate(), Some(143));
}

#[test]
fn a_log_that_nobody_reads_stops_no_request_and_no_shutdown() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let (log, writer) = full_pipe();
    let served = Served::start(&home, &model, &[], writer);
    assert_eq!(served.answered(60), 60);
    assert_eq!(served.terminate(), Some(143));
    drop(log);
}

#[test]
fn lines_lost_in_a_full_queue_are_counted_and_told_of_when_the_reader_is_back() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let (log, writer) = full_pipe();
    let served = Served::start(&home, &model, &["--log-format", "json"], writer);
    // A line has more than 150 bytes, and the queue has 1 MiB.
    assert_eq!(served.answered(8000), 8000);
    let num_lost = served.dropped("queue_full");
    assert!(num_lost > 0);
    let lines = std::thread::spawn(move || {
        let mut log = BufReader::new(log);
        std::io::copy(&mut log.by_ref().take(PIPE_BYTES as u64), &mut std::io::sink()).unwrap();
        log.lines().map(Result::unwrap).collect::<Vec<String>>()
    });
    assert_eq!(served.answered(60), 60);
    assert_eq!(served.terminate(), Some(143));
    let lines = lines.join().unwrap();
    let parsed = |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|_| panic!("{line}"));
    let messages: Vec<String> = lines.iter().map(|line| parsed(line)["message"].to_string()).collect();
    let told = messages.iter().filter_map(|message| message.strip_suffix(" lost because they could not be written\""));
    let told: u64 = told.map(|text| text.trim_matches('"').split(' ').next().unwrap().parse::<u64>().unwrap()).sum();
    assert!(told >= num_lost, "{told} of {num_lost}");
    assert!(messages.last().unwrap().contains("every reply was finished"), "{messages:?}");
}

#[test]
fn every_line_of_a_json_log_is_json() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let broken = home.path().join("broken.gguf");
    std::fs::write(&broken, "GGUF").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let cases: [&[&str]; 2] =
        [&["--model", broken.to_str().unwrap(), "--port", "0"], &["--model", &model, "--port", &port]];
    for arguments in cases {
        let mut command = home.command(&[&["serve", "--log-format", "json"], arguments].concat());
        let ran = Ran::from(command.env("PELLUCID_UNKNOWN", "1").output().unwrap());
        assert_eq!(ran.status, Some(1));
        let lines: Vec<serde_json::Value> =
            ran.stderr.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
        assert!(ran.stderr.contains("PELLUCID_UNKNOWN"), "{ran:?}");
        assert_eq!(lines.last().unwrap()["level"], "ERROR", "{ran:?}");
    }
}

#[test]
fn a_full_disk_is_an_error_of_run_and_of_the_other_commands() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let commands: [&[&str]; 5] = [
        &["run", "Hello", "--model", &model, "-n", "4"],
        &["explain", "Hello", "--model", &model, "-n", "2"],
        &["inspect", &model],
        &["inspect", &model, "--json"],
        &["list", "--json"],
    ];
    for arguments in commands {
        let ran = Ran::from(home.command(arguments).stdout(full_disk()).output().unwrap());
        let error = ran.error();
        assert!(
            error.starts_with("error: could not write to standard output: No space left"),
            "{arguments:?}: {ran:?}"
        );
        assert_eq!(error.lines().count(), 1, "{ran:?}");
    }
}

#[test]
fn a_reader_of_standard_output_that_has_exited_ends_a_command_quietly() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let commands: [&[&str]; 3] = [
        &["run", "Hello", "--model", &model, "--temperature", "1", "--seed", "1"],
        &["explain", "Hello", "--model", &model, "-n", "2"],
        &["inspect", &model],
    ];
    for arguments in commands {
        let ran = Ran::from(home.command(arguments).stdout(dead_pipe()).output().unwrap());
        assert!(ran.status == Some(0) && !ran.stderr.contains("error"), "{arguments:?}: {ran:?}");
    }
}

#[test]
fn a_standard_error_that_cannot_be_written_changes_no_reply() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let arguments =
        ["run", "Hello", "--model", &model, "-n", "8", "--top-k", "4", "--seed", "1", "--kv-memory", "8MiB"];
    let expected = home.run(&arguments);
    for unwritable in [Stdio::from(full_disk()), Stdio::from(dead_pipe())] {
        let ran = Ran::from(home.command(&arguments).stderr(unwritable).output().unwrap());
        assert_eq!(ran.ok(), expected.ok());
    }
}

#[test]
fn ctrl_c_ends_a_run_that_waits_for_its_reader() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let arguments = ["run", "Hello", "--model", &model, "--top-k", "4", "--seed", "1"];
    let (output, writer) = full_pipe();
    let mut child = home.command(&arguments).stdout(writer).spawn().unwrap();
    // The sampling steps are shown after the handler is installed and before the reply begins.
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("top_k"), "{line}");
    signal(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(output);
    // A standard error that nobody reads does not keep the program alive either.
    let (errors, writer) = full_pipe();
    let mut child = home.command(&arguments).stdout(Stdio::piped()).stderr(writer).spawn().unwrap();
    wait_for_interrupt_handler(&child);
    signal(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(errors);
}

/// Returns a pipe that takes no more bytes.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = pipe().unwrap();
    writer.write_all(&[b'.'; PIPE_BYTES]).unwrap();
    (reader, writer)
}

/// Waits until a process catches SIGINT.
fn wait_for_interrupt_handler(child: &Child) {
    const SIGINT: u64 = 1 << 1;
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&mask, 16).unwrap()
    };
    while caught() & SIGINT == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
}
