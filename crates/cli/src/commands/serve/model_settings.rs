//! Settings of single models among several: the file of `--model-settings`, a table for each model in TOML.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pellucid_sampling::OPTIONS;
use toml::{Table, Value};

use crate::flags::byte_size;
use crate::flags::sampling::SamplingArgs;
use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::flags::{text_file, toml_file};

/// Shows the form of the file.
const EXAMPLE: &str =
    "expected the name of a model in brackets, such as `[small]`, and settings such as `context = 8192`";

/// Settings of one model.
#[derive(Debug, Clone, Default)]
pub(super) struct ModelSettings {
    /// Maximum tokens of prompt and reply.
    pub(super) context: Option<usize>,
    /// Bytes of keys and values.
    pub(super) kv_memory: Option<u64>,
    /// Chat template used instead of the model's own.
    pub(super) template: Option<String>,
    /// Sampling defaults of its requests.
    pub(super) sampling: SamplingArgs,
    /// Whether the file has a table for the model.
    pub(super) is_given: bool,
}

/// The settings of all models.
#[derive(Debug, Default)]
pub(super) struct SettingsFile {
    path: PathBuf,
    models: BTreeMap<String, ModelSettings>,
    /// Settings of a model without a table.
    others: ModelSettings,
}

impl SettingsFile {
    /// Reads the file, if there is one. `sampling` has the flags of all models, which the file changes.
    pub(super) fn read(path: Option<&Path>, sampling: &SamplingArgs) -> Result<SettingsFile> {
        let others = ModelSettings { sampling: sampling.clone(), ..ModelSettings::default() };
        let Some(path) = path else { return Ok(SettingsFile { others, ..SettingsFile::default() }) };
        let place = || format!("--model-settings {}", path.display());
        let tables: Table = toml_file::read(path, EXAMPLE).context("--model-settings")?;
        let mut models = BTreeMap::new();
        for (name, table) in tables {
            let Value::Table(table) = table else {
                bail_usage!("{}: {name}: expected a table for each model, such as [small]", place());
            };
            let folder = path.parent().unwrap_or(Path::new(""));
            let settings = settings(&table, &others, folder).with_context(|| format!("{}: [{name}]", place()));
            models.insert(name, settings.or_usage()?);
        }
        Ok(SettingsFile { path: path.to_owned(), models, others })
    }

    /// Refuses settings of models that do not exist.
    pub(super) fn check_names<'a>(&self, mut names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
        for model in self.models.keys() {
            if !names.clone().any(|name| name == model) {
                let first = names.next().unwrap_or_default();
                let path = self.path.display();
                bail_usage!("--model-settings {path}: there is no model {model:?}; expected a name such as {first:?}");
            }
        }
        Ok(())
    }

    /// Returns the settings of a model.
    pub(super) fn of(&self, id: &str) -> ModelSettings {
        self.models.get(id).unwrap_or(&self.others).clone()
    }
}

/// Reads the table of a model. Paths are relative to `folder`.
fn settings(table: &Table, others: &ModelSettings, folder: &Path) -> Result<ModelSettings> {
    let mut settings = ModelSettings { is_given: true, ..others.clone() };
    // A preset replaces all options, so it comes before those that change it.
    let is_preset = |name: &&String| name.as_str() == "preset";
    for name in table.keys().filter(is_preset).chain(table.keys().filter(|name| !is_preset(name))) {
        settings.set(&name.replace('_', "-"), &table[name], folder).with_context(|| name.clone())?;
    }
    settings.sampling.check_for_server()?;
    Ok(settings)
}

impl ModelSettings {
    fn set(&mut self, name: &str, value: &Value, folder: &Path) -> Result<()> {
        match (name, value) {
            ("context", Value::Integer(tokens)) if *tokens > 0 => self.context = usize::try_from(*tokens).ok(),
            ("context", _) => bail_usage!("expected a number of tokens above 0"),
            ("kv-memory", Value::String(size)) => {
                self.kv_memory = Some(byte_size::parse(size).map_err(anyhow::Error::msg)?);
            }
            ("kv-memory", _) => bail_usage!("expected a size such as \"2GB\", found {}", value.type_str()),
            ("chat-template", Value::String(file)) => {
                let path = folder.join(file);
                let text = text_file::read(&path)?;
                if text.trim().is_empty() {
                    bail_usage!("{}: the file is empty, expected a template", path.display());
                }
                self.template = Some(text);
            }
            ("chat-template", _) => bail_usage!("expected the path of a file, found {}", value.type_str()),
            _ if name == "preset" || OPTIONS.iter().any(|option| option.flag() == name) => {
                let text = match value {
                    Value::String(text) => text.clone(),
                    Value::Integer(number) => number.to_string(),
                    Value::Float(number) => number.to_string(),
                    _ => bail_usage!("expected a number or a text, found {}", value.type_str()),
                };
                self.sampling = self.sampling.changed(name, &text)?;
            }
            _ => bail_usage!(
                "there is no such setting of a model; expected context, kv-memory, chat-template, preset or a sampling \
                 option such as temperature; other flags hold for all models"
            ),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<SettingsFile> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("models.toml");
        std::fs::write(folder.path().join("chat.jinja"), "{{ messages }}").unwrap();
        std::fs::write(&path, text).unwrap();
        SettingsFile::read(Some(&path), &SamplingArgs::default())
    }

    #[test]
    fn a_table_has_the_settings_of_its_model() {
        let file = read(
            "[small]\ncontext = 128\nkv_memory = \"1MiB\"\nchat-template = \"chat.jinja\"\nmin-p = 0.1\n\
                         preset = \"creative\"\n[\"o/r:Q4\"]\ntemperature = 0\n",
        )
        .unwrap();
        let small = file.of("small");
        assert_eq!((small.context, small.kv_memory), (Some(128), Some(1 << 20)));
        assert_eq!(small.template.as_deref(), Some("{{ messages }}"));
        assert!(small.is_given && file.of("o/r:Q4").is_given && !file.of("other").is_given);
        assert!(file.check_names(["small", "o/r:Q4"].into_iter()).is_ok());
        let error = file.check_names(["small"].into_iter()).unwrap_err();
        assert!(error.to_string().contains("there is no model \"o/r:Q4\""), "{error}");
    }

    #[test]
    fn wrong_settings_are_refused_by_name() {
        for (text, part) in [
            ("context = 5", "context: expected a table"),
            ("[a]\ncontext = \"x\"", "[a]: context: expected a number of tokens"),
            ("[a]\ntemperature = -1", "[a]: "),
            ("[a]\nport = 1", "[a]: port: there is no such setting"),
            ("[a]\nkv-memory = \"much\"", "[a]: kv-memory: expected a size"),
            ("[a]\nchat-template = \"none.jinja\"", "none.jinja"),
            ("[a", "models.toml, line 1, column 3: this is not TOML; expected the name of a model in brackets"),
        ] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
