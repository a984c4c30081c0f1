//! Several models in one server: finds them, plans the memory of each from its header, and decides which bounds hold.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use pellucid::{MemoryNeed, Speculation};
use pellucid_checkpoint::Checkpoint;
use pellucid_server::{KeepAlive, ModelSource, Purpose, ServedModel, ServedModels, SharedTenants};
use tracing::{info, warn};

use super::later_models::LaterModels;
use super::model_settings::SettingsFile;
use super::names::given_model;
use super::on_demand::{OnDemand, Settings};
use super::{ServeArgs, fingerprint};
use crate::flags::guard::OpenGuards;
use crate::flags::text_file;
use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::hub::Hub;
use crate::terminal::format::bytes_text;

/// Part of the free memory that models may take unless the operator says otherwise. The rest is for requests, for the
/// system's caches, and for errors of the plan.
const SHARE_OF_FREE: f64 = 0.8;
/// Part of the memory for models that the keys and values of one of them take at most, unless one context is longer.
const KV_SHARE: u64 = 4;

/// The models of the flags.
#[derive(Debug)]
pub(super) struct Several {
    models: Vec<Named>,
    /// Folders whose models are served.
    folders: Vec<PathBuf>,
}

/// A model to serve.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) id: String,
    /// Further names by which requests may call it.
    aliases: Vec<String>,
    pub(super) path: PathBuf,
    /// Whether it was found in a folder. Such a file may be no model.
    is_found: bool,
    /// Whether a flag says that it computes vectors.
    is_embedder: bool,
}

/// Returns the models of the flags; `None` if there is a single one that is loaded as long as the server runs.
pub(super) fn models(args: &ServeArgs, hub: &Hub) -> Result<Option<Several>> {
    let (mut models, mut folders) = (Vec::new(), Vec::new());
    for text in &args.model {
        let given = given_model(text).map_err(anyhow::Error::msg).or_usage()?;
        let name = given.model;
        let path = hub.resolve(Some(name))?;
        match models_in(&path)? {
            Some(_) if !given.names.is_empty() => {
                bail_usage!("--model {text}: a name is for one model, but {name} is a folder of models");
            }
            Some(found) => {
                if found.is_empty() {
                    bail_usage!("--model {name}: this folder has no model: neither GGUF files nor folders of models");
                }
                models.extend(found.into_iter().map(Named::found));
                folders.push(path);
            }
            None => models.push(named(Some(name), path, false).called(&given.names)),
        }
    }
    if models.len() <= 1 && !args.several.is_given() && models.iter().all(|model| !model.is_found) {
        return Ok(None);
    }
    if models.is_empty() {
        models.push(named(None, hub.resolve(None)?, false));
    }
    if let Some(name) = &args.embedding_model {
        models.push(Named { is_embedder: true, ..named(Some(name), hub.resolve(Some(name))?, false) });
    }
    let mut names: Vec<&str> = models.iter().flat_map(Named::names).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        bail_usage!("--model: two models are called {:?}; --model NAME=PATH gives a model another name", pair[0]);
    }
    refuse_flags_for_one(args)?;
    args.compute.refuse_several_devices("a server of several models")?;
    Ok(Some(Several { models, folders }))
}

fn named(name: Option<&str>, path: PathBuf, is_found: bool) -> Named {
    let id = match is_found {
        true => fingerprint::model_name(path.to_str(), &path),
        false => fingerprint::model_name(name, &path),
    };
    Named { id, aliases: Vec::new(), path, is_found, is_embedder: false }
}

impl Named {
    /// Returns a model that was found at a path. It is called after its file or folder.
    pub(super) fn found(path: PathBuf) -> Named {
        named(None, path, true)
    }

    /// Returns the model with other names, if there are any.
    pub(super) fn called(self, names: &[impl AsRef<str>]) -> Named {
        match names.split_first() {
            Some((id, aliases)) => {
                let aliases: Vec<String> = aliases.iter().map(|alias| alias.as_ref().to_owned()).collect();
                let id = id.as_ref().to_owned();
                Named { aliases: fingerprint::aliases(&id, &aliases), id, ..self }
            }
            None => self,
        }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id).chain(&self.aliases).map(String::as_str)
    }
}

