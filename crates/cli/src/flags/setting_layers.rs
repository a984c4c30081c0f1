//! Settings of `serve` in layers: flags take precedence over the environment, over a config file, over the defaults.
//!
//! Values of the lower layers are turned into flags that the user did not give, so that every setting has one name, one
//! check and one error message. `command_line.rs` passes the environment in.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};

use super::toml_file;
use super::usage_error::{USAGE_STATUS, reworded};

/// A flag that the user did not type, and where it came from.
#[derive(Debug)]
pub(crate) struct Setting {
    /// An environment variable, or a file and a name in it.
    source: String,
    pub(crate) flag: OsString,
}

impl Setting {
    /// Reports the error with the source of the setting and exits like a wrong flag does.
    pub(crate) fn exit_with(&self, error: &clap::Error) -> ! {
        let text = reworded(&error.to_string());
        let what = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let _ = writeln!(std::io::stderr(), "error: {}: {what}", self.source);
        std::process::exit(USAGE_STATUS.into())
    }
}

/// Returns flags for the settings of the environment and the config file that the command line does not give.
pub(crate) fn lower_layers(
    command: &Command,
    given: &ArgMatches,
    environment: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<Setting>> {
    let config = given
        .get_one::<PathBuf>("config")
        .cloned()
        .or_else(|| environment("PELLUCID_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from));
    let mut file = match &config {
        Some(path) => read(path)?,
        None => BTreeMap::new(),
    };
    let mut settings = Vec::new();
    for argument in command.get_arguments() {
        let Some(name) = argument.get_long().filter(|name| !["config", "help", "version"].contains(name)) else {
            continue;
        };
        let from_file = file.remove(name);
        if given.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine) {
            continue;
        }
        let variable = variable_of(name);
        let is_list = matches!(argument.get_action(), ArgAction::Append);
        let (source, values) = match (environment(&variable), &config) {
            (Some(value), _) => {
                let text = text(&variable, value)?;
                // An empty variable may be a secret that was not filled in. Ignoring it could serve without keys.
                if text.trim().is_empty() {
                    bail!("{variable} is empty: give it a value, or unset it");
                }
                let parts = || text.split(',').map(|part| part.trim().to_owned()).collect();
                (variable, if is_list { parts() } else { vec![text.clone()] })
            }
            (None, Some(path)) => (format!("{}: {name}", path.display()), from_file.unwrap_or_default()),
            (None, None) => continue,
        };
        for value in values {
            let flag = match (argument.get_action(), value.as_str()) {
                (ArgAction::SetTrue, "true" | "1") => format!("--{name}"),
                (ArgAction::SetTrue, "false" | "0") => continue,
                (ArgAction::SetTrue, _) => bail!("{source}: expected true or false, found {value:?}"),
                _ => format!("--{name}={value}"),
            };
            settings.push(Setting { source: source.clone(), flag: flag.into() });
        }
    }
    match (file.keys().next(), config) {
        (Some(name), Some(path)) => {
            bail!("{}: there is no setting {name:?}; see `pellucid serve --help`", path.display())
        }
        _ => Ok(settings),
    }
}

/// Returns the environment variable of a flag.
fn variable_of(flag: &str) -> String {
    format!("PELLUCID_{}", flag.replace('-', "_").to_uppercase())
}

/// Returns the value of a variable as text. Dropping one that is not UTF-8 could drop a key, so it is an error.
pub(crate) fn text(name: &str, value: OsString) -> Result<String> {
    value.into_string().map_err(|_| anyhow!("{name} is set to bytes that are not UTF-8"))
}

/// Returns warnings about variables that begin with `PELLUCID_` but name no flag. They are no error: Kubernetes sets
/// such variables in every container for a service named pellucid.
pub(crate) fn unknown_variables(command: &Command, names: impl Iterator<Item = OsString>) -> Vec<String> {
    let known: Vec<String> =
        command.get_arguments().filter_map(|argument| argument.get_long()).map(variable_of).collect();
    let is_unknown = |name: &String| {
        name.starts_with("PELLUCID_")
            && !["PELLUCID_HOME", "PELLUCID_URL"].contains(&name.as_str())
            && !known.contains(name)
    };
    let unknown = names.filter_map(|name| name.into_string().ok()).filter(is_unknown);
    unknown.map(|name| format!("note: {name} is set, but there is no setting of that name")).collect()
}

/// Shows the form of a line of the config file.
const EXAMPLE: &str = "expected a name, `=` and a value, such as `port = 8080` or `model = \"smollm2\"`";

/// Reads a TOML file as names and values. Names may be written with underscores.
fn read(path: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let table: toml::Table = toml_file::read(path, EXAMPLE)?;
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
            bail!("{}: {name} is set twice", path.display());
        }
    }
    Ok(settings)
}
