//! The Homebrew formula, which installs the tarball. It is written only if the address of the release is known.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{Release, sha256};

pub(super) fn write(release: &Release, out: &Path) -> Result<Vec<PathBuf>> {
    let Some(url) = &release.release_url else {
        println!("   skipped  pellucid.rb: --release-url says where the tarball will be published");
        return Ok(Vec::new());
    };
    let tarball = format!("{}.tar.gz", release.tarball_name());
    let bytes = std::fs::read(out.join(&tarball)).context("the formula needs the tarball; make it in the same call")?;
    let path = out.join("pellucid.rb");
    std::fs::write(&path, formula(&format!("{url}/{tarball}"), &sha256(&bytes), release))?;
    Ok(vec![path])
}

fn formula(url: &str, sum: &str, release: &Release) -> String {
    format!(
        r##"class Pellucid < Formula
  desc "{}"
  url "{url}"
  version "{}"
  sha256 "{sum}"
  license any_of: ["MIT", "Apache-2.0"]
  depends_on :linux
  depends_on arch: :{}

  def install
    bin.install "bin/pellucid"
    man1.install Dir["share/man/man1/*"]
    bash_completion.install "share/bash-completion/completions/pellucid"
    zsh_completion.install "share/zsh/site-functions/_pellucid"
    fish_completion.install "share/fish/vendor_completions.d/pellucid.fish"
    doc.install "LICENSES.txt"
  end

  test do
    assert_match "once", shell_output("#{{bin}}/pellucid tokenize --model tiny once")
  end
end
"##,
        release.summary,
        release.version,
        if release.program.architecture.uname == "aarch64" { "arm64" } else { "x86_64" },
    )
}