/// Refuses flags that describe a single model.
fn refuse_flags_for_one(args: &ServeArgs) -> Result<()> {
    args.compute.ranks.refuse("a server with several models")?;
    let given = [
        ("--served-model-name", args.served_model_name.is_some()),
        ("--alias", !args.alias.is_empty()),
        ("--chat-template", args.template.is_given()),
    ];
    if let Some((flag, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
        bail_usage!("{flag} is for a server with a single model that is always loaded");
    }
    Ok(())
}

/// Returns the models in a folder, by name; `None` if the path is a model itself.
pub(super) fn models_in(path: &Path) -> Result<Option<Vec<PathBuf>>> {
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(None);
    }
    let entries = std::fs::read_dir(path).with_context(|| path.display().to_string())?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| path.display().to_string())?.path();
        let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        if (is_gguf && path.is_file() && !is_later_part(&path)) || path.join("config.json").exists() {
            found.push(path);
        }
    }
    found.sort();
    Ok(Some(found))
}

/// Whether a file is a part of a split GGUF file other than the first: `name-00002-of-00003.gguf`.
fn is_later_part(path: &Path) -> bool {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let mut words = stem.rsplit('-');
    let (Some(count), Some("of"), Some(part)) = (words.next(), words.next(), words.next()) else { return false };
    let is_number = |word: &str| word.len() == 5 && word.bytes().all(|byte| byte.is_ascii_digit());
    is_number(count) && is_number(part) && part != "00001"
}

/// Plans the memory of all models, and returns them with the bounds of the flags. Returns the device in words too.
pub(super) fn plan(
    args: &ServeArgs,
    several: Several,
    guards: OpenGuards,
    tenants: &SharedTenants,
    hub: &Hub,
) -> Result<(ServedModels, String, Arc<LaterModels>)> {
    let Several { models, folders } = several;
    let own = SettingsFile::read(args.several.model_settings.as_deref(), &args.sampling)?;
    own.check_names(models.iter().map(|model| model.id.as_str()))?;
    let max_memory = match args.several.max_memory {
        Some(bytes) => Some(bytes),
        None => args.compute.free_memory()?.map(|free| (free as f64 * SHARE_OF_FREE) as u64),
    };
    let shared_system = match &args.shared_system {
        Some(path) => Some(text_file::read(path).context("--shared-system")?.trim_end().to_owned()),
        None => None,
    };
    let settings = Arc::new(Settings {
        compute: args.compute.clone(),
        own,
        max_sequences: args.max_sequences,
        max_waiting: args.max_waiting,
        overcommit: args.overcommit.policy(),
        shared_system,
        guards: guards.guards,
        guard_fingerprint: guards.fingerprint,
        file_access: args.compute.file_access(hub)?,
        pooling: args.pooling.pooling,
        tenants: tenants.clone(),
    });
    let speculation = args.speculation.resolve(hub)?;
    let (mut served, mut paths) = (Vec::new(), HashSet::new());
    for model in models {
        let (is_found, path) = (model.is_found, model.path.clone());
        match plan_one(&settings, model, &speculation, max_memory) {
            Ok(model) => {
                paths.insert(path);
                served.push(model);
            }
            Err(error) if is_found => warn!("this model of the folder is not served: {error:#}"),
            Err(error) => return Err(error),
        }
    }
    let Some(first) = served.first() else {
        bail_usage!("--model: no file of the folder is a model that can be served")
    };
    let device = first.device.clone();
    if let Some(bytes) = max_memory {
        info!("memory: up to {} for the weights, keys, values and steps of all models", bytes_text(bytes));
    }
    let later = LaterModels::new(settings, (speculation, max_memory), (hub, folders), paths);
    let later = Arc::new(later);
    let models = ServedModels {
        models: served,
        finder: Some(later.clone()),
        max_memory_bytes: max_memory,
        max_loaded: args.several.max_models,
        max_waiting: args.max_waiting,
        keep_alive: args.several.keep_alive.unwrap_or(KeepAlive::Forever),
    };
    Ok((models, device, later))
}

