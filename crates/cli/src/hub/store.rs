//! The model store on disk: paths of files, manifests of pulled models, and locks.
//!
//! ```text
//! ROOT/models/OWNER/REPO/FILE                    files with their paths in the repository
//! ROOT/models/OWNER/REPO/FILE.part, .part.json   a download that can be resumed
//! ROOT/models/OWNER/REPO/.manifests/FILE.json    one for each pulled model: name, source, files, sha256, sizes, date
//! ROOT/locks/OWNER--REPO.lock                    held while a process changes that repository's folder
//! ```
//! There is no other state: deleting ROOT deletes the store. `pull.rs` writes it; `list` and `rm` read and remove.

use super::failure::{Failure, disk_error, on_disk};
use super::known_models;
use super::listing::Format;
use super::name::{ModelRef, Pick, check_target, is_plain_name};
use super::partial_file::{PART_SUFFIXES, with_suffix};
use crate::flags::usage_error::bail_usage;
use crate::terminal::log;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Maximum bytes of a manifest. A valid one has a few hundred bytes for each file.
const MAX_MANIFEST_BYTES: u64 = 4 << 20;

#[derive(Debug, Clone)]
pub(crate) struct Store {
    root: PathBuf,
}

/// A manifest that cannot be read.
struct Damaged {
    folder: PathBuf,
    why: anyhow::Error,
}

/// A pulled model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Name in `list` and in MODEL arguments.
    pub(crate) name: String,
    pub(crate) owner: String,
    pub(crate) repo: String,
    pub(crate) revision: String,
    /// Origin of the files: a URL of the hub, or a Python package.
    pub(crate) source: String,
    pub(crate) format: Format,
    /// For a GGUF model, the first file is the one to open.
    pub(crate) files: Vec<StoredFile>,
    /// Time of the pull in UTC, as in RFC 3339.
    pub(crate) pulled: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StoredFile {
    pub(crate) path: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
}

/// Lock of one repository's folder; released when dropped, or by the system when the process ends.
#[derive(Debug)]
#[must_use]
pub(crate) struct Lock {
    _file: File,
}

