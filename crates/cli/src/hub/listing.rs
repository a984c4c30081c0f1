//! Lists the files of a repository of the hub and selects those that make up a model.
//!
//! `pull.rs` calls it. The listing comes from the network, so every path in it is checked before it is used.

use super::failure::Failure;
use super::http::{Client, HubResponse, escaped, origin, text};
use super::name::{ModelRef, Pick, check_path, check_target};
use crate::flags::usage_error::{UsageError, bail_usage};
use crate::http_error::sentence;
use crate::terminal::format::bytes_text;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;

/// Limits for a listing, far above those of any repository with a model. The hub sends at most 1000 files on a page.
const MAX_PAGES: usize = 20;
const MAX_PAGE_BYTES: u64 = 16 << 20;

/// Quantization that is taken from a repository with several, if the name has no tag: the usual compromise of size and
/// quality.
const DEFAULT_TAG: &str = "Q4_K_M";

/// A file of a repository.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile {
    pub(crate) path: String,
    pub(crate) bytes: u64,
    /// Present for files in Git LFS, whose object ids are SHA-256 hashes.
    pub(crate) sha256: Option<String>,
    /// Id of the content: the SHA-256 of a file in Git LFS, otherwise the Git object id.
    pub(crate) identity: String,
}

/// The files of one model; the one to open comes first.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) format: Format,
    pub(crate) files: Vec<RemoteFile>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    Gguf,
    /// A Hugging Face folder.
    Safetensors,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    oid: String,
    size: u64,
}

/// Returns all files of a repository at a revision.
pub(crate) fn fetch(client: &Client, model: &ModelRef, revision: &str) -> Result<Vec<RemoteFile>, Failure> {
    // A revision such as refs/pr/1 is one component of the URL.
    let revision = escaped(revision).replace('/', "%2F");
    let mut url = client.url(&format!("/api/models/{}/{}/tree/{revision}?recursive=true", model.owner, model.repo));
    let mut files = Vec::new();
    for _ in 0..MAX_PAGES {
        let answer = client.get(&url, 0)?;
        check_status(client, &answer, &format!("{}/{}", model.owner, model.repo))?;
        let next = next_page(&answer);
        let mut page = Vec::new();
        let body = answer.response.into_body().into_reader();
        body.take(MAX_PAGE_BYTES).read_to_end(&mut page).map_err(|error| {
            let why = sentence(&ureq::Error::from(error), client.host());
            Failure::remote(format!("the listing of {model} is incomplete: {why}"))
        })?;
        let entries: Vec<Entry> = serde_json::from_slice(&page).map_err(|_| {
            Failure::remote(format!("{} sent an invalid file listing: expected a JSON list of files", client.host()))
        })?;
        for entry in entries.into_iter().filter(|entry| entry.kind == "file") {
            files.push(remote_file(entry).map_err(Failure::Remote)?);
        }
        match next {
            // A listing must not redirect requests, with their token, to another host.
            Some(next)
                if next.parse().is_ok_and(|next| Some(origin(&next)) == url.parse().ok().map(|u| origin(&u))) =>
            {
                url = next;
            }
            Some(_) => return Err(Failure::remote("the listing continues on another host, which is not allowed")),
            None => return Ok(files),
        }
    }
    Err(Failure::remote(format!("{model} lists more than {MAX_PAGES} pages of files")))
}

/// Returns an error that says what to do, unless the status is a success.
pub(crate) fn check_status(client: &Client, answer: &HubResponse, what: &str) -> Result<(), Failure> {
    let host = &answer.host;
    let token = if client.has_token() { "the token in HF_TOKEN was not accepted" } else { "HF_TOKEN is not set" };
    let status = answer.response.status().as_u16();
    let message = match status {
        200 | 206 => return Ok(()),
        // The hub answers 401 also for repositories that do not exist, so as not to reveal private ones.
        401 => format!("{host} requires a token for {what} (401): it does not exist, or is private or gated ({token})"),
        403 => {
            format!("{host} denies access to {what} (403): accept its terms on its page, then set HF_TOKEN ({token})")
        }
        404 => format!("{what} does not exist at {host} (404); check the spelling and the revision"),
        429 => format!("{host} limits the rate of requests (429); try again in a few minutes"),
        500.. => format!("{host} has an internal error ({status}); try again later"),
        _ => format!("{host} answered {status} for {what}"),
    };
    // A name that the hub does not know is an error of usage.
    Err(match status {
        404 => Failure::Remote(UsageError::because(message)),
        401 if !client.has_token() => Failure::Remote(UsageError::because(message)),
        _ => Failure::remote(message),
    })
}

