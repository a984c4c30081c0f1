//! The Python wheel: `pip install` or `uvx` put the program on the path. It contains no Python.
//!
//! The platform tag follows from the newest glibc symbol in the program, as PEP 600 defines it.

use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use sha2::{Digest, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use super::Release;

pub(super) fn write(release: &Release, root: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    let version = &release.version;
    let tag = format!("py3-none-manylinux_2_{}_{}", release.program.glibc_minor, release.program.architecture.uname);
    let readme = std::fs::read_to_string(root.join("README.md"))?;
    let information = format!("pellucid-{version}.dist-info");
    let metadata = format!(
        "Metadata-Version: 2.4\nName: pellucid\nVersion: {version}\nSummary: {}\nLicense-Expression: MIT OR Apache-2.0\n\
         License-File: LICENSES.txt\nRequires-Python: >=3.8\nDescription-Content-Type: text/markdown\n\n{readme}",
        release.summary
    );
    let wheel = format!("Wheel-Version: 1.0\nGenerator: xtask dist\nRoot-Is-Purelib: false\nTag: {tag}\n");
    let licences = release.contents.licences.as_bytes();
    let program = release.program.bytes.as_slice();
    // Installers take the program out of the archive by this name and make it executable.
    let files: [(String, u32, &[u8]); 4] = [
        (format!("pellucid-{version}.data/scripts/pellucid"), 0o755, program),
        (format!("{information}/METADATA"), 0o644, metadata.as_bytes()),
        (format!("{information}/WHEEL"), 0o644, wheel.as_bytes()),
        (format!("{information}/licenses/LICENSES.txt"), 0o644, licences),
    ];
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    let mut record = String::new();
    for (name, mode, bytes) in &files {
        archive.start_file(name.as_str(), options(*mode))?;
        archive.write_all(bytes)?;
        record += &format!("{name},sha256={},{}\n", url_safe_base64(&Sha256::digest(bytes)), bytes.len());
    }
    let record_name = format!("{information}/RECORD");
    record += &format!("{record_name},,\n");
    archive.start_file(record_name, options(0o644))?;
    archive.write_all(record.as_bytes())?;
    let path = out.join(format!("pellucid-{version}-{tag}.whl"));
    std::fs::write(&path, archive.finish()?.into_inner())?;
    Ok(vec![path])
}

/// The time is the earliest that the format has, so that archives repeat.
fn options(mode: u32) -> SimpleFileOptions {
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
    options.compression_level(Some(9)).unix_permissions(mode).last_modified_time(DateTime::default())
}

/// Base64 with `-` and `_` and without padding, as the RECORD file has it.
fn url_safe_base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().enumerate().fold(0u32, |bits, (at, byte)| bits | u32::from(*byte) << (16 - 8 * at));
        for letter in 0..=chunk.len() {
            text.push(char::from(LETTERS[(bits >> (18 - 6 * letter)) as usize & 63]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        let cases = [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob", "Zm9vYg"), ("foobar", "Zm9vYmFy")];
        for (bytes, text) in cases {
            assert_eq!(url_safe_base64(bytes.as_bytes()), text);
        }
        assert_eq!(url_safe_base64(&[0xfb, 0xff]), "-_8");
    }
}
