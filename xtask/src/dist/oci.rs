//! The OCI image, made without Docker: a layer with glibc from Debian's packages, a layer with the program, and their
//! description, in one tar archive that `podman load`, `docker load` and `skopeo copy oci-archive:` accept.
//!
//! The program needs nothing but glibc and libgcc: certificate authorities are compiled in, and libraries of an NVIDIA
//! driver are mounted by the container runtime. There is no shell in the image.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::archive::{Entry, Kind, gzip, tar};
use super::{Release, sha256};

/// Debian packages whose libraries the program loads.
const PACKAGES: [&str; 2] = ["libc6", "libgcc-s1"];
/// User and group under which the server runs; it has no name outside the image.
const USER: u64 = 65532;
const HOME: &str = "var/lib/pellucid";

pub(super) fn write(release: &Release, out: &Path) -> Result<Vec<PathBuf>> {
    let mut base = system_libraries(release.program.architecture.multiarch)?;
    base.extend(system_files());
    let program = release.contents.below("usr/", "share/doc/pellucid/copyright");
    let mut image = Image { timestamp: release.timestamp, ..Image::default() };
    image.add_layer(&base)?;
    image.add_layer(&program)?;
    let path = out.join(format!("pellucid-{}-oci-{}.tar", release.version, release.program.architecture.uname));
    std::fs::write(&path, image.finish(release)?)?;
    Ok(vec![path])
}

/// An image under construction: compressed layers by their sums.
#[derive(Debug, Default)]
struct Image {
    blobs: Vec<Entry>,
    layers: Vec<Value>,
    /// Sums of the layers before compression.
    diff_ids: Vec<String>,
    timestamp: u64,
}

impl Image {
    fn add_layer(&mut self, entries: &[Entry]) -> Result<()> {
        let archive = tar(entries, self.timestamp)?;
        self.diff_ids.push(format!("sha256:{}", sha256(&archive)));
        let layer = self.add_blob("application/vnd.oci.image.layer.v1.tar+gzip", gzip(&archive)?);
        self.layers.push(layer);
        Ok(())
    }

    /// Stores bytes under their sum and returns their descriptor.
    fn add_blob(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let sum = sha256(&bytes);
        let descriptor = json!({ "mediaType": media_type, "digest": format!("sha256:{sum}"), "size": bytes.len() });
        self.blobs.push(Entry::file(format!("blobs/sha256/{sum}"), 0o644, bytes));
        descriptor
    }

    fn finish(mut self, release: &Release) -> Result<Vec<u8>> {
        let configuration = json!({
            "architecture": release.program.architecture.debian,
            "os": "linux",
            "config": {
                "User": format!("{USER}:{USER}"),
                // Inside a container the server must listen on all addresses; it then demands an API key to start.
                "Env": [
                    "PATH=/usr/bin",
                    format!("HOME=/{HOME}"),
                    format!("PELLUCID_HOME=/{HOME}"),
                    "PELLUCID_HOST=0.0.0.0",
                    "NVIDIA_VISIBLE_DEVICES=all",
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
                ],
                "Entrypoint": ["/usr/bin/pellucid"],
                "Cmd": ["serve"],
                "ExposedPorts": { "8000/tcp": {} },
                "WorkingDir": format!("/{HOME}"),
                "StopSignal": "SIGTERM",
                "Labels": {
                    "org.opencontainers.image.title": "pellucid",
                    "org.opencontainers.image.description": release.summary,
                    "org.opencontainers.image.version": release.version,
                    "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
                },
            },
            "rootfs": { "type": "layers", "diff_ids": self.diff_ids },
        });
        let configuration =
            self.add_blob("application/vnd.oci.image.config.v1+json", serde_json::to_vec(&configuration)?);
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest =
            json!({ "schemaVersion": 2, "mediaType": manifest_type, "config": configuration, "layers": self.layers });
        let mut manifest = self.add_blob(manifest_type, serde_json::to_vec(&manifest)?);
        manifest["annotations"] = json!({
            "org.opencontainers.image.ref.name": release.version,
            "io.containerd.image.name": format!("localhost/pellucid:{}", release.version),
        });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [manifest],
        });
        let mut entries = self.blobs;
        entries.push(Entry::file("index.json", 0o644, serde_json::to_vec(&index)?));
        entries.push(Entry::file("oci-layout", 0o644, r#"{"imageLayoutVersion":"1.0.0"}"#));
        tar(&entries, self.timestamp)
    }
}

