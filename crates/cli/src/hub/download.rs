//! Downloads one file from the hub into the store. Resumes after an interruption and checks size, tag and hash.
//!
//! `pull.rs` calls [`fetch`] for each file while it holds the repository's lock.

use super::failure::Failure;
use super::http::{Client, HubResponse, bare_etag, text};
use super::listing::check_status;
use super::partial_file::{Expected, PartialFile};
use super::progress::{Progress, Screen};
use crate::http_error::sentence;
use crate::terminal::format::bytes_text;
use crate::terminal::interrupt::Interrupt;
use anyhow::anyhow;
use std::io::{ErrorKind, Read};
use std::path::Path;
use ureq::http::HeaderMap;

/// Maximum successive attempts without a new byte, and maximum attempts in total, for a server that sends a byte each
/// time.
const MAX_IDLE_ATTEMPTS: usize = 3;
const MAX_ATTEMPTS: usize = 50;

/// A file to download.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) url: String,
    /// Name of the file in messages.
    pub(crate) label: &'a str,
    pub(crate) target: &'a Path,
    pub(crate) expected: Expected,
    /// Identifies the content: a partial file of an earlier run is resumed only if its identity is equal.
    pub(crate) identity: &'a str,
}

/// Reason why an attempt did not complete the file.
enum Broken {
    /// The connection broke or timed out. The bytes so far are kept, and the next attempt resumes.
    Interrupted(String),
    /// The bytes so far cannot be used: the next attempt starts over.
    Restart(&'static str),
    Failed(Failure),
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Broken {
        Broken::Failed(failure)
    }
}

/// Downloads a file to its target and returns its sha256.
pub(crate) fn fetch(
    client: &Client,
    wanted: &Wanted,
    screen: &Screen,
    interrupt: &Interrupt,
) -> Result<String, Failure> {
    let mut part = PartialFile::open(wanted.target, wanted.identity, wanted.expected.bytes)?;
    let kept = format!("the bytes so far are kept in {}; run the command again to resume", part.path().display());
    let _cleanup = interrupt.on_exit(|| kept);
    let mut expected = wanted.expected.clone();
    match fill(client, wanted, &mut part, &mut expected, screen) {
        Ok(()) => part.finish(&expected, client.host()),
        Err(failure) => {
            if part.len() == 0 {
                part.discard()?;
            }
            Err(failure)
        }
    }
}

/// Makes attempts until the partial file is complete.
fn fill(
    client: &Client,
    wanted: &Wanted,
    part: &mut PartialFile,
    expected: &mut Expected,
    screen: &Screen,
) -> Result<(), Failure> {
    let mut idle_attempts = 0;
    let mut last = String::new();
    for _ in 0..MAX_ATTEMPTS {
        let before = part.len();
        if before == expected.bytes {
            return Ok(());
        }
        match attempt(client, wanted, part, expected, screen) {
            Ok(()) => continue,
            Err(Broken::Failed(failure)) => return Err(failure),
            Err(Broken::Restart(why)) => {
                part.restart()?;
                idle_attempts += 1;
                last = why.to_owned();
            }
            Err(Broken::Interrupted(why)) => {
                idle_attempts = if part.len() > before { 0 } else { idle_attempts + 1 };
                last = why;
            }
        }
        if idle_attempts == MAX_IDLE_ATTEMPTS {
            break;
        }
        screen.say(&format!("{}: {last}; resuming at {}", wanted.label, bytes_text(part.len())));
    }
    Err(gave_up(part, expected, &last))
}

fn gave_up(part: &PartialFile, expected: &Expected, why: &str) -> Failure {
    Failure::remote(format!(
        "{why}; {} of {} are kept in {}, run the command again to resume",
        bytes_text(part.len()),
        bytes_text(expected.bytes),
        part.path().display()
    ))
}

/// Sends one request and writes its body. Takes the hash from the hub's headers if the listing did not have it.
fn attempt(
    client: &Client,
    wanted: &Wanted,
    part: &mut PartialFile,
    expected: &mut Expected,
    screen: &Screen,
) -> Result<(), Broken> {
    let answer = client.get(&wanted.url, part.len())?;
    let status = answer.response.status().as_u16();
    if status == 416 && part.len() > 0 {
        return Err(Broken::Restart("the server does not have the requested range"));
    }
    check_status(client, &answer, wanted.label)?;
    check_linked(&answer, expected)?;
    let headers = answer.response.headers();
    if status == 206 && !continues(headers, part.len(), expected.bytes) {
        return Err(Broken::Restart("the server sent a range that was not requested"));
    }
    let etag = answer.linked.etag.as_deref().or_else(|| text(headers, "etag").map(bare_etag)).map(str::to_owned);
    if status == 200 && part.len() > 0 {
        screen.say(&format!("{}: the server cannot resume, starting over", wanted.label));
        part.restart()?;
    }
    if !part.agrees_with(etag.as_deref())? {
        return Err(Broken::Restart("the file has changed on the server"));
    }
    let rest = expected.bytes - part.len();
    if let Some(length) = text(headers, "content-length").and_then(|length| length.parse::<u64>().ok())
        && length != rest
    {
        let message = format!("{} announced {length} bytes for {}, expected {rest}", answer.host, wanted.label);
        return Err(Failure::remote(message).into());
    }
    let progress = screen.transfer(wanted.label, part.len(), expected.bytes);
    receive(answer, part, expected.bytes, &progress)
}

/// Writes the body to the partial file. Fails at the first byte past the expected end, so that no server can fill the
/// disk.
fn receive(answer: HubResponse, part: &mut PartialFile, bytes: u64, progress: &Progress) -> Result<(), Broken> {
    let host = answer.host;
    let mut body = answer.response.into_body().into_reader();
    let mut buffer = vec![0; 1 << 18];
    while part.len() < bytes {
        let count = match body.read(&mut buffer) {
            Ok(0) => return Err(Broken::Interrupted(format!("{host} ended the connection early"))),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(Broken::Interrupted(broken_off(error, &host))),
        };
        if count as u64 > bytes - part.len() {
            return Err(Failure::remote(format!("{host} sent more than the {bytes} bytes expected")).into());
        }
        part.append(&buffer[..count])?;
        if !progress.at(part.len()) {
            return Err(Failure::Local(anyhow!("the pull was cancelled; the bytes so far are kept")).into());
        }
    }
    Ok(())
}

fn broken_off(error: std::io::Error, host: &str) -> String {
    match ureq::Error::from(error) {
        ureq::Error::Timeout(_) => format!("{host} sent no data in time"),
        ureq::Error::Io(error) if error.kind() == ErrorKind::UnexpectedEof => {
            format!("{host} ended the connection early")
        }
        error => format!("the connection to {host} broke: {}", sentence(&error, host)),
    }
}

/// Checks the hub's headers about a large file against the expected size and hash.
fn check_linked(answer: &HubResponse, expected: &mut Expected) -> Result<(), Failure> {
    let host = &answer.host;
    if let Some(bytes) = answer.linked.bytes
        && bytes != expected.bytes
    {
        return Err(Failure::remote(format!(
            "the hub has a different file: expected {} bytes, found {bytes}",
            expected.bytes
        )));
    }
    let Some(etag) = answer.linked.etag.as_deref().map(str::to_ascii_lowercase) else { return Ok(()) };
    if etag.len() != 64 || !etag.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    match &expected.sha256 {
        Some(wanted) if *wanted != etag => Err(Failure::remote(format!(
            "the hub has a different file (at {host}): expected sha256 {wanted}, found {etag}"
        ))),
        _ => {
            expected.sha256 = Some(etag);
            Ok(())
        }
    }
}

/// Whether `Content-Range: bytes START-END/TOTAL` begins where the partial file ends.
fn continues(headers: &HeaderMap, start: u64, total: u64) -> bool {
    let range = text(headers, "content-range").and_then(|range| range.strip_prefix("bytes "));
    let Some((span, of)) = range.and_then(|range| range.split_once('/')) else { return false };
    let Some((first, last)) = span.split_once('-') else { return false };
    first.parse() == Ok(start) && last.parse() == Ok(total - 1) && (of == "*" || of.parse() == Ok(total))
}
