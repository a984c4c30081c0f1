//! Where tests find vocabularies and templates that are not ours to commit.

use std::path::{Path, PathBuf};

/// A sub-folder of the conformance data: from `PELLUCID_CONFORMANCE`, else `target/conformance` of the workspace (filled
/// by `.ci/fetch-conformance`). `None`, with a word on stderr, when there is none; with `PELLUCID_REQUIRE_CONFORMANCE` set,
/// as CI does once it has fetched the data, that is a failure.
#[allow(dead_code, reason = "each test binary uses its own part of this module")]
pub(crate) fn conformance(folder: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var_os("PELLUCID_CONFORMANCE").map(PathBuf::from);
    let places = named.into_iter().chain([root.join("target/conformance")]);
    let found = places.map(|place| place.join(folder)).find(|place| place.is_dir());
    if found.is_none() {
        let is_required = std::env::var_os("PELLUCID_REQUIRE_CONFORMANCE").is_some();
        assert!(!is_required, "no conformance data ({folder}), and it is required");
        eprintln!("SKIPPED: no conformance data ({folder}); run .ci/fetch-conformance to have this test run");
    }
    found
}

/// A tokenizer.json of the fixtures, as if it lay in a model folder with these other files.
#[allow(dead_code, reason = "each test binary uses its own part of this module")]
pub(crate) fn fixture(name: &str) -> pellucid_checkpoint::HuggingFace {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizers");
    pellucid_checkpoint::HuggingFace {
        config: serde_json::json!({}),
        generation_config: None,
        tokenizer: Some(std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap()),
        tokenizer_config: None,
        chat_template: None,
    }
}
