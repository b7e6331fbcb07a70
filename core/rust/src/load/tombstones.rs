//! The newest freed keys.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

/// Keys in the order of their last `put`, at most `most`.
pub struct Tombstones<K> {
    most: usize,
    put: u64,
    order: BTreeMap<u64, Arc<K>>,
    by_key: HashMap<Arc<K>, u64>,
}

impl<K: Hash + Eq> Tombstones<K> {
    pub fn new(most: usize) -> Self {
        Self { most, put: 0, order: BTreeMap::new(), by_key: HashMap::new() }
    }

    pub fn contains(&self, key: &K) -> bool {
        self.by_key.contains_key(key)
    }

    /// Makes a key the newest one, and drops the oldest if there are too many.
    pub fn put(&mut self, key: Arc<K>) {
        if self.most == 0 {
            return;
        }
        self.put += 1;
        if let Some(before) = self.by_key.insert(Arc::clone(&key), self.put) {
            self.order.remove(&before);
        }
        self.order.insert(self.put, key);
        if self.order.len() > self.most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.by_key.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept() {
        let mut tombstones = Tombstones::new(2);
        for key in [1, 2, 1, 3] {
            tombstones.put(Arc::new(key));
        }
        assert!(tombstones.contains(&1) && tombstones.contains(&3) && !tombstones.contains(&2));
        assert_eq!((tombstones.order.len(), tombstones.by_key.len()), (2, 2));
        let mut none = Tombstones::new(0);
        none.put(Arc::new(1));
        assert!(!none.contains(&1));
    }
}
