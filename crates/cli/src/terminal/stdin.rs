//! Text from standard input and files, which must be UTF-8.

use std::io::Read;

use anyhow::{Context, Result, anyhow};

/// Reads all of standard input.
pub(crate) fn read_text() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("could not read standard input")?;
    utf8(bytes, "standard input")
}

/// Converts bytes to text; an error names the first byte that is not UTF-8.
pub(crate) fn utf8(bytes: Vec<u8>, place: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow!("{place} is not UTF-8: the byte 0x{:02x} at offset {at} begins no character", error.as_bytes()[at])
    })
}
