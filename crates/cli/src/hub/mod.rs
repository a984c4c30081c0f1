//! The model store, and the hub from which models are downloaded.
//!
//! Commands hold a [`Hub`]: `resolve` turns a MODEL argument into a path, `pull` downloads a model. Read `pull.rs`
//! first, then `listing.rs` and `download.rs`. Knows nothing of the contents of a model file.

mod download;
mod failure;
mod free_space;
pub(crate) mod http;
pub(crate) mod known_models;
mod listing;
mod name;
mod names;
mod partial_file;
mod pip_fallback;
mod pip_process;
mod progress;
mod pull;
mod python_parts;
mod store;

pub(crate) use http::Token;
pub(crate) use listing::Format;
pub(crate) use pip_process::Python;
pub(crate) use store::{Manifest, Store};

use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::terminal::format::bytes_text;
use crate::terminal::interrupt::Interrupt;
use anyhow::{Context, Result, bail};
pub(crate) use progress::Observer;
use progress::Screen;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The model store and the remote hub.
#[derive(Debug, Clone)]
pub(crate) struct Hub {
    pub(crate) store: Store,
    pub(crate) remote: Remote,
    screen: Screen,
    interrupt: Interrupt,
}

/// Source of downloads, set by flags and the environment.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    pub(crate) endpoint: String,
    pub(crate) token: Option<Token>,
    /// Maximum time without data on a connection.
    pub(crate) stall: Duration,
    /// Python interpreter with pip, for the fallback.
    pub(crate) python: Python,
}

impl Hub {
    pub(crate) fn new(root: PathBuf, remote: Remote, interrupt: Interrupt) -> Hub {
        Hub { store: Store::new(root), remote, screen: Screen::new(), interrupt }
    }

    /// Returns this hub with transfers that `observer` sees in place of the terminal.
    pub(crate) fn observed(&self, observer: Observer) -> Hub {
        Hub { screen: Screen::observed(observer), ..self.clone() }
    }

    /// Returns the file or folder of a model: an existing path, or that of a pulled model. A model with a short name,
    /// such as the default model, is downloaded if it is not in the store, and so is one of the hub.
    pub(crate) fn resolve(&self, model: Option<&str>) -> Result<PathBuf> {
        let name = match model {
            None => self.default_model().name,
            Some("") => bail_usage!("the model's name is empty"),
            Some(name) => match Path::new(name).try_exists() {
                Ok(true) => return Ok(name.into()),
                Ok(false) => name,
                Err(error) => return Err(error).with_context(|| format!("could not access {name}")).or_usage(),
            },
        };
        if let Some(known) = known_models::find(name).filter(|known| known.is_embedded()) {
            return Ok(self.store.entry(&self.pull(known.name, pull::MAIN)?));
        }
        if let Some(path) = self.store.named(name)? {
            if !path.exists() {
                bail_usage!("the model {name} is at {}, which does not exist any more", path.display());
            }
            return Ok(path);
        }
        if let Some(manifest) = self.store.find(name)? {
            match self.store.damage(&manifest) {
                None => return Ok(self.store.entry(&manifest)),
                Some(_) if known_models::find(name).is_some() => {}
                Some(path) => bail!(
                    "the pulled model {name} is damaged: {} is missing or has the wrong size; \
                     `pellucid pull {name}` repairs it",
                    path.display()
                ),
            }
        }
        match known_models::find(name) {
            Some(_) => Ok(self.store.entry(&self.pull(name, pull::MAIN)?)),
            None => self.obtain(name),
        }
    }

    /// Returns the default model, and writes a line if it is the small one because little memory is free.
    fn default_model(&self) -> &'static known_models::KnownModel {
        let free = pellucid_cpu::free_memory();
        let chosen = known_models::default_for(free);
        if let Some(free) = free.filter(|_| chosen.name != known_models::DEFAULT.name) {
            self.screen.say(&format!(
                "note: {} are free, and the default model {} needs {}; using {} (--model chooses another)",
                bytes_text(free),
                known_models::DEFAULT.name,
                bytes_text(known_models::DEFAULT.memory_bytes()),
                chosen.name
            ));
        }
        chosen
    }
}
