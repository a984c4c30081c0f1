//! The program that goes into packages: built for old versions of glibc, or given; and its properties that packages
//! state: architecture and the newest glibc symbol that it needs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Oldest glibc that Rust's standard library supports, of 2012.
const GLIBC: &str = "2.17";
/// Versions of the tools that link for an older glibc than this machine's, from PyPI.
const ZIG: &str = "ziglang==0.17.0";
const CARGO_ZIGBUILD: &str = "cargo-zigbuild==0.24.0";

#[derive(Debug)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
    pub(super) architecture: Architecture,
    /// Minor version of the newest glibc symbol: 17 for `GLIBC_2.17`.
    pub(super) glibc_minor: u32,
}

/// Names of one processor architecture in the worlds of packages.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) struct Architecture {
    pub(super) uname: &'static str,
    pub(super) debian: &'static str,
    pub(super) npm: &'static str,
    /// Name of Debian's folder for libraries.
    pub(super) multiarch: &'static str,
}

const ARCHITECTURES: [(u8, Architecture); 2] = [
    (62, Architecture { uname: "x86_64", debian: "amd64", npm: "x64", multiarch: "x86_64-linux-gnu" }),
    (183, Architecture { uname: "aarch64", debian: "arm64", npm: "arm64", multiarch: "aarch64-linux-gnu" }),
];

impl Program {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read the program {}", path.display()))?;
        let architecture = architecture(&bytes).with_context(|| format!("{} is no Linux program", path.display()))?;
        let glibc_minor = newest_glibc(&bytes).with_context(|| format!("{} needs no glibc", path.display()))?;
        Ok(Self { path: path.canonicalize()?, bytes, architecture, glibc_minor })
    }

    /// Runs the program and returns its standard output.
    pub(super) fn output(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        let output = Command::new(&self.path).args(arguments).output()?;
        if !output.status.success() {
            bail!(
                "{} {} failed: {}",
                self.path.display(),
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(output.stdout)
    }
}

/// Builds the program with symbols of glibc 2.17 at most and returns its path. zig links, because it knows the symbols
/// of every glibc; it and its driver for Cargo are put into `target/dist-tools`.
pub(super) fn build(root: &Path) -> Result<PathBuf> {
    let tools = root.join("target/dist-tools");
    let driver = tools.join("bin/cargo-zigbuild");
    if !driver.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&tools))?;
        run(Command::new(tools.join("bin/pip")).args([
            "install",
            "--quiet",
            "--only-binary=:all:",
            ZIG,
            CARGO_ZIGBUILD,
        ]))?;
    }
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let path = format!("{}:{}", tools.join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(driver);
    command.args(["zigbuild", "--profile", "packaged", "--locked", "--package", "pellucid-cli", "--target"]);
    // The driver finds zig through the Python that is first in PATH.
    run(command.arg(format!("{triple}.{GLIBC}")).env("PATH", path).current_dir(root))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join(triple).join("packaged/pellucid"))
}

/// Runs a command to its end; its output goes to the terminal.
fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{:?} could not be started", command.get_program()))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// Reads the architecture of a little-endian 64-bit ELF file.
fn architecture(bytes: &[u8]) -> Option<Architecture> {
    if bytes.len() < 20 || !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    ARCHITECTURES.iter().find(|(machine, _)| *machine == bytes[18]).map(|(_, architecture)| *architecture)
}

/// Returns the highest `N` of the version names `GLIBC_2.N` in an ELF file. A name in unrelated data could only raise
/// the result, so a package never claims to run on a glibc that lacks a symbol.
fn newest_glibc(bytes: &[u8]) -> Option<u32> {
    let prefix = b"GLIBC_2.";
    let versions = bytes.windows(prefix.len() + 3).filter(|window| window.starts_with(prefix)).filter_map(|window| {
        let digits: String =
            window[prefix.len()..].iter().map(|byte| char::from(*byte)).take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_glibc_are_compared_as_numbers() {
        assert_eq!(newest_glibc(b"\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBC_2.9\0\0"), Some(17));
        assert_eq!(newest_glibc(b"nothing"), None);
    }

    #[test]
    fn this_test_itself_is_a_program_for_this_architecture() {
        let program = Program::open(&std::env::current_exe().unwrap()).unwrap();
        assert_eq!(program.architecture.uname, std::env::consts::ARCH);
        assert!(program.glibc_minor >= 17, "glibc 2.{}", program.glibc_minor);
        assert!(architecture(b"#!/bin/sh\necho a script").is_none());
    }
}
