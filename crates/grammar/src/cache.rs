//! Compiled grammars, kept by tenant: a client that sends one schema with every request pays for it once.
//!
//! Tenants share nothing, so the time of a request tells nobody which schemas others use. Sources are compared as a
//! whole. Both the entries of a tenant and the number of tenants are bounded; the least recently used go first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{CompiledGrammar, Error, GrammarCompiler, GrammarSource};

/// Maximum compiled grammars of one tenant.
pub const MAX_CACHED: usize = 16;
/// Maximum tenants whose grammars are kept.
pub const MAX_CACHED_TENANTS: usize = 64;

/// The grammars of one tenant, the most recently used first.
type Entries = VecDeque<(GrammarSource, Arc<CompiledGrammar>)>;

/// Compiled grammars of all tenants. `T` identifies a tenant.
#[derive(Debug)]
pub struct GrammarCache<T> {
    /// The most recently used tenant first.
    tenants: Mutex<VecDeque<(T, Entries)>>,
}

impl<T> Default for GrammarCache<T> {
    fn default() -> Self {
        GrammarCache { tenants: Mutex::default() }
    }
}

impl<T: PartialEq> GrammarCache<T> {
    /// Returns the tenant's compiled grammar, or compiles it. No lock is held while it compiles.
    pub fn get(
        &self,
        tenant: T,
        source: GrammarSource,
        compiler: &GrammarCompiler,
    ) -> Result<Arc<CompiledGrammar>, Error> {
        if let Some(found) = self.with_entries(&tenant, |entries| {
            let index = entries.iter().position(|(cached, _)| *cached == source)?;
            let entry = entries.remove(index)?;
            let compiled = entry.1.clone();
            entries.push_front(entry);
            Some(compiled)
        }) {
            return Ok(found);
        }
        let compiled = Arc::new(compiler.compile(&source)?);
        let entry = (source, compiled.clone());
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        let index = tenants.iter().position(|(other, _)| *other == tenant);
        let (tenant, mut entries) = index.and_then(|index| tenants.remove(index)).unwrap_or((tenant, Entries::new()));
        entries.retain(|(cached, _)| *cached != entry.0);
        entries.push_front(entry);
        entries.truncate(MAX_CACHED);
        tenants.push_front((tenant, entries));
        tenants.truncate(MAX_CACHED_TENANTS);
        Ok(compiled)
    }

    /// Returns the number of grammars that are kept for a tenant.
    pub fn num_cached(&self, tenant: &T) -> usize {
        self.with_entries(tenant, |entries| Some(entries.len())).unwrap_or(0)
    }

    fn with_entries<R>(&self, tenant: &T, read: impl FnOnce(&mut Entries) -> Option<R>) -> Option<R> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        tenants.iter_mut().find(|(other, _)| other == tenant).and_then(|(_, entries)| read(entries))
    }
}
