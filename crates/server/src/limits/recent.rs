//! A map with a bounded number of entries that forgets the one used longest ago.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// A map of at most `capacity` entries. Inserting one more removes the entry that was used longest ago.
#[derive(Debug)]
pub(crate) struct RecentMap<K, V> {
    capacity: usize,
    entries: HashMap<K, (V, u64)>,
    /// Keys in the order of their last use.
    order: BTreeMap<u64, K>,
    last_use: u64,
}

impl<K: Hash + Eq + Clone, V> RecentMap<K, V> {
    pub(crate) fn new(capacity: usize) -> RecentMap<K, V> {
        RecentMap { capacity, entries: HashMap::new(), order: BTreeMap::new(), last_use: 0 }
    }

    /// Returns the value of `key` and counts this as a use.
    pub(crate) fn get(&mut self, key: &K) -> Option<&mut V> {
        let (value, last_use) = self.entries.get_mut(key)?;
        self.last_use += 1;
        self.order.remove(last_use);
        self.order.insert(self.last_use, key.clone());
        *last_use = self.last_use;
        Some(value)
    }

    /// Returns the value of `key`, inserted if it is absent.
    pub(crate) fn get_or_insert(&mut self, key: &K, new: impl FnOnce() -> V) -> Option<&mut V> {
        if !self.entries.contains_key(key) {
            if self.entries.len() >= self.capacity
                && let Some((_, oldest)) = self.order.pop_first()
            {
                self.entries.remove(&oldest);
            }
            self.last_use += 1;
            self.entries.insert(key.clone(), (new(), self.last_use));
            self.order.insert(self.last_use, key.clone());
        }
        self.get(key)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        assert_eq!(self.entries.len(), self.order.len());
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_used_longest_ago_is_forgotten() {
        let mut map = RecentMap::new(3);
        for key in 0..3 {
            map.get_or_insert(&key, || key * 10);
        }
        assert_eq!(map.get(&0), Some(&mut 0));
        map.get_or_insert(&3, || 30);
        assert_eq!(map.len(), 3);
        assert_eq!([0, 1, 3].map(|key| map.get(&key).copied()), [Some(0), None, Some(30)]);
        for key in 100..1000 {
            map.get_or_insert(&key, || key);
        }
        assert_eq!(map.len(), 3);
    }
}
