//! Text from standard input, which must be UTF-8 and of bounded length.

use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::flags::text_file;
use crate::flags::usage_error::bail_usage;

/// Time after which a user learns that the program waits for standard input.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads all of standard input.
pub(crate) fn read_text() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("could not read standard input")?;
    text_file::utf8(bytes, "standard input")
}

/// Reads standard input if it is not a terminal; `None` if it is one, or empty. Says so if no end comes in sight.
///
/// `first_byte_limit` is for input beside a prompt, which may be a pipe that nobody writes to, as programs that start
/// other programs leave it open. Going on without it would drop the output of a slow command, so that is an error.
pub(crate) fn read_context(first_byte_limit: Option<Duration>) -> Result<Option<String>> {
    if std::io::stdin().is_terminal() {
        return Ok(None);
    }
    let text = read_within(std::io::stdin(), first_byte_limit)?;
    Ok(Some(text).filter(|text| !text.trim().is_empty()))
}

/// Reads all of a source; an error if its first byte or its end does not come in time.
fn read_within(mut source: impl Read + Send + 'static, first_byte_limit: Option<Duration>) -> Result<String> {
    let (sender, first) = mpsc::channel();
    // Only a thread can stop waiting for a pipe. One that waits for ever ends with the program.
    std::thread::Builder::new()
        .spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            let count = loop {
                match source.read(&mut bytes) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    count => break count,
                }
            };
            let _ = sender.send(count.map(|count| (bytes[..count].to_vec(), source)));
        })
        .context("could not start a thread to read standard input")?;
    let patience = first_byte_limit.unwrap_or(PATIENCE).min(PATIENCE);
    let begun = match first.recv_timeout(patience) {
        Ok(begun) => Some(begun),
        Err(_) => {
            note_waiting();
            match first_byte_limit {
                Some(limit) => first.recv_timeout(limit.saturating_sub(patience)).ok(),
                None => first.recv().ok(),
            }
        }
    };
    let Some(begun) = begun else {
        let limit = first_byte_limit.unwrap_or_default().as_secs();
        bail_usage!(
            "standard input is open, but nothing came in {limit} s: </dev/null gives no input, and --file PATH adds \
             the output of a command that takes longer"
        );
    };
    let (bytes, source) = begun.context("could not read standard input")?;
    if bytes.is_empty() {
        return Ok(String::new());
    }
    let (done, is_done) = mpsc::channel::<()>();
    let _ = std::thread::Builder::new().spawn(move || {
        if is_done.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            note_waiting();
        }
    });
    let text = text_file::bounded(std::io::Cursor::new(bytes).chain(source), "standard input");
    drop(done);
    text
}

fn note_waiting() {
    let _ = writeln!(std::io::stderr(), "waiting for the end of standard input (</dev/null gives none)");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that yields what is sent to it, and ends when the sender is dropped.
    struct Pipe(mpsc::Receiver<&'static [u8]>);

    impl Read for Pipe {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let bytes = self.0.recv().unwrap_or_default();
            out[..bytes.len()].copy_from_slice(bytes);
            Ok(bytes.len())
        }
    }

    #[test]
    fn an_open_pipe_without_a_byte_is_an_error_of_usage() {
        let (writer, reader) = mpsc::channel();
        let error = read_within(Pipe(reader), Some(Duration::from_millis(20))).unwrap_err();
        assert!(crate::flags::usage_error::UsageError::is(&error) && format!("{error}").contains("nothing came"));
        drop(writer);
    }

    #[test]
    fn a_pipe_that_has_begun_is_read_to_its_end() {
        let (writer, reader) = mpsc::channel();
        writer.send(&b"one "[..]).unwrap();
        let reading = std::thread::spawn(move || read_within(Pipe(reader), Some(Duration::from_secs(60))));
        writer.send(b"two").unwrap();
        drop(writer);
        assert_eq!(reading.join().unwrap().unwrap(), "one two");
        let (writer, reader) = mpsc::channel();
        drop(writer);
        assert_eq!(read_within(Pipe(reader), None).unwrap(), "");
    }
}