fn remote_file(entry: Entry) -> Result<RemoteFile> {
    check_path(&entry.path).context("the hub's listing contains an unsafe path")?;
    let (bytes, sha256) = match entry.lfs {
        None => (entry.size, None),
        Some(lfs) => {
            if lfs.oid.len() != 64 || !lfs.oid.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                bail!("the hub's listing has a hash for {:?} that is not a sha256: {:?}", entry.path, lfs.oid);
            }
            (lfs.size, Some(lfs.oid.to_ascii_lowercase()))
        }
    };
    let identity = sha256.clone().unwrap_or(entry.oid);
    Ok(RemoteFile { path: entry.path, bytes, sha256, identity })
}

/// Returns the URL of the header `Link: <...>; rel="next"`.
fn next_page(answer: &HubResponse) -> Option<String> {
    let link = text(answer.response.headers(), "link")?;
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

/// Selects the files of `model`.
pub(crate) fn select(model: &ModelRef, files: &[RemoteFile]) -> Result<Selection> {
    let groups = gguf_groups(files);
    let with_tag =
        |tag: &str| -> Vec<&Vec<RemoteFile>> { groups.values().filter(|group| has_tag(&group[0].path, tag)).collect() };
    let chosen: Vec<_> = match &model.pick {
        Pick::Any => match with_tag(DEFAULT_TAG) {
            one if one.len() == 1 => one,
            _ => groups.values().collect(),
        },
        Pick::Tag(tag) => with_tag(tag),
        Pick::File(path) => groups.values().filter(|group| group.iter().any(|file| file.path == *path)).collect(),
    };
    let selection = match (chosen.as_slice(), &model.pick) {
        ([one], _) => Selection { format: Format::Gguf, files: whole(one)? },
        ([], Pick::Any) if groups.is_empty() => folder(model, files)?,
        ([], _) if groups.is_empty() => bail_usage!("{}/{} holds no GGUF file", model.owner, model.repo),
        ([], _) => bail_usage!(
            "no GGUF file of {}/{} matches `{model}`; it holds\n{}",
            model.owner,
            model.repo,
            choices(groups.values())
        ),
        (several, _) => bail_usage!(
            "{model} matches {} GGUF models; name one as {}/{}:TAG (such as Q4_K_M) or by its file:\n{}",
            several.len(),
            model.owner,
            model.repo,
            choices(several.iter().copied())
        ),
    };
    for file in &selection.files {
        check_target(&file.path)?;
    }
    Ok(selection)
}

/// Returns the GGUF models of a listing, each with its parts in order. Image projectors and importance matrices are
/// GGUF files, but not models.
fn gguf_groups(files: &[RemoteFile]) -> BTreeMap<String, Vec<RemoteFile>> {
    let mut groups: BTreeMap<String, Vec<RemoteFile>> = BTreeMap::new();
    for file in files {
        let lower = file.path.to_ascii_lowercase();
        let base = lower.rsplit('/').next().unwrap_or_default();
        if !lower.ends_with(".gguf") || base.contains("mmproj") || base.contains("imatrix") {
            continue;
        }
        let key = split_name(&file.path).map_or(file.path.as_str(), |(stem, _, _)| stem);
        groups.entry(key.to_owned()).or_default().push(file.clone());
    }
    for group in groups.values_mut() {
        group.sort_by(|a, b| a.path.cmp(&b.path));
    }
    groups
}

/// Fails if a part of a split model is missing: `name-00001-of-00003.gguf` has three.
fn whole(group: &[RemoteFile]) -> Result<Vec<RemoteFile>> {
    if let Some((stem, _, count)) = split_name(&group[0].path) {
        let complete = group.len() == count
            && group.iter().enumerate().all(|(index, file)| split_name(&file.path) == Some((stem, index + 1, count)));
        if !complete {
            bail!("the split model {stem} is incomplete at the hub: {} of {count} parts are listed", group.len());
        }
    }
    Ok(group.to_vec())
}

/// Returns stem, number and count of a part of a split GGUF.
fn split_name(path: &str) -> Option<(&str, usize, usize)> {
    let rest = path.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five_digits = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
    Some((stem, five_digits(number)?, five_digits(count)?))
}

/// Whether a path contains a tag as a whole word: `Q4_K` is not in `x-Q4_K_M.gguf`.
pub(crate) fn has_tag(path: &str, tag: &str) -> bool {
    let (path, tag) = (path.to_ascii_uppercase(), tag.to_ascii_uppercase());
    let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    path.match_indices(&tag).any(|(at, _)| {
        !path[..at].chars().next_back().is_some_and(in_word)
            && !path[at + tag.len()..].chars().next().is_some_and(in_word)
    })
}

/// Selects the files of a Hugging Face folder: weights, config, tokenizer.
fn folder(model: &ModelRef, files: &[RemoteFile]) -> Result<Selection> {
    const COMPANIONS: [&str; 13] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "model.safetensors.index.json",
        "LICENSE",
    ];
    // Subfolders contain other formats of the same weights, as does `consolidated.safetensors` beside `model-*`.
    let top: Vec<_> = files.iter().filter(|file| !file.path.contains('/')).collect();
    let mut weights: Vec<_> = top.iter().filter(|file| file.path.ends_with(".safetensors")).copied().collect();
    if weights.iter().any(|file| file.path.starts_with("model")) {
        weights.retain(|file| file.path.starts_with("model"));
    }
    if weights.is_empty() {
        bail!(
            "{}/{} holds neither GGUF nor safetensors files at its top; other formats (.bin, .pt, .onnx) are not read",
            model.owner,
            model.repo
        );
    }
    if !top.iter().any(|file| file.path == "config.json") {
        bail!("{}/{} has safetensors but no config.json, which is needed to load them", model.owner, model.repo);
    }
    let companions = top.iter().filter(|file| COMPANIONS.contains(&file.path.as_str())).copied();
    Ok(Selection { format: Format::Safetensors, files: companions.chain(weights).cloned().collect() })
}

