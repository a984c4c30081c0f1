//! The Debian package: the program, completions, manual pages, and a systemd unit that is installed but not started,
//! because a server needs a model and a key first.
//!
//! The format is `ar` around two compressed tar archives, so `dpkg-deb` is not needed to make it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::Release;
use super::archive::{Entry, Kind, gzip, tar};

/// The settings that the unit reads; the administrator's changes survive an upgrade.
const SETTINGS: &str = "etc/pellucid/serve.toml";
const SETTINGS_TEXT: &str = "\
# Settings of `pellucid serve`, one per flag: `pellucid serve --help` lists them all. Put a key into
# /etc/pellucid/environment (PELLUCID_API_KEY=...), then: systemctl enable --now pellucid
#
# model = \"/srv/models/model.gguf\"
# host = \"0.0.0.0\"
# port = 8000
";

pub(super) fn write(release: &Release, out: &Path) -> Result<Vec<PathBuf>> {
    let mut entries = release.contents.below("usr/", "share/doc/pellucid/copyright");
    compress_pages(&mut entries)?;
    entries.push(Entry::file("usr/lib/systemd/system/pellucid.service", 0o644, release.contents.unit.as_bytes()));
    entries.push(Entry::file(SETTINGS, 0o644, SETTINGS_TEXT));

    let architecture = release.program.architecture.debian;
    let size: usize = entries.iter().map(|entry| contents(entry).len()).sum();
    let control = format!(
        "Package: pellucid\nVersion: {}\nArchitecture: {architecture}\nMaintainer: Pellucid <pellucid@localhost>\n\
         Installed-Size: {}\nDepends: libc6 (>= 2.{}), libgcc-s1 | libgcc1\nSection: science\nPriority: optional\n\
         Description: {}\n Loads a model (GGUF or safetensors), answers on the command line or as a server with an\n \
         OpenAI-compatible API, on CPUs and NVIDIA GPUs, and shows how every token was chosen.\n",
        release.version,
        size.div_ceil(1024),
        release.program.glibc_minor,
        release.summary,
    );
    let control = [Entry::file("control", 0o644, control), Entry::file("conffiles", 0o644, format!("/{SETTINGS}\n"))];
    let parts = [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", gzip(&tar(&control, release.timestamp)?)?),
        ("data.tar.gz", gzip(&tar(&entries, release.timestamp)?)?),
    ];
    let path = out.join(format!("pellucid_{}_{architecture}.deb", release.version));
    std::fs::write(&path, ar(&parts, release.timestamp))?;
    Ok(vec![path])
}

/// Compresses manual pages, as Debian's policy demands.
fn compress_pages(entries: &mut [Entry]) -> Result<()> {
    for entry in entries.iter_mut().filter(|entry| entry.path.starts_with("usr/share/man/")) {
        entry.kind = Kind::File(gzip(contents(entry))?);
        entry.path += ".gz";
    }
    Ok(())
}

fn contents(entry: &Entry) -> &[u8] {
    match &entry.kind {
        Kind::File(bytes) => bytes,
        Kind::Folder | Kind::Link(_) => &[],
    }
}

/// Writes an `ar` archive. Members begin at even offsets.
fn ar(members: &[(&str, Vec<u8>)], timestamp: u64) -> Vec<u8> {
    let mut archive = b"!<arch>\n".to_vec();
    for (name, bytes) in members {
        let header = format!("{name:<16}{timestamp:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, "100644", bytes.len());
        archive.extend(header.as_bytes());
        archive.extend(bytes);
        if bytes.len() % 2 == 1 {
            archive.push(b'\n');
        }
    }
    archive
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_an_archive_begin_at_even_offsets() {
        let archive = ar(&[("odd", b"abc".to_vec()), ("even", b"defg".to_vec())], 5);
        assert_eq!(archive.len(), 8 + 60 + 4 + 60 + 4);
        assert_eq!(&archive[8 + 60..8 + 64], b"abc\n");
        assert_eq!(&archive[8 + 64..8 + 68], b"even");
    }
}