/// Plans the memory of a model.
pub(super) fn plan_one(
    settings: &Arc<Settings>,
    model: Named,
    speculation: &Speculation,
    max_memory: Option<u64>,
) -> Result<ServedModel> {
    let Named { id, aliases, path, is_embedder, .. } = model;
    let checkpoint = Checkpoint::open(&path)?;
    let is_encoder = pellucid_model::is_encoder(&checkpoint)?;
    let states_pooling = pellucid_model::stated_pooling(&checkpoint)?.is_some();
    let purpose = if is_encoder || states_pooling || is_embedder { Purpose::Vectors } else { Purpose::Text };
    let own = settings.own.of(&id);
    if own.is_given && purpose == Purpose::Vectors {
        bail_usage!("--model-settings: [{id}]: this model computes embeddings, and has no settings of its own");
    }
    let context_len = match (purpose, own.context.or(settings.compute.context())) {
        (Purpose::Vectors, _) | (_, None) => None,
        (Purpose::Text, Some(given)) => {
            let max = pellucid_model::read_config(&checkpoint)?.context_len;
            if own.context.is_some() && given > max {
                bail_usage!("--model-settings: [{id}]: context ({given}) must not exceed that of the model ({max})");
            }
            Some(given.min(max))
        }
    };
    drop(checkpoint);
    let (settings, speculation) = (settings.clone(), speculation.clone());
    let mut source =
        OnDemand { settings, id, aliases, path, own, purpose, is_encoder, context_len, speculation, kv_bytes: 0 };
    let need = need_of(&mut source)?;
    let given = source.own.kv_memory.or(source.settings.compute.kv_memory);
    source.kv_bytes = need.kv_bytes(given, max_memory.unwrap_or(u64::MAX) / KV_SHARE);
    Ok(ServedModel {
        id: source.id.clone(),
        aliases: source.aliases.clone(),
        purpose,
        memory_bytes: need.total_bytes(source.kv_bytes),
        device: need.device,
        details: need.details,
        context_len: need.context_len,
        has_template: need.has_template || source.own.template.is_some(),
        source: ModelSource::OnDemand(Box::new(source)),
    })
}

/// Returns the memory of a model. A draft model with another vocabulary does not draft for it, and neither does a layer
/// that it does not have.
fn need_of(source: &mut OnDemand) -> Result<MemoryNeed> {
    let compute = source.settings.compute.clone();
    let need = match source.purpose {
        Purpose::Text => source.builder().memory_need(),
        Purpose::Vectors => source.builder().embedding_memory_need(),
    };
    match need {
        Err(pellucid::Error::DraftVocabulary { .. }) => {
            info!(model = source.id, "the draft model has another vocabulary and does not draft for this model");
            source.speculation = source.speculation.clone().without_draft_model();
            source.builder().memory_need().map_err(|error| compute.in_flags(error))
        }
        Err(pellucid::Error::Load { source: why, .. }) if is_no_predictor(&why) => {
            info!(model = source.id, "this model has no layer that predicts further tokens");
            source.speculation = source.speculation.clone().without_mtp();
            source.builder().memory_need().map_err(|error| compute.in_flags(error))
        }
        need => need.map_err(|error| compute.in_flags(error)),
    }
}

/// Whether a model was refused only for the drafts of a layer that predicts further tokens.
fn is_no_predictor(error: &pellucid_model::Error) -> bool {
    matches!(error, pellucid_model::Error::NoPredictor { .. } | pellucid_model::Error::PredictorNotSupported { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_one_model_or_several() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["b.gguf", "a.GGUF", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "readme.md"];
        files.iter().for_each(|name| std::fs::write(folder.path().join(name), b"").unwrap());
        std::fs::create_dir(folder.path().join("d")).unwrap();
        std::fs::write(folder.path().join("d/config.json"), b"{}").unwrap();
        std::fs::create_dir(folder.path().join("empty")).unwrap();
        let found = models_in(folder.path()).unwrap().unwrap();
        let names: Vec<String> = found.into_iter().map(|path| named(None, path, true).id).collect();
        assert_eq!(names, ["a", "b", "c-00001-of-00002", "d"]);
        assert_eq!(models_in(&folder.path().join("d")).unwrap(), None);
        assert_eq!(models_in(&folder.path().join("b.gguf")).unwrap(), None);
        assert_eq!(models_in(&folder.path().join("empty")).unwrap(), Some(Vec::new()));
    }
}