fn choices<'a>(groups: impl Iterator<Item = &'a Vec<RemoteFile>>) -> String {
    let lines = groups.map(|group| {
        let bytes = group.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
        let parts = if group.len() > 1 { format!(" in {} parts", group.len()) } else { String::new() };
        format!("  {} ({}{parts})", group[0].path, bytes_text(bytes))
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(paths: &[&str]) -> Vec<RemoteFile> {
        let file = |path: &&str| RemoteFile { path: path.to_string(), bytes: 1, sha256: None, identity: String::new() };
        paths.iter().map(file).collect()
    }

    /// Returns the selected paths, or the error.
    fn chosen(name: &str, paths: &[&str]) -> Result<Vec<String>, String> {
        select(&ModelRef::parse(name).unwrap(), &listing(paths))
            .map(|selection| selection.files.into_iter().map(|file| file.path).collect())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn one_gguf_is_the_model() {
        assert_eq!(chosen("o/r", &["README.md", "a.gguf", "mmproj-a.gguf", "imatrix.gguf"]).unwrap(), ["a.gguf"]);
    }

    #[test]
    fn several_ggufs_need_a_choice() {
        let files = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf"];
        assert_eq!(chosen("o/r", &files).unwrap(), ["m-Q4_K_M.gguf"], "the default");
        let error = chosen("o/r", &files[1..]).unwrap_err();
        assert!(error.contains("2 GGUF models") && files[1..].iter().all(|file| error.contains(file)), "{error}");
        assert_eq!(chosen("o/r:q4_k_m", &files).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen("o/r:Q8_0", &files).unwrap(), ["m.q8_0.gguf"]);
        assert_eq!(chosen("o/r/m-Q4_K_S.gguf", &files).unwrap(), ["m-Q4_K_S.gguf"]);
        assert!(chosen("o/r:Q4_K", &files).unwrap_err().contains("matches `o/r:Q4_K`"));
    }

    #[test]
    fn split_ggufs_come_whole() {
        let parts = ["q/m-00002-of-00002.gguf", "q/m-00001-of-00002.gguf"];
        let whole = ["q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"];
        assert_eq!(chosen("o/r", &parts).unwrap(), whole);
        assert_eq!(chosen("o/r/q/m-00002-of-00002.gguf", &parts).unwrap(), whole);
        assert!(chosen("o/r", &parts[..1]).unwrap_err().contains("incomplete"));
    }

    #[test]
    fn safetensors_come_as_a_folder() {
        let files =
            ["config.json", "model.safetensors", "consolidated.safetensors", "x/model.safetensors", "a.py", "a.bin"];
        assert_eq!(chosen("o/r", &files).unwrap(), ["config.json", "model.safetensors"]);
        assert!(chosen("o/r", &["pytorch_model.bin"]).unwrap_err().contains("neither GGUF nor safetensors"));
        assert!(chosen("o/r", &["model.safetensors"]).unwrap_err().contains("no config.json"));
    }
}
