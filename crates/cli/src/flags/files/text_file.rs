//! Text files that flags and arguments name, and the rule that text is UTF-8.
//!
//! All errors are those of usage: the user named a file that is not there, cannot be read, or holds no text.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result};

use crate::flags::usage_error::{OrUsage, UsageError, bail_usage};
use crate::terminal::format::grouped;

/// Maximum bytes of a text. A context of a million tokens holds about 4 MB.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a text file.
pub(crate) fn read(path: &Path) -> Result<String> {
    let place = path.display().to_string();
    match File::open(path) {
        Ok(file) if file.metadata().is_ok_and(|found| found.is_dir()) => bail_usage!("{place} is a folder, not a file"),
        Ok(file) => bounded(file, &place),
        Err(error) if error.kind() == ErrorKind::NotFound => bail_usage!("there is no file {place}"),
        Err(error) => Err(error).with_context(|| format!("could not read {place}")).or_usage(),
    }
}

/// Reads a source to its end. Errors call it `place`.
pub(crate) fn bounded(source: impl Read, place: &str) -> Result<String> {
    let mut bytes = Vec::new();
    source.take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("could not read {place}"))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail_usage!("{place} is too long: expected a text of at most {} bytes", grouped(MAX_BYTES));
    }
    utf8(bytes, place)
}

/// Converts bytes to text; an error names the first byte that is not UTF-8.
pub(crate) fn utf8(bytes: Vec<u8>, place: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let (at, byte) = (error.utf8_error().valid_up_to(), error.as_bytes()[error.utf8_error().valid_up_to()]);
        UsageError::because(format!(
            "{place} is not UTF-8: the byte 0x{byte:02x} at offset {at} begins no character; expected a text"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_is_an_error_of_usage_in_our_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let refused = |path: &Path| {
            let error = read(path).unwrap_err();
            assert!(UsageError::is(&error), "{error:#}");
            format!("{error:#}")
        };
        assert_eq!(refused(&path), format!("there is no file {}", path.display()));
        assert_eq!(refused(folder.path()), format!("{} is a folder, not a file", folder.path().display()));
        std::fs::write(&path, b"\x89PNG\r\n\x1a\n\0\0").unwrap();
        let expected = "is not UTF-8: the byte 0x89 at offset 0 begins no character; expected a text";
        assert_eq!(refused(&path), format!("{} {expected}", path.display()));
        std::fs::write(&path, "thé\n").unwrap();
        assert_eq!(read(&path).unwrap(), "thé\n");
        let error = bounded(std::io::repeat(b'a'), "a pipe").unwrap_err();
        assert!(UsageError::is(&error) && format!("{error}").contains("at most 67,108,864 bytes"), "{error}");
    }
}
