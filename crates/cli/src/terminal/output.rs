//! Standard output, which holds results only. A reader that stops reading (`| head`) is not an error.

use serde::Serialize;
use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Standard output. Its errors tell a closed standard output from other broken pipes.
#[derive(Debug)]
pub(crate) struct Output {
    inner: io::BufWriter<io::StdoutLock<'static>>,
}

/// Cause of a write error when the reader of standard output has closed it.
#[derive(Debug)]
pub(crate) struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of standard output has closed it")
    }
}

impl std::error::Error for ReaderGone {}

/// Cause of a write error of another kind, such as a full disk.
#[derive(Debug)]
pub(crate) struct NotWritten(io::Error);

impl fmt::Display for NotWritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "could not write to standard output: {}", self.0)
    }
}

impl std::error::Error for NotWritten {}

impl Output {
    pub(crate) fn new() -> Output {
        Output { inner: io::BufWriter::new(io::stdout().lock()) }
    }

    /// Writes a JSON value, indented, and a line end.
    pub(crate) fn write_json(&mut self, value: &impl Serialize) -> io::Result<()> {
        // The conversion returns the write error itself, so that its cause can be found.
        serde_json::to_writer_pretty(&mut *self, value).map_err(io::Error::from)?;
        self.write_all(b"\n")
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        watched(|| self.inner.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        watched(|| self.inner.flush())
    }
}

/// Writes that began or ended. While one runs, the number is odd.
static NUM_WRITES: AtomicU64 = AtomicU64::new(0);
/// Time after which a write counts as stuck.
const STUCK: Duration = Duration::from_millis(300);

/// Runs a write so that [`gets_stuck_within`] can see it, and marks its error.
fn watched<T>(write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    NUM_WRITES.fetch_add(1, Ordering::Relaxed);
    let result = write();
    NUM_WRITES.fetch_add(1, Ordering::Relaxed);
    result.map_err(marked)
}

/// Waits up to `timeout` for a write to standard output that waits for its reader.
pub(crate) fn gets_stuck_within(timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    while Instant::now() < deadline {
        let before = NUM_WRITES.load(Ordering::Relaxed);
        std::thread::sleep(STUCK);
        if !before.is_multiple_of(2) && NUM_WRITES.load(Ordering::Relaxed) == before {
            return true;
        }
    }
    false
}

fn marked(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone),
        kind => io::Error::new(kind, NotWritten(error)),
    }
}

/// Whether the cause of an error is that standard output cannot be written, for whatever reason.
pub(crate) fn is_output_error(error: &anyhow::Error) -> bool {
    has_cause::<ReaderGone>(error) || has_cause::<NotWritten>(error)
}

/// Whether the cause of an error is that the reader of standard output has closed it.
pub(crate) fn is_reader_gone(error: &anyhow::Error) -> bool {
    has_cause::<ReaderGone>(error)
}

fn has_cause<E: std::error::Error + 'static>(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is::<E>() || io.is_some_and(|inner| inner.is::<E>())
    })
}
