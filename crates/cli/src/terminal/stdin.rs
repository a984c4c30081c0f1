//! Text from standard input and files, which must be UTF-8 and of bounded length.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::terminal::format::grouped;

/// Maximum bytes of a text beside a prompt. A context of a million tokens holds about 4 MB.
pub(crate) const MAX_BYTES: u64 = 64 << 20;
/// Time after which a user learns that the program waits for standard input.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads all of standard input.
pub(crate) fn read_text() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("could not read standard input")?;
    utf8(bytes, "standard input")
}

/// Reads standard input if it is not a terminal; `None` if it is one, or empty. Says so if no end comes in sight.
pub(crate) fn read_context() -> Result<Option<String>> {
    if std::io::stdin().is_terminal() {
        return Ok(None);
    }
    let (done, is_done) = mpsc::channel::<()>();
    let _ = std::thread::Builder::new().spawn(move || {
        if is_done.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = writeln!(std::io::stderr(), "waiting for the end of standard input (</dev/null gives none)");
        }
    });
    let text = bounded(std::io::stdin().lock(), "standard input");
    drop(done);
    Ok(Some(text?).filter(|text| !text.trim().is_empty()))
}

/// Reads a file that a flag names.
pub(crate) fn read_file(path: &Path) -> Result<String> {
    let place = path.display().to_string();
    match File::open(path) {
        Ok(file) if file.metadata().is_ok_and(|found| found.is_dir()) => bail_usage!("{place} is a folder, not a file"),
        Ok(file) => bounded(file, &place),
        Err(error) if error.kind() == ErrorKind::NotFound => bail_usage!("there is no file {place}"),
        Err(error) => Err(error).with_context(|| format!("could not read {place}")).or_usage(),
    }
}

fn bounded(source: impl Read, place: &str) -> Result<String> {
    let mut bytes = Vec::new();
    source.take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("could not read {place}"))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail_usage!("{place} is too long for a prompt: expected at most {} bytes", grouped(MAX_BYTES));
    }
    utf8(bytes, place)
}

/// Converts bytes to text; an error names the first byte that is not UTF-8.
pub(crate) fn utf8(bytes: Vec<u8>, place: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow!("{place} is not UTF-8: the byte 0x{:02x} at offset {at} begins no character", error.as_bytes()[at])
    })
}
