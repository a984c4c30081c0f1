//! Standard output, which holds results only. A reader that stops reading (`| head`) is not an error.

use serde::Serialize;
use std::fmt;
use std::io::{self, Write};

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

/// Whether the cause of an error is that the reader of standard output has closed it.
pub(crate) fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is::<ReaderGone>() || io.is_some_and(|inner| inner.is::<ReaderGone>())
    })
}
