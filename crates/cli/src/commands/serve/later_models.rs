//! Models that come while a server of several models runs: those that are pulled into the store, by `/api/pull` or by
//! `pellucid pull`, and new files of the served folders.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use pellucid::Speculation;
use pellucid_server::{FindModels, ServedModel};
use tracing::warn;

use super::on_demand::Settings;
use super::several::{Named, models_in, plan_one};
use crate::hub::{Hub, Manifest, known_models};

/// Finds models that were not there at start.
#[derive(Debug)]
pub(super) struct LaterModels {
    pub(super) settings: Arc<Settings>,
    pub(super) speculation: Speculation,
    pub(super) max_memory: Option<u64>,
    pub(super) hub: Hub,
    /// Folders whose models are served.
    pub(super) folders: Vec<PathBuf>,
    seen: Mutex<Seen>,
}

/// Length and time of change of a file: another one means that the file was written since.
type Stamp = Option<(u64, SystemTime)>;

#[derive(Debug, Default)]
struct Seen {
    /// Models that are served.
    served: HashSet<PathBuf>,
    /// Models of the store that were there at start, and are not served.
    ignored: HashSet<PathBuf>,
    /// Names by which clients pulled models.
    names: HashMap<PathBuf, String>,
    /// Files of folders as the last look found them. One that has changed since may still be written.
    stamps: HashMap<PathBuf, Stamp>,
    /// Files that cannot be served.
    refused: HashMap<PathBuf, Stamp>,
}

impl LaterModels {
    pub(super) fn new(
        settings: Arc<Settings>,
        (speculation, max_memory): (Speculation, Option<u64>),
        (hub, folders): (&Hub, Vec<PathBuf>),
        served: HashSet<PathBuf>,
    ) -> LaterModels {
        let ignored = hub.store.readable().iter().map(|manifest| hub.store.entry(manifest)).collect();
        let mut seen = Seen { served, ignored, ..Seen::default() };
        // A file of a folder that is not served was refused at start, with a line in the log.
        for path in folders.iter().filter_map(|folder| models_in(folder).ok().flatten()).flatten() {
            if !seen.served.contains(&path) {
                seen.refused.insert(path.clone(), stamp(&path));
            }
        }
        LaterModels { settings, speculation, max_memory, hub: hub.clone(), folders, seen: Mutex::new(seen) }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a client pulled a model by this name, which may have been in the store before.
    pub(super) fn note_pull(&self, manifest: &Manifest, name: &str) {
        let path = self.hub.store.entry(manifest);
        let mut seen = self.lock();
        seen.ignored.remove(&path);
        seen.names.insert(path, name.to_owned());
    }

    /// Returns new files of the folders that were not written since the last look.
    fn in_folders(&self, seen: &mut Seen) -> Vec<Named> {
        let mut found = Vec::new();
        for path in self.folders.iter().filter_map(|folder| models_in(folder).ok().flatten()).flatten() {
            let stamp = stamp(&path);
            let is_done = seen.served.contains(&path) || seen.refused.get(&path) == Some(&stamp);
            if !is_done && seen.stamps.insert(path.clone(), stamp) == Some(stamp) {
                found.push(Named::found(path));
            }
        }
        found
    }

    /// Returns new models of the store.
    fn in_store(&self, seen: &Seen) -> Vec<Named> {
        let store = &self.hub.store;
        let mut found = Vec::new();
        for manifest in store.readable() {
            let path = store.entry(&manifest);
            let is_done = seen.served.contains(&path) || seen.ignored.contains(&path);
            if is_done || seen.refused.get(&path) == Some(&stamp(&path)) || store.damage(&manifest).is_some() {
                continue;
            }
            let short = known_models::MODELS.iter().find(|known| {
                let is_file = manifest.files.first().is_some_and(|file| file.path == known.file);
                is_file && manifest.owner == known.owner && manifest.repo == known.repo
            });
            let pulled = seen.names.get(&path).cloned();
            let names = pulled.into_iter().chain(short.map(|known| known.name.to_owned())).chain([manifest.name]);
            found.push(Named::found(path).called(&names.collect::<Vec<_>>()));
        }
        found
    }
}

impl FindModels for LaterModels {
    fn find_new(&self) -> Vec<ServedModel> {
        let mut seen = self.lock();
        let mut named = self.in_folders(&mut seen);
        named.extend(self.in_store(&seen));
        let mut found = Vec::new();
        for model in named {
            let path = model.path.clone();
            match plan_one(&self.settings, model, &self.speculation, self.max_memory) {
                Ok(model) => {
                    seen.served.insert(path);
                    found.push(model);
                }
                Err(error) => {
                    warn!("this model is not served: {error:#}");
                    seen.refused.insert(path.clone(), stamp(&path));
                }
            }
        }
        found
    }
}

/// Returns length and time of change of a file, or of the config of a folder.
fn stamp(path: &Path) -> Stamp {
    let file = if path.is_dir() { &path.join("config.json") } else { path };
    let found = std::fs::metadata(file).ok()?;
    Some((found.len(), found.modified().ok()?))
}
