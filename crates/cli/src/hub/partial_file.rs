//! A file on its way into the store: `NAME.part`, hashed as it grows, renamed when it is whole and right.
//!
//! Beside it lies `NAME.part.json`, which says what the part is a part of; a part without it, or of something else, is thrown
//! away. `download.rs` fills parts from the network and `pip_fallback.rs` from an archive; neither touches the final name.

use super::failure::{Failure, on_disk};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// What the finished file must be.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal; unknown for the small files that the hub does not keep in its large-file store.
    pub(crate) sha256: Option<String>,
}

/// The content of `NAME.part.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    identity: String,
    bytes: u64,
    etag: Option<String>,
}

#[derive(Debug)]
pub(crate) struct PartialFile {
    target: PathBuf,
    path: PathBuf,
    note: PathBuf,
    about: Note,
    file: File,
    len: u64,
    hasher: Sha256,
}

impl PartialFile {
    /// Opens the part of `target`, keeping what an earlier run left if it was of the same thing (`identity`, `bytes`).
    pub(crate) fn open(target: &Path, identity: &str, bytes: u64) -> Result<PartialFile, Failure> {
        let path = with_suffix(target, ".part");
        let note = with_suffix(target, ".part.json");
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).map_err(on_disk("make the folder", folder))?;
        }
        let left = fs::read(&note).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        let left = left.filter(|note| note.identity == identity && note.bytes == bytes);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(on_disk("write", &path))?;
        let about = Note { identity: identity.to_owned(), bytes, etag: None };
        let mut part =
            PartialFile { target: target.to_owned(), path, note, about, file, len: 0, hasher: Sha256::new() };
        let len = part.file.metadata().map_err(on_disk("read", &part.path))?.len();
        match left {
            Some(left) if len <= bytes => {
                part.about = left;
                part.hash_existing(len)?;
            }
            _ => part.restart()?,
        }
        Ok(part)
    }

    /// Notes the server's tag of what follows. False when bytes are there already and came under another tag: the caller
    /// must then start over.
    pub(crate) fn agrees_with(&mut self, etag: Option<&str>) -> Result<bool, Failure> {
        if self.len > 0 && self.about.etag.as_deref() != etag {
            return Ok(false);
        }
        self.about.etag = etag.map(str::to_owned);
        let text = serde_json::to_vec(&self.about).map_err(|error| Failure::Local(error.into()))?;
        fs::write(&self.note, text).map_err(on_disk("write", &self.note))?;
        Ok(true)
    }

    /// Bytes that are there already.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Forgets what is there: the next byte written is the first.
    pub(crate) fn restart(&mut self) -> Result<(), Failure> {
        self.file.set_len(0).map_err(on_disk("write", &self.path))?;
        self.file.seek(SeekFrom::Start(0)).map_err(on_disk("write", &self.path))?;
        self.len = 0;
        self.hasher = Sha256::new();
        Ok(())
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file.write_all(bytes).map_err(on_disk("write", &self.path))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Removes the part and its note.
    pub(crate) fn discard(self) -> Result<(), Failure> {
        let PartialFile { path, note, file, .. } = self;
        drop(file);
        fs::remove_file(&path).map_err(on_disk("remove", &path))?;
        remove_note(&note)
    }

    /// Checks size and hash and gives the file its name; returns the hash. A wrong part is deleted.
    pub(crate) fn finish(self, expected: &Expected, origin: &str) -> Result<String, Failure> {
        let found = hexadecimal(&self.hasher.clone().finalize());
        if self.len != expected.bytes {
            let len = self.len;
            self.discard()?;
            return Err(Failure::remote(format!("{origin} sent {len} bytes, expected {}", expected.bytes)));
        }
        if let Some(wanted) = &expected.sha256
            && *wanted != found
        {
            self.discard()?;
            return Err(Failure::remote(format!(
                "what {origin} sent is not the file expected and was deleted: sha256 expected {wanted}, found {found}"
            )));
        }
        // The rename must not outlive a crash that loses the bytes it names.
        self.file.sync_all().map_err(on_disk("write", &self.path))?;
        fs::rename(&self.path, &self.target).map_err(on_disk("rename to", &self.target))?;
        remove_note(&self.note)?;
        Ok(found)
    }

    fn hash_existing(&mut self, len: u64) -> Result<(), Failure> {
        self.file.seek(SeekFrom::Start(0)).map_err(on_disk("read", &self.path))?;
        let mut buffer = vec![0; 1 << 20];
        while self.len < len {
            let count = self.file.read(&mut buffer).map_err(on_disk("read", &self.path))?;
            if count == 0 {
                break;
            }
            self.hasher.update(&buffer[..count]);
            self.len += count as u64;
        }
        Ok(())
    }
}

/// The sha256 of a file that is already in place.
pub(crate) fn hash_file(path: &Path) -> Result<String, Failure> {
    let mut file = File::open(path).map_err(on_disk("read", path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(on_disk("read", path))? {
            0 => return Ok(hexadecimal(&hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// The path with a suffix after its extension: `a.gguf` and `.part` give `a.gguf.part`.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A part that got no byte yet has no note.
fn remove_note(note: &Path) -> Result<(), Failure> {
    match fs::remove_file(note) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(on_disk("remove", note)(error)),
        _ => Ok(()),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
