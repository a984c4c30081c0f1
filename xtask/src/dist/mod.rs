//! `xtask dist`: packages of the program in `target/dist`: a tarball, a Python wheel, a Debian package, an OCI image,
//! an npm package and a Homebrew formula, with a file of SHA-256 sums.
//!
//! Nothing here needs Docker, root or a packaging tool. With the same program and `SOURCE_DATE_EPOCH`, every file is
//! the same to the byte. `.ci/dist` installs each package in an empty root and runs it there.

mod archive;
mod contents;
mod deb;
mod formula;
mod licences;
mod npm;
mod oci;
mod program;
mod tarball;
mod wheel;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use contents::Contents;
use program::Program;

/// Kinds of packages, in the order in which they are made.
const KINDS: [&str; 6] = ["tarball", "wheel", "deb", "oci", "npm", "homebrew"];

/// Properties that all packages share.
#[derive(Debug)]
struct Release {
    version: String,
    /// One sentence without a full stop.
    summary: &'static str,
    program: Program,
    contents: Contents,
    /// Seconds since 1970 that every file in a package carries.
    timestamp: u64,
    /// Address of the folder in which the tarball will be published, for the formula.
    release_url: Option<String>,
}

#[derive(Debug)]
struct Arguments {
    /// A program that exists already; without it, one is built for old versions of glibc.
    program: Option<PathBuf>,
    kinds: Vec<String>,
    out: PathBuf,
    release_url: Option<String>,
}

/// Makes the packages; `arguments` are those after the word `dist`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent folder")?;
    let arguments = Arguments::parse(arguments, root)?;
    let program = match &arguments.program {
        Some(path) => Program::open(path)?,
        None => Program::open(&program::build(root)?)?,
    };
    let release = Release {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        summary: "LLM inference engine that you can see through: one program, reproducible to the byte",
        contents: Contents::collect(root, &program)?,
        program,
        timestamp: timestamp(root)?,
        release_url: arguments.release_url,
    };
    std::fs::create_dir_all(&arguments.out)?;
    let mut sums = String::new();
    for kind in &arguments.kinds {
        let made = match kind.as_str() {
            "tarball" => tarball::write(&release, &arguments.out),
            "wheel" => wheel::write(&release, root, &arguments.out),
            "deb" => deb::write(&release, &arguments.out),
            "oci" => oci::write(&release, &arguments.out),
            "npm" => npm::write(&release, root, &arguments.out),
            _ => formula::write(&release, &arguments.out),
        };
        for path in made.with_context(|| format!("the {kind} package could not be made"))? {
            let bytes = std::fs::read(&path)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            println!("{:>6.1} MB  {name}", bytes.len() as f64 / 1e6);
            sums += &format!("{}  {name}\n", sha256(&bytes));
        }
    }
    std::fs::write(arguments.out.join("SHA256SUMS"), sums)?;
    println!("in {}", arguments.out.display());
    Ok(())
}

impl Arguments {
    fn parse(arguments: &[String], root: &Path) -> Result<Self> {
        let mut parsed = Self {
            program: None,
            kinds: KINDS.map(str::to_owned).to_vec(),
            out: root.join("target/dist"),
            release_url: None,
        };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--program" => parsed.program = Some(value()?.into()),
                "--out" => parsed.out = value()?.into(),
                "--release-url" => parsed.release_url = Some(value()?.trim_end_matches('/').to_owned()),
                "--only" => parsed.kinds = value()?.split(',').map(str::to_owned).collect(),
                other => bail!("unknown argument {other}; expected --program, --only, --out or --release-url"),
            }
        }
        if let Some(unknown) = parsed.kinds.iter().find(|kind| !KINDS.contains(&kind.as_str())) {
            bail!("--only {unknown}: expected some of {}", KINDS.join(","));
        }
        Ok(parsed)
    }
}

/// Time of the files in packages: `SOURCE_DATE_EPOCH`, or the time of the last commit.
fn timestamp(root: &Path) -> Result<u64> {
    if let Ok(given) = std::env::var("SOURCE_DATE_EPOCH") {
        return given.parse().with_context(|| format!("SOURCE_DATE_EPOCH is {given}, expected a number of seconds"));
    }
    let git = std::process::Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root).output()?;
    let seconds = String::from_utf8_lossy(&git.stdout);
    seconds.trim().parse().context("git knows no last commit; set SOURCE_DATE_EPOCH")
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Arguments> {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Arguments::parse(&arguments, Path::new("/root"))
    }

    #[test]
    fn arguments_are_parsed_or_refused_by_name() {
        assert_eq!(parse(&[]).unwrap().kinds, KINDS);
        assert_eq!(parse(&["--only", "wheel,deb"]).unwrap().kinds, ["wheel", "deb"]);
        let error = |arguments| parse(arguments).unwrap_err().to_string();
        assert!(error(&["--only", "rpm"]).contains("--only rpm: expected some of tarball"));
        assert!(error(&["--out"]).contains("--out needs a value"));
        assert!(error(&["--fast"]).contains("unknown argument --fast"));
    }

    #[test]
    fn sums_are_those_of_sha256sum() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