impl Store {
    pub(crate) fn new(root: PathBuf) -> Store {
        Store { root }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn folder(&self, owner: &str, repo: &str) -> PathBuf {
        self.root.join("models").join(owner).join(repo)
    }

    /// Takes the lock of a repository. If another process holds it, calls `busy` and waits.
    pub(crate) fn lock(&self, owner: &str, repo: &str, busy: impl FnOnce()) -> Result<Lock, Failure> {
        let (file, path) = self.open_lock(owner, repo)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                busy();
                file.lock().map_err(on_disk("lock", &path))?;
            }
            Err(TryLockError::Error(error)) => return Err(on_disk("lock", &path)(error)),
        }
        Ok(Lock { _file: file })
    }

    fn open_lock(&self, owner: &str, repo: &str) -> Result<(File, PathBuf), Failure> {
        let folder = self.root.join("locks");
        fs::create_dir_all(&folder).map_err(on_disk("make the folder", &folder))?;
        let path = folder.join(format!("{owner}--{repo}.lock"));
        let open = File::options().create(true).truncate(false).write(true).open(&path);
        Ok((open.map_err(on_disk("write", &path))?, path))
    }

    /// Returns all pulled models, sorted by name. A manifest that cannot be read is noted and skipped.
    pub(crate) fn manifests(&self) -> Result<Vec<Manifest>> {
        let (manifests, damaged) = self.scan()?;
        for Damaged { why, .. } in damaged {
            log::note(&format!("warning: {why:#}"));
        }
        Ok(manifests)
    }

    /// Returns the pulled models whose manifests can be read.
    pub(crate) fn readable(&self) -> Vec<Manifest> {
        self.scan().map(|(manifests, _)| manifests).unwrap_or_default()
    }

    fn scan(&self) -> Result<(Vec<Manifest>, Vec<Damaged>)> {
        let (mut manifests, mut damaged) = (Vec::new(), Vec::new());
        for owner in entries(&self.root.join("models"))? {
            for repo in entries(&owner)? {
                for path in entries(&repo.join(".manifests"))? {
                    if path.extension().is_some_and(|extension| extension == "json") {
                        match read_manifest(&path) {
                            Ok(manifest) => manifests.push(manifest),
                            Err(why) => damaged.push(Damaged { folder: repo.clone(), why }),
                        }
                    }
                }
            }
        }
        manifests.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((manifests, damaged))
    }

    /// Returns the pulled model of a name. If several models of one repository match, the error lists them.
    pub(crate) fn find(&self, name: &str) -> Result<Option<Manifest>> {
        let (mut found, damaged) = self.scan()?;
        if let Some(at) = found.iter().position(|manifest| manifest.name == name) {
            return Ok(Some(found.swap_remove(at)));
        }
        let model = match known_models::find(name) {
            Some(known) => ModelRef {
                owner: known.owner.to_owned(),
                repo: known.repo.to_owned(),
                pick: Pick::File(known.file.to_owned()),
            },
            None => match ModelRef::parse(name) {
                Ok(model) => model,
                Err(_) => return Ok(None),
            },
        };
        found.retain(|manifest| manifest.is_meant_by(&model));
        if found.len() > 1 {
            let names: Vec<_> = found.iter().map(|manifest| manifest.name.as_str()).collect();
            bail_usage!("`{name}` matches {} pulled models; choose one: {}", found.len(), names.join(", "));
        }
        let folder = self.folder(&model.owner, &model.repo);
        match (found.pop(), damaged.into_iter().find(|damaged| damaged.folder == folder)) {
            (None, Some(Damaged { why, .. })) => Err(why),
            (found, _) => Ok(found),
        }
    }

    pub(crate) fn write(&self, manifest: &Manifest) -> Result<(), Failure> {
        let path = self.manifest_path(manifest);
        let folder = self.folder(&manifest.owner, &manifest.repo).join(".manifests");
        fs::create_dir_all(&folder).map_err(on_disk("make the folder", &folder))?;
        let text = serde_json::to_string_pretty(manifest).map_err(|error| Failure::Local(error.into()))?;
        let part = with_suffix(&path, ".part");
        let written = File::create(&part).and_then(|mut file| {
            file.write_all((text + "\n").as_bytes())?;
            file.sync_all()
        });
        written.map_err(on_disk("write", &part))?;
        fs::rename(&part, &path).map_err(on_disk("write", &path))
    }

    fn manifest_path(&self, manifest: &Manifest) -> PathBuf {
        let file = match manifest.format {
            Format::Gguf => manifest.files.first().map_or("model", |file| file.path.as_str()),
            Format::Safetensors => "folder",
        };
        let folder = self.folder(&manifest.owner, &manifest.repo).join(".manifests");
        folder.join(format!("{}.json", file.replace('/', "--")))
    }

    /// Returns the file or folder to open.
    pub(crate) fn entry(&self, manifest: &Manifest) -> PathBuf {
        let folder = self.folder(&manifest.owner, &manifest.repo);
        match (manifest.format, manifest.files.first()) {
            (Format::Gguf, Some(file)) => folder.join(&file.path),
            _ => folder,
        }
    }

    /// Returns the recorded SHA-256 of every file of the pulled models, by canonical path.
    pub(crate) fn hashes(&self) -> Result<HashMap<PathBuf, String>> {
        let mut hashes = HashMap::new();
        for manifest in self.manifests()? {
            let folder = self.folder(&manifest.owner, &manifest.repo);
            for file in manifest.files {
                // A file that is missing has no path to compare with.
                if let Ok(path) = folder.join(&file.path).canonicalize() {
                    hashes.insert(path, file.sha256);
                }
            }
        }
        Ok(hashes)
    }

    /// Returns the first file of a model that is missing or has the wrong size.
    pub(crate) fn damage(&self, manifest: &Manifest) -> Option<PathBuf> {
        let folder = self.folder(&manifest.owner, &manifest.repo);
        manifest.files.iter().find_map(|file| {
            let path = folder.join(&file.path);
            let whole = fs::metadata(&path).is_ok_and(|found| found.is_file() && found.len() == file.bytes);
            (!whole).then_some(path)
        })
    }

    /// Removes a model: its manifest and those of its files that no other model uses. Returns the bytes freed.
    pub(crate) fn remove(&self, manifest: &Manifest) -> Result<u64> {
        let (lock, path) = self.open_lock(&manifest.owner, &manifest.repo)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{} is being pulled by another process", manifest.name),
            Err(TryLockError::Error(error)) => return Err(disk_error("lock", &path, &error)),
        }
        let own = self.manifest_path(manifest);
        let others: Vec<_> = self.manifests()?.into_iter().filter(|other| self.manifest_path(other) != own).collect();
        let folder = self.folder(&manifest.owner, &manifest.repo);
        let mut freed = 0;
        for file in &manifest.files {
            let shared = others.iter().any(|other| {
                (&other.owner, &other.repo) == (&manifest.owner, &manifest.repo)
                    && other.files.iter().any(|kept| kept.path == file.path)
            });
            if shared {
                continue;
            }
            let path = folder.join(&file.path);
            for part in PART_SUFFIXES.map(|suffix| with_suffix(&path, suffix)) {
                freed += remove_file(&part)? + remove_file(&with_suffix(&part, ".json"))?;
            }
            freed += remove_file(&path)?;
            remove_empty_folders(path_parent(&folder, &file.path), &folder);
        }
        // The manifest is removed last, so that an interrupted removal can be repeated.
        remove_file(&own)?;
        remove_empty_folders(Some(folder.join(".manifests")), &self.root.join("models"));
        Ok(freed)
    }
}

