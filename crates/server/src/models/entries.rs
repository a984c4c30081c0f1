//! The list of a server's models. It only grows, and an entry never moves: routes keep references to entries, and a
//! model is its index.

use std::ops::Index;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::ServedModel;

/// Maximum models that are added while the server runs.
const MAX_ADDED: usize = 256;

/// The models, those that were given first.
#[derive(Debug)]
pub(crate) struct Entries {
    cells: Box<[OnceLock<ServedModel>]>,
    len: AtomicUsize,
}

impl Entries {
    /// Returns the given models, with places for more if models are added later.
    pub(super) fn new(models: Vec<ServedModel>, may_grow: bool) -> Entries {
        let len = models.len();
        let places = (0..if may_grow { MAX_ADDED } else { 0 }).map(|_| OnceLock::new());
        Entries { cells: models.into_iter().map(OnceLock::from).chain(places).collect(), len: AtomicUsize::new(len) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ServedModel> {
        self.cells[..self.len()].iter().filter_map(OnceLock::get)
    }

    pub(crate) fn first(&self) -> Option<&ServedModel> {
        self.iter().next()
    }

    /// Whether another model can be added.
    pub(super) fn has_place(&self) -> bool {
        self.len() < self.cells.len()
    }

    /// Adds a model, which readers see from now on. The caller holds the lock of the states, which has one for it.
    pub(super) fn push(&self, model: ServedModel) {
        let index = self.len();
        if self.cells.get(index).is_some_and(|cell| cell.set(model).is_ok()) {
            self.len.store(index + 1, Ordering::Release);
        }
    }
}

impl Index<usize> for Entries {
    type Output = ServedModel;

    fn index(&self, index: usize) -> &ServedModel {
        self.cells[index].get().expect("an index belongs to a model that exists")
    }
}
