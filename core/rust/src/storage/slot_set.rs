//! A map from rank slots to values. A map of one entry uses no heap memory.

/// Slots and their values, in order of the slots.
#[derive(Clone, Default)]
pub enum SlotSet<T> {
    #[default]
    None,
    One([(u32, T); 1]),
    Many(Vec<(u32, T)>),
}

impl<T: Copy> SlotSet<T> {
    /// Returns all entries.
    #[inline]
    pub fn as_slice(&self) -> &[(u32, T)] {
        match self {
            Self::None => &[],
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }

    /// Returns the value of a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> Option<T> {
        let entries = self.as_slice();
        let at = entries.binary_search_by_key(&slot, |(slot, _)| *slot).ok()?;
        entries.get(at).map(|(_, value)| *value)
    }

    /// Sets the value of a slot. Returns the previous one.
    pub fn set(&mut self, slot: u32, value: T) -> Option<T> {
        let entries = match self {
            Self::None => {
                *self = Self::One([(slot, value)]);
                return None;
            }
            Self::One(one) => one.as_mut_slice(),
            Self::Many(many) => many.as_mut_slice(),
        };
        match entries.binary_search_by_key(&slot, |(slot, _)| *slot) {
            Ok(at) => entries.get_mut(at).map(|(_, had)| std::mem::replace(had, value)),
            Err(at) => {
                if let Self::One(one) = self {
                    *self = Self::Many(one.to_vec());
                }
                if let Self::Many(many) = self {
                    many.insert(at, (slot, value));
                }
                None
            }
        }
    }

    /// Removes a slot. Returns its value.
    pub fn remove(&mut self, slot: u32) -> Option<T> {
        let at = self.as_slice().binary_search_by_key(&slot, |(slot, _)| *slot).ok()?;
        let Self::Many(many) = self else {
            let Self::One([(_, value)]) = std::mem::take(self) else { return None };
            return Some(value);
        };
        let (_, value) = many.remove(at);
        match many.as_slice() {
            [] => *self = Self::None,
            [one] => *self = Self::One([*one]),
            left if left.len() * 4 <= many.capacity() => many.shrink_to(left.len() * 2),
            _ => {}
        }
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_stay_in_order() {
        let mut set = SlotSet::default();
        for slot in [5, 1, 9, 3, 7] {
            assert_eq!(set.set(slot, slot * 10), None);
        }
        assert_eq!(set.as_slice(), &[(1, 10), (3, 30), (5, 50), (7, 70), (9, 90)]);
        assert_eq!((set.set(3, 31), set.get(3), set.get(4)), (Some(30), Some(31), None));
        assert_eq!((set.remove(4), set.remove(5), set.remove(5)), (None, Some(50), None));
        for slot in [1, 3, 7] {
            assert!(set.remove(slot).is_some());
        }
        assert!(matches!(set, SlotSet::One([(9, 90)])));
        assert_eq!((set.remove(1), set.remove(9)), (None, Some(90)));
        assert!(matches!(set, SlotSet::None));
    }
}