/// Files that programs expect of a system, and a folder that the server may write to.
fn system_files() -> Vec<Entry> {
    vec![
        Entry::file("etc/passwd", 0o644, format!("root:x:0:0::/:/\npellucid:x:{USER}:{USER}::/{HOME}:/\n")),
        Entry::file("etc/group", 0o644, format!("root:x:0:\npellucid:x:{USER}:\n")),
        Entry::file("etc/nsswitch.conf", 0o644, "passwd: files\ngroup: files\nhosts: files dns\n"),
        Entry::folder("tmp", 0o1777, 0),
        Entry::folder(HOME, 0o750, USER),
    ]
}

/// Downloads Debian's packages and returns the libraries in them, in a root where `/lib` is `/usr/lib`.
fn system_libraries(multiarch: &str) -> Result<Vec<Entry>> {
    let work = tempfile::tempdir()?;
    let mut download = Command::new("apt-get");
    // Without this option, apt warns that its own user cannot write to the folder.
    download
        .args(["--quiet=2", "--option=APT::Sandbox::User=root", "download"])
        .args(PACKAGES)
        .current_dir(work.path());
    let status = download.status().context("apt-get could not be started: the image is made on Debian or Ubuntu")?;
    if !status.success() {
        bail!("apt-get download {} failed: {status}", PACKAGES.join(" "));
    }
    let mut entries = vec![
        Entry::link("lib", "usr/lib"),
        Entry::link("lib64", "usr/lib64"),
        // The dynamic linker has its well-known path on x86-64 in lib64, elsewhere in lib.
        Entry::folder("usr/lib64", 0o755, 0),
    ];
    let mut packages: Vec<PathBuf> =
        std::fs::read_dir(work.path())?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    packages.sort();
    for package in packages {
        let output = Command::new("dpkg-deb").arg("--fsys-tarfile").arg(&package).output()?;
        if !output.status.success() {
            bail!("dpkg-deb cannot read {}", package.display());
        }
        entries.extend(libraries_in(&output.stdout, multiarch)?);
    }
    Ok(entries)
}

/// Libraries, links between them, and copyright files of one package; converters of character sets and documents are
/// left out.
fn libraries_in(archive: &[u8], multiarch: &str) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().trim_start_matches("./").to_owned();
        let path = if path.starts_with("lib") { format!("usr/{path}") } else { path };
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_library = folder == format!("usr/lib/{multiarch}") || folder == "usr/lib64" || folder == "usr/lib";
        if !is_library && !path.ends_with("/copyright") {
            continue;
        }
        let mode = entry.header().mode()?;
        if let Some(target) = entry.link_name()? {
            entries.push(Entry::link(path, target.to_string_lossy()));
        } else if entry.header().entry_type().is_file() {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes)?;
            entries.push(Entry { path, mode, owner: 0, kind: Kind::File(bytes) });
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_taken_from_old_and_new_layouts() {
        let package = tar(
            &[
                Entry::file("./lib/x86_64-linux-gnu/libc.so.6", 0o755, *b"elf"),
                Entry::link("./lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
                Entry::file("./usr/lib/x86_64-linux-gnu/libm.so.6", 0o644, *b"elf"),
                Entry::file("./usr/lib/x86_64-linux-gnu/gconv/UTF-16.so", 0o644, *b"elf"),
                Entry::file("./usr/share/doc/libc6/copyright", 0o644, *b"text"),
                Entry::file("./usr/share/doc/libc6/changelog.gz", 0o644, *b"text"),
            ],
            0,
        );
        let paths: Vec<String> =
            libraries_in(&package.unwrap(), "x86_64-linux-gnu").unwrap().into_iter().map(|entry| entry.path).collect();
        let expected = [
            "usr/lib/x86_64-linux-gnu/libc.so.6",
            "usr/lib64/ld-linux-x86-64.so.2",
            "usr/lib/x86_64-linux-gnu/libm.so.6",
            "usr/share/doc/libc6/copyright",
        ];
        assert_eq!(paths, expected);
    }
}