impl Manifest {
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add)
    }

    fn is_meant_by(&self, model: &ModelRef) -> bool {
        (&self.owner, &self.repo) == (&model.owner, &model.repo)
            && match &model.pick {
                Pick::Any => true,
                Pick::Tag(tag) => self.files.first().is_some_and(|file| super::listing::has_tag(&file.path, tag)),
                Pick::File(path) => self.files.iter().any(|file| file.path == *path),
            }
    }
}

/// Returns the entries of a folder, sorted; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(folder) {
        Ok(listed) => listed,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(error) => return Err(disk_error("read", folder, &error)),
    };
    let mut paths = Vec::new();
    for entry in listed {
        paths.push(entry.map_err(|error| disk_error("read", folder, &error))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Reads a manifest and checks every path in it, because `rm` deletes them.
fn read_manifest(path: &Path) -> Result<Manifest> {
    let refused = || format!("the manifest {} is damaged; delete it, and pull the model again", path.display());
    let size = fs::metadata(path).map_err(|error| disk_error("read", path, &error))?.len();
    if size > MAX_MANIFEST_BYTES {
        bail!("{}: it has {size} bytes, expected at most {MAX_MANIFEST_BYTES}", refused());
    }
    let text = fs::read(path).map_err(|error| disk_error("read", path, &error))?;
    let manifest: Manifest = serde_json::from_slice(&text).with_context(refused)?;
    if !is_plain_name(&manifest.owner) || !is_plain_name(&manifest.repo) || manifest.files.is_empty() {
        bail!("{}: it has no repository or no file", refused());
    }
    for file in &manifest.files {
        check_target(&file.path).with_context(refused)?;
    }
    Ok(manifest)
}

/// Removes a file if it exists; returns its size.
fn remove_file(path: &Path) -> Result<u64> {
    let bytes = match fs::symlink_metadata(path) {
        Ok(found) => found.len(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(disk_error("read", path, &error)),
    };
    fs::remove_file(path).map_err(|error| disk_error("remove", path, &error))?;
    Ok(bytes)
}

fn path_parent(folder: &Path, file: &str) -> Option<PathBuf> {
    folder.join(file).parent().map(Path::to_owned)
}

/// Removes a folder and its parents below `top` as long as they are empty.
fn remove_empty_folders(mut folder: Option<PathBuf>, top: &Path) {
    while let Some(path) = folder {
        if !path.starts_with(top) || path == top || fs::remove_dir(&path).is_err() {
            return;
        }
        folder = path.parent().map(Path::to_owned);
    }
}
