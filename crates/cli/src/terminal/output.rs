//! Standard output: results and nothing else. A reader that goes away (`| head`) is not an error.

use serde::Serialize;
use std::fmt;
use std::io::{self, Write};

/// Standard output whose closing can be told from any other broken pipe.
#[derive(Debug)]
pub(crate) struct Output {
    inner: io::BufWriter<io::StdoutLock<'static>>,
}

/// Carried by the error of a write to a standard output that nobody reads any more.
#[derive(Debug)]
pub(crate) struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderGone {}

impl Output {
    pub(crate) fn new() -> Output {
        Output { inner: io::BufWriter::new(io::stdout().lock()) }
    }

    /// A JSON value, indented, and a line end.
    pub(crate) fn write_json(&mut self, value: &impl Serialize) -> io::Result<()> {
        // The conversion gives back the error of the write, if it was one.
        serde_json::to_writer_pretty(&mut *self, value).map_err(io::Error::from)?;
        self.write_all(b"\n")
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write(bytes).map_err(marked)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush().map_err(marked)
    }
}

fn marked(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone),
        kind => io::Error::new(kind, format!("could not write to standard output: {error}")),
    }
}

/// Whether an error is only that the reader went away.
pub(crate) fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is::<ReaderGone>() || io.is_some_and(|inner| inner.is::<ReaderGone>())
    })
}
