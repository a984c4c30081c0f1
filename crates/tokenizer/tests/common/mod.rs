//! Conformance data (vocabularies and templates of other projects, which are not part of the repository) and fixtures.

use std::path::{Path, PathBuf};

/// Returns a subfolder of the conformance data, in `PELLUCID_CONFORMANCE` or in `target/conformance` of the workspace,
/// which `.ci/fetch-conformance` fills. Without the data it returns `None` and prints a message. If
/// `PELLUCID_REQUIRE_CONFORMANCE` is set, as in CI after the data was fetched, it panics instead.
#[allow(dead_code, reason = "each test binary uses its own part of this module")]
pub(crate) fn conformance(folder: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var_os("PELLUCID_CONFORMANCE").map(PathBuf::from);
    let places = named.into_iter().chain([root.join("target/conformance")]);
    let found = places.map(|place| place.join(folder)).find(|place| place.is_dir());
    if found.is_none() {
        let is_required = std::env::var_os("PELLUCID_REQUIRE_CONFORMANCE").is_some();
        assert!(!is_required, "no conformance data ({folder}), but PELLUCID_REQUIRE_CONFORMANCE is set");
        eprintln!("SKIPPED: no conformance data ({folder}); run .ci/fetch-conformance to run this test");
    }
    found
}

/// Returns a tokenizer.json of the fixtures as a model folder without the other files of a tokenizer.
#[allow(dead_code, reason = "each test binary uses its own part of this module")]
pub(crate) fn fixture(name: &str) -> pellucid_checkpoint::HuggingFace {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizers");
    pellucid_checkpoint::HuggingFace {
        config: serde_json::json!({}),
        generation_config: None,
        tokenizer: Some(std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap()),
        tokenizer_config: None,
        chat_template: None,
        ..pellucid_checkpoint::HuggingFace::default()
    }
}
