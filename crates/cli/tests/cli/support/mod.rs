//! Shared by the tests of the built program: a temporary home, a way to run the program in it, and a small HTTP server.

pub(crate) mod gguf;
pub(crate) mod tiny_model;

use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A folder that holds a model store, and the program run with it and with no other environment that matters.
pub(crate) struct Home {
    pub(crate) folder: tempfile::TempDir,
}

impl Home {
    pub(crate) fn new() -> Home {
        Home { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn model_folder(&self, repo: &str) -> PathBuf {
        self.path().join("models").join(repo)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pellucid"));
        command.args(args).env_clear().env("PELLUCID_HOME", self.path()).env("NO_PROXY", "*");
        // Nothing listens there: a test that forgets its server fails at once instead of reaching a network.
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("PATH", self.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::from(self.command(args).output().unwrap())
    }

    /// Runs with the hub at `server`.
    pub(crate) fn run_at(&self, server: &Server, args: &[&str]) -> Ran {
        Ran::from(self.command(args).env("HF_ENDPOINT", &server.url).output().unwrap())
    }

    /// Runs with `input` on standard input.
    pub(crate) fn run_with_input(&self, args: &[&str], input: &[u8]) -> Ran {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || {
            // A program that refuses its input early closes the pipe.
            let _ = stdin.write_all(&input);
        });
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        Ran::from(output)
    }

    /// Every file below the home, relative and sorted, without the locks.
    pub(crate) fn files(&self) -> Vec<String> {
        fn walk(folder: &Path, top: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, top, found);
                } else {
                    found.push(path.strip_prefix(top).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        let mut found = Vec::new();
        walk(self.path(), self.path(), &mut found);
        found.retain(|path| !path.starts_with("locks/"));
        found.sort();
        found
    }
}

/// How a run of the program went.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        let stderr = String::from_utf8(output.stderr).unwrap();
        Ran { status: output.status.code(), stdout: output.stdout, stderr }
    }
}

impl Ran {
    /// The standard output of a run that went well.
    #[track_caller]
    pub(crate) fn ok(&self) -> &str {
        assert_eq!(self.status, Some(0), "{self:?}");
        std::str::from_utf8(&self.stdout).unwrap()
    }

    /// Returns the message of a run that failed as documented: status 1, `error: `, nothing on standard output.
    #[track_caller]
    pub(crate) fn error(&self) -> &str {
        self.refused(1)
    }

    /// Returns the message of a run that was refused as wrong usage, with status 2.
    #[track_caller]
    pub(crate) fn usage(&self) -> &str {
        self.refused(2)
    }

    #[track_caller]
    fn refused(&self, status: i32) -> &str {
        assert_eq!(self.status, Some(status), "{self:?}");
        assert!(self.stdout.is_empty(), "{self:?}");
        assert!(!self.stderr.contains("panicked") && !self.stderr.contains("error: internal error"), "{self:?}");
        let at = self.stderr.find("error: ").unwrap_or_else(|| panic!("{self:?}"));
        self.stderr[at..].trim_end()
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// With the query.
    pub(crate) path: String,
    /// Names in lower case.
    pub(crate) headers: HashMap<String, String>,
}

#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after this number of bytes of the body, whatever was announced...
    pub(crate) cut_at: Option<usize>,
    /// ...after this long a silence.
    pub(crate) silence: Duration,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        Reply { status, headers: Vec::new(), body: body.into(), cut_at: None, silence: Duration::ZERO }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn cut(mut self, at: usize) -> Reply {
        self.cut_at = Some(at);
        self
    }

    pub(crate) fn silent(mut self, silence: Duration) -> Reply {
        self.silence = silence;
        self
    }

    pub(crate) fn redirect(to: &str) -> Reply {
        Reply::new(302, "").header("Location", to)
    }

    /// A file as a server with range support sends it.
    pub(crate) fn file(request: &Request, content: &[u8]) -> Reply {
        match start(request) {
            Some(start) if start >= content.len() => Reply::new(416, ""),
            Some(start) => Reply::new(206, &content[start..])
                .header("Content-Range", format!("bytes {start}-{}/{}", content.len() - 1, content.len())),
            None => Reply::new(200, content),
        }
    }
}

/// The first byte that a request's Range asks for.
pub(crate) fn start(request: &Request) -> Option<usize> {
    let range = request.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?;
    Some(range.parse().unwrap())
}

/// An HTTP server on a port of its own, which runs until the test process ends.
pub(crate) struct Server {
    pub(crate) url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Answers each request by `answer`, one request a connection.
    pub(crate) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (log, answer) = (requests.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || serve(stream, &log, &*answer));
            }
        });
        Server { url, requests }
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The requests for files (not listings), each as the first byte asked for.
    pub(crate) fn file_starts(&self) -> Vec<Option<usize>> {
        self.requests().iter().filter(|request| request.path.contains("/resolve/")).map(start).collect()
    }
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Request>>, answer: &dyn Fn(&Request) -> Reply) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let headers = lines.take_while(|line| !line.is_empty()).map(|line| {
        let (name, value) = line.split_once(':').unwrap();
        (name.to_ascii_lowercase(), value.trim().to_owned())
    });
    let request = Request { path, headers: headers.collect() };
    log.lock().unwrap().push(request.clone());
    let reply = answer(&request);
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    if !reply.headers.iter().any(|(name, _)| name == "Transfer-Encoding") {
        head += &format!("Content-Length: {}\r\n", reply.body.len());
    }
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let sent = reply.cut_at.unwrap_or(reply.body.len());
    // The program may go away in the middle, as some tests make it do.
    let _ = stream.write_all(format!("{head}\r\n").as_bytes());
    let _ = stream.write_all(&reply.body[..sent]);
    let _ = stream.flush();
    std::thread::sleep(reply.silence);
}

pub(crate) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes without a pattern that a shifted copy would match.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}
