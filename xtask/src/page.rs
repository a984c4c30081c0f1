//! `xtask page`: builds the web page of `web/` with Node into `web/dist`, which the server embeds.
//!
//! `--check` builds into `target/page` instead and compares, so that the files in the tree always belong to their
//! sources. Only this task needs Node; `cargo build` uses the files in the tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

const FILES: [&str; 3] = ["index.html", "app.js", "app.css"];

/// Maximum size of all files together, compressed by `gzip`.
const MAX_COMPRESSED_BYTES: usize = 300 << 10;

pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let is_check = match arguments {
        [] => false,
        [flag] if flag == "--check" => true,
        _ => bail!("usage: xtask page [--check]"),
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize()?;
    let web = root.join("web");
    let out = if is_check { root.join("target/page") } else { web.join("dist") };
    // Without scripts of packages: the build needs none of them.
    npm(&web, &["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"])?;
    npm(&web, &["run", "--silent", "check"])?;
    let built = Command::new("node").arg("build.mjs").arg(&out).current_dir(&web).status();
    ensure!(built.context("cannot run node, which builds the page")?.success(), "web/build.mjs failed");
    let size = compressed_size(&out)?;
    ensure!(size <= MAX_COMPRESSED_BYTES, "the page has {size} bytes compressed, more than {MAX_COMPRESSED_BYTES}");
    println!("page: {size} bytes compressed");
    if is_check { compare(&out, &web.join("dist")) } else { Ok(()) }
}

fn npm(web: &Path, arguments: &[&str]) -> Result<()> {
    let status = Command::new("npm").args(arguments).current_dir(web).status();
    let status = status.context("cannot run npm, which builds the page")?;
    ensure!(status.success(), "npm {} failed in web/", arguments.join(" "));
    Ok(())
}

/// Returns the sum of the files' sizes as `gzip` compresses them.
fn compressed_size(folder: &Path) -> Result<usize> {
    let mut size = 0;
    for name in FILES {
        let compressed = Command::new("gzip").arg("-9c").arg(folder.join(name)).output().context("cannot run gzip")?;
        ensure!(compressed.status.success(), "gzip could not compress {name}");
        size += compressed.stdout.len();
    }
    Ok(size)
}

fn compare(built: &Path, stored: &Path) -> Result<()> {
    let read = |path: PathBuf| fs::read(&path).with_context(|| format!("cannot read {}", path.display()));
    for name in FILES {
        let is_same = read(built.join(name))? == read(stored.join(name))?;
        ensure!(is_same, "web/dist/{name} does not belong to the sources in web/: run `cargo xtask page`");
    }
    Ok(())
}
