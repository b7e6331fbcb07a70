//! The ranks that use a group of blocks, by slot.

use crate::storage::slot_set::SlotSet;

/// Number of ranks from which they are also stored as a bitmap. 64 ranks are compared at once, so that for a long
/// prompt that nearly all ranks use, only the differences between its groups take time.
const DENSE: usize = 32;

/// Ranks with their numbers of bookings.
#[derive(Clone, Default)]
pub struct Users {
    bookings: SlotSet<u32>,
    /// Bitmap of the same ranks; empty if there are few.
    bits: Vec<u64>,
}

impl Users {
    /// Returns the ranks, each with its number of bookings.
    pub fn as_slice(&self) -> &[(u32, u32)] {
        self.bookings.as_slice()
    }

    /// Returns whether there is no rank.
    pub fn is_empty(&self) -> bool {
        self.as_slice().is_empty()
    }

    /// Adds a booking of a rank. Returns whether it is the first of the rank.
    pub fn enter(&mut self, slot: u32) -> bool {
        let before = self.bookings.get(slot).unwrap_or(0);
        self.bookings.set(slot, before + 1);
        if before > 0 {
            return false;
        }
        if !self.bits.is_empty() {
            set(&mut self.bits, slot);
        } else if self.as_slice().len() >= DENSE {
            let mut bits = Vec::new();
            self.bits(&mut bits);
            self.bits = bits;
        }
        true
    }

    /// Removes a booking of a rank. Returns whether it was the last of the rank; None if it had none.
    pub fn leave(&mut self, slot: u32) -> Option<bool> {
        let before = self.bookings.get(slot)?;
        if before > 1 {
            self.bookings.set(slot, before - 1);
            return Some(false);
        }
        self.bookings.remove(slot);
        if self.as_slice().len() < DENSE / 2 {
            self.bits = Vec::new();
        } else if let Some(word) = self.bits.get_mut(slot as usize / 64) {
            *word &= !(1 << (slot % 64));
        }
        Some(true)
    }

    /// Returns the bitmap of the ranks, in `scratch` if it is not stored. Missing words are 0.
    pub fn bits<'a>(&'a self, scratch: &'a mut Vec<u64>) -> &'a [u64] {
        if !self.bits.is_empty() {
            return &self.bits;
        }
        scratch.clear();
        for (slot, _) in self.as_slice() {
            set(scratch, *slot);
        }
        scratch
    }
}

fn set(bits: &mut Vec<u64>, slot: u32) {
    let at = slot as usize / 64;
    if at >= bits.len() {
        bits.resize(at + 1, 0);
    }
    if let Some(word) = bits.get_mut(at) {
        *word |= 1 << (slot % 64);
    }
}

/// Calls `f` with the slot of each bit in a word; `word` is the index of the word.
pub fn each_slot(word: usize, mut bits: u64, mut f: impl FnMut(usize)) {
    while bits != 0 {
        f(word * 64 + bits.trailing_zeros() as usize);
        bits &= bits - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(users: &Users) -> Vec<u32> {
        let (mut scratch, mut slots) = (Vec::new(), Vec::new());
        for (word, bits) in users.bits(&mut scratch).iter().enumerate() {
            each_slot(word, *bits, |slot| slots.push(slot as u32));
        }
        slots
    }

    #[test]
    fn bits_are_the_ranks_whether_they_are_kept_or_not() {
        let mut users = Users::default();
        let listed = |users: &Users| users.as_slice().iter().map(|(slot, _)| *slot).collect::<Vec<_>>();
        let order: Vec<u32> = (0..100).map(|number| number * 37 % 100 * 5).collect();
        for (number, slot) in order.iter().enumerate() {
            assert!(users.enter(*slot) && !users.enter(*slot));
            assert_eq!((slots(&users), users.bits.is_empty()), (listed(&users), number + 1 < DENSE));
        }
        for (number, slot) in order.iter().enumerate() {
            assert_eq!((users.leave(*slot), users.leave(*slot), users.leave(*slot)), (Some(false), Some(true), None));
            assert_eq!((slots(&users), users.bits.is_empty()), (listed(&users), 99 - number < DENSE / 2));
        }
        assert!(users.is_empty());
    }
}
