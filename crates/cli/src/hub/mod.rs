//! The model store and where models come from.
//!
//! Commands hold a [`Hub`]: `resolve` turns what the user wrote for MODEL into a path, `pull` brings a model in. The order of
//! reading is `pull.rs`, then `listing.rs` and `download.rs`. Knows nothing of what is inside a model file.

mod download;
mod failure;
mod http;
pub(crate) mod known;
mod listing;
mod name;
mod partial_file;
mod pip_fallback;
mod pull;
mod screen;
mod store;

pub(crate) use http::Token;
pub(crate) use listing::Format;
pub(crate) use store::{Manifest, Store};

use crate::terminal::interrupt::Interrupt;
use anyhow::{Context, Result, bail};
use screen::Screen;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The store with the way to fill it.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) store: Store,
    pub(crate) remote: Remote,
    screen: Screen,
    interrupt: Interrupt,
}

/// Where models come from, as the arguments and the environment say.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) endpoint: String,
    pub(crate) token: Option<Token>,
    /// How long a connection may send nothing.
    pub(crate) stall: Duration,
    /// The Python that has pip, for the fallback.
    pub(crate) python: PathBuf,
}

impl Hub {
    pub(crate) fn new(root: PathBuf, remote: Remote, interrupt: Interrupt) -> Hub {
        Hub { store: Store::new(root), remote, screen: Screen::new(), interrupt }
    }

    /// The file or folder of a model: an existing path, a pulled model's name, or the default model, which is fetched if it
    /// is not there yet, as is any model that has a short name.
    pub(crate) fn resolve(&self, model: Option<&str>) -> Result<PathBuf> {
        let name = match model {
            None => known::DEFAULT.name,
            Some("") => bail!("the model's name is empty"),
            Some(name) => match Path::new(name).try_exists() {
                Ok(true) => return Ok(name.into()),
                Ok(false) => name,
                Err(error) => return Err(error).with_context(|| format!("could not look at {name}")),
            },
        };
        if let Some(manifest) = self.store.find(name)? {
            match self.store.damage(&manifest) {
                None => return Ok(self.store.entry(&manifest)),
                Some(_) if known::find(name).is_some() => {}
                Some(path) => bail!(
                    "the pulled model {name} is damaged: {} is missing or has another size; `pellucid pull {name}` repairs it",
                    path.display()
                ),
            }
        }
        match known::find(name) {
            Some(_) => Ok(self.store.entry(&self.pull(name, pull::MAIN)?)),
            None => bail!(
                "there is no model `{name}`: no file or folder of that path, and no pulled model of that name in {}; \
                 `pellucid list` shows what is there, `pellucid pull OWNER/REPO` brings a model",
                self.store.root().display()
            ),
        }
    }
}
