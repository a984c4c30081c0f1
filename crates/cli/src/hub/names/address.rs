//! Addresses of models as people paste them: pages and files of the hub.

use anyhow::Result;

use crate::flags::usage_error::bail_usage;

/// Hosts of the hub under which people share models, besides the host of the endpoint in use.
const HUB_HOSTS: [&str; 4] = ["huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co"];

/// A model at an address.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// Name in the form of MODEL arguments: `owner/repo`, `owner/repo:TAG` or `owner/repo/file.gguf`.
    pub(super) name: String,
    /// Branch, tag or commit, if the address has one.
    pub(super) revision: Option<String>,
}

/// Reads an address; `None` if the text is not one. `endpoint_host` is the host of the hub in use. Another host is
/// refused: models come from the hub only.
pub(super) fn parse(text: &str, endpoint_host: &str) -> Result<Option<Address>> {
    let lower = text.to_ascii_lowercase();
    let rest = match ["https://", "http://"].iter().find(|scheme| lower.starts_with(**scheme)) {
        Some(scheme) => &text[scheme.len()..],
        None if HUB_HOSTS.iter().any(|host| lower.strip_prefix(host).is_some_and(|rest| rest.starts_with('/'))) => text,
        None => return Ok(None),
    };
    let rest = rest.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    let mut parts = rest.split('/');
    let host = parts.next().unwrap_or_default();
    let name = host.split(':').next().unwrap_or_default();
    if !name.eq_ignore_ascii_case(endpoint_host) && !HUB_HOSTS.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        bail_usage!(
            "{text} is not at the hub ({endpoint_host}): download the file yourself and give its path, or set --endpoint"
        );
    }
    let parts: Vec<&str> = parts.collect();
    match parts[..] {
        [owner, repo] if !owner.is_empty() && !repo.is_empty() => {
            Ok(Some(Address { name: format!("{owner}/{repo}"), revision: None }))
        }
        [owner, repo, "tree", revision, ..] => {
            Ok(Some(Address { name: format!("{owner}/{repo}"), revision: Some(decoded(revision)) }))
        }
        [owner, repo, "blob" | "resolve" | "raw", revision, ref file @ ..] if !file.is_empty() => {
            let file = decoded(&file.join("/"));
            Ok(Some(Address { name: format!("{owner}/{repo}/{file}"), revision: Some(decoded(revision)) }))
        }
        _ => bail_usage!(
            "{text} is not the address of a model: expected https://{endpoint_host}/OWNER/REPO, or that with \
             /blob/main/FILE.gguf"
        ),
    }
}

/// Decodes `%20` and the like; what is not such a code stays.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = bytes.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.filter(|_| bytes[at] == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                plain.push(byte);
                at += 3;
            }
            None => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<(String, Option<String>)> {
        parse(text, "hub.example").unwrap().map(|address| (address.name, address.revision))
    }

    #[test]
    fn pages_and_files_of_the_hub_are_models() {
        let found = |name: &str, revision: Option<&str>| Some((name.to_owned(), revision.map(str::to_owned)));
        assert_eq!(read("https://huggingface.co/o/r"), found("o/r", None));
        assert_eq!(read("https://huggingface.co/o/r/"), found("o/r", None));
        assert_eq!(read("HTTPS://HF.co/o/r:Q4_K_M"), found("o/r:Q4_K_M", None));
        assert_eq!(read("hf.co/o/r"), found("o/r", None));
        assert_eq!(read("http://hub.example:8080/o/r/tree/v2"), found("o/r", Some("v2")));
        assert_eq!(read("https://hf.co/o/r/blob/main/a/b.gguf"), found("o/r/a/b.gguf", Some("main")));
        assert_eq!(
            read("https://hf.co/o/r/resolve/refs%2Fpr%2F1/a%20b.gguf?download=true"),
            found("o/r/a b.gguf", Some("refs/pr/1"))
        );
        for text in ["o/r", "o/r:Q4", "smollm2", "hf.com/o/r", "What is https?", ""] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn other_hosts_and_other_pages_are_refused() {
        for text in [
            "https://evil.example/o/r",
            "https://huggingface.co.evil.example/o/r",
            "https://huggingface.co@evil.example/o/r",
            "https://huggingface.co/o",
            "https://huggingface.co/o/r/discussions",
            "https://huggingface.co/o/r/blob/main",
            "https://",
        ] {
            assert!(parse(text, "hub.example").is_err(), "{text} was taken");
        }
    }
}
