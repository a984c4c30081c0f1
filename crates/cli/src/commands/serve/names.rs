//! Names that `--model` gives: `NAME=PATH`, or `NAME,ALIAS=PATH` with further names.

use std::path::Path;

/// A value of `--model`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenModel<'a> {
    /// Path or name of the model.
    pub(super) model: &'a str,
    /// Names under which it is served; none if the flag gives none.
    pub(super) names: Vec<&'a str>,
}

/// Reads a value of `--model`. A path that exists is one, whatever characters it has.
pub(super) fn given_model(text: &str) -> Result<GivenModel<'_>, String> {
    let plain = GivenModel { model: text, names: Vec::new() };
    let Some((names, model)) = text.split_once('=').filter(|_| !Path::new(text).exists()) else { return Ok(plain) };
    let names: Vec<&str> = names.split(',').collect();
    if model.is_empty() || names.iter().any(|name| name.is_empty() || name.len() > 256) {
        return Err(format!("--model {text}: expected NAME=PATH, with a name of up to 256 bytes and a path"));
    }
    Ok(GivenModel { model, names })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_precede_the_path() {
        let given = |text: &'static str| given_model(text).map(|given| (given.names, given.model));
        assert_eq!(given("/a/b.gguf"), Ok((vec![], "/a/b.gguf")));
        assert_eq!(given("small=/a/b.gguf"), Ok((vec!["small"], "/a/b.gguf")));
        assert_eq!(given("small,gpt-4o=hub/name"), Ok((vec!["small", "gpt-4o"], "hub/name")));
        assert_eq!(given("a=b=c"), Ok((vec!["a"], "b=c")));
        for wrong in ["=/a", "a=", "a,=b", ",a=b"] {
            assert!(given(wrong).unwrap_err().contains("expected NAME=PATH"), "{wrong}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a=b");
        std::fs::write(&path, b"").unwrap();
        assert_eq!(given_model(path.to_str().unwrap()).unwrap().names, Vec::<&str>::new());
    }
}
