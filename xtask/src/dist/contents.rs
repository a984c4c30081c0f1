//! Files that every package installs below its prefix (`/usr`, or the folder of the tarball).

use std::path::Path;

use anyhow::{Context, Result};

use super::archive::Entry;
use super::licences;
use super::program::Program;

/// Place of each shell's completions below the prefix.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/pellucid"),
    ("zsh", "share/zsh/site-functions/_pellucid"),
    ("fish", "share/fish/vendor_completions.d/pellucid.fish"),
];

#[derive(Debug)]
pub(super) struct Contents {
    /// The program alone.
    pub(super) program: Entry,
    /// Completions, manual pages, documents.
    pub(super) rest: Vec<Entry>,
    /// Licence texts of the project and of every library in the program.
    pub(super) licences: String,
    /// The systemd unit, for a program in `/usr/bin`.
    pub(super) unit: String,
}

impl Contents {
    /// Reads the documents of the repository and asks the program for the rest.
    pub(super) fn collect(root: &Path, program: &Program) -> Result<Self> {
        let read = |name: &str| std::fs::read_to_string(root.join(name)).with_context(|| format!("cannot read {name}"));
        let mut rest = Vec::new();
        for (shell, path) in COMPLETIONS {
            rest.push(Entry::file(path, 0o644, program.output(&["completions", shell])?));
        }
        rest.extend(manual_pages(program)?);
        for name in ["README.md", "CHANGELOG.md", "SECURITY.md"] {
            rest.push(Entry::file(format!("share/doc/pellucid/{name}"), 0o644, read(name)?));
        }
        let own = format!(
            "Pellucid is licensed under either of these two licences, at your option.\n\n{}\n\n{}",
            read("LICENSE-MIT")?,
            read("LICENSE-APACHE")?
        );
        Ok(Self {
            program: Entry::file("bin/pellucid", 0o755, program.bytes.clone()),
            rest,
            licences: format!("{own}\n\n{}", licences::of_libraries(root)?),
            unit: read("packaging/pellucid.service")?.replace("/usr/local/bin/", "/usr/bin/"),
        })
    }

    /// All files, each with `prefix` before its path; the licences are at `licences`, relative to the prefix.
    pub(super) fn below(&self, prefix: &str, licences: &str) -> Vec<Entry> {
        let text = Entry::file(licences, 0o644, self.licences.as_bytes());
        std::iter::once(&self.program).chain(&self.rest).chain([&text]).map(|entry| entry.under(prefix)).collect()
    }
}

/// Manual pages as the program writes them.
fn manual_pages(program: &Program) -> Result<Vec<Entry>> {
    let folder = tempfile::tempdir()?;
    program.output(&["man", "--out", &folder.path().display().to_string()])?;
    let mut pages = Vec::new();
    for page in std::fs::read_dir(folder.path())? {
        let page = page?;
        let name = page.file_name().to_string_lossy().into_owned();
        pages.push(Entry::file(format!("share/man/man1/{name}"), 0o644, std::fs::read(page.path())?));
    }
    anyhow::ensure!(!pages.is_empty(), "the program wrote no manual page");
    Ok(pages)
}
