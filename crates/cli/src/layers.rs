//! Settings of `serve` in layers: flags over the environment over a config file over the defaults.
//!
//! The lower layers become flags that the user did not give, so that every setting has one name, one check and one error message.
//! Part of the argument room; `args.rs` hands the environment in.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};

/// Flags for what the environment and the config file set and the command line does not.
pub(crate) fn lower_layers(
    command: &Command,
    given: &ArgMatches,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Vec<OsString>> {
    let config = given
        .get_one::<PathBuf>("config")
        .cloned()
        .or_else(|| environment("PELLUCID_CONFIG").filter(|path| !path.trim().is_empty()).map(PathBuf::from));
    let mut file = match &config {
        Some(path) => read(path)?,
        None => BTreeMap::new(),
    };
    let mut flags = Vec::new();
    for argument in command.get_arguments() {
        let Some(name) = argument.get_long().filter(|name| !["config", "help", "version"].contains(name)) else {
            continue;
        };
        let from_file = file.remove(name);
        if given.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine) {
            continue;
        }
        let variable = format!("PELLUCID_{}", name.replace('-', "_").to_uppercase());
        let is_list = matches!(argument.get_action(), ArgAction::Append);
        let values = match environment(&variable) {
            // What a secret that was not filled in looks like: to go on without it could be to go on without keys.
            Some(text) if text.trim().is_empty() => bail!("{variable} is set to nothing: give it a value, or unset it"),
            Some(text) if is_list => text.split(',').map(|part| part.trim().to_owned()).collect(),
            Some(text) => vec![text],
            None => from_file.unwrap_or_default(),
        };
        for value in values {
            match argument.get_action() {
                ArgAction::SetTrue => match value.as_str() {
                    "true" | "1" => flags.push(format!("--{name}").into()),
                    "false" | "0" => {}
                    _ => bail!("{name}: expected true or false, found {value:?}"),
                },
                _ => flags.push(format!("--{name}={value}").into()),
            }
        }
    }
    match (file.keys().next(), config) {
        (Some(name), Some(path)) => {
            bail!("{}: no setting is called {name:?}; see `pellucid serve --help`", path.display())
        }
        _ => Ok(flags),
    }
}

/// A TOML file as names and values; names may be written with underscores.
fn read(path: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read the config file {}", path.display()))?;
    let table: toml::Table = toml::from_str(&text).with_context(|| path.display().to_string())?;
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    let mut settings = BTreeMap::new();
    for (name, value) in &table {
        let values = match value {
            toml::Value::Array(values) => values.iter().map(scalar).collect::<Option<Vec<_>>>(),
            value => scalar(value).map(|value| vec![value]),
        };
        let Some(values) = values else {
            bail!("{}: {name}: expected a text, a number, true, false or a list of those", path.display());
        };
        if settings.insert(name.replace('_', "-"), values).is_some() {
            bail!("{}: {name} stands twice", path.display());
        }
    }
    Ok(settings)
}
