//! Counts the bookings of each rank that use a block.
//!
//! Blocks that are used together form a group: consecutive blocks of a prompt, with the ranks that use all of them. A
//! booking that uses only a part of a group splits it. A query thus takes one lookup for each group instead of each
//! block. A booking stores the groups at the time of its start, and a group that is split links to its rest. Groups are
//! identified by their first block, so that the smaller part of a split can become the new group. A block thus moves at
//! most as often as its group can be halved.
//!
//! Hashes are those of sequences: two prompts with an equal hash have all hashes before it in common. A booking of others
//! makes counts wrong, also those of prompts that share a hash with it, until it ends. It ends as it began: then nothing
//! of it is left.

use std::sync::Arc;

use crate::hash::Secret;
use crate::load::block_users::{Users, each_slot};
use crate::storage::table::Table;
use crate::storage::tagmap::TagMap;

/// Memory that stays when no block is active. To map it for the next request takes as long as the rest of its booking.
const KEPT_BYTES: usize = 1 << 20;
/// Size of the table by hash up to which it does not shrink with the blocks: that of two prompts of 128k tokens.
const KEPT_TABLE_BYTES: usize = 256 << 10;

#[derive(Default)]
struct Block {
    hash: u64,
    group: u32,
    /// Index of the block in the `ids` of its group.
    at: u32,
}

#[derive(Clone, Default)]
struct Group {
    /// Ids of blocks that were added together. Those of the group are `from..to`.
    ids: Arc<[u32]>,
    from: u32,
    to: u32,
    users: Users,
    /// First block of the part that the last split cut off behind. Outdated if no booking continues there.
    rest: u32,
}

impl Group {
    fn len(&self) -> u32 {
        self.to - self.from
    }

    fn blocks(&self) -> &[u32] {
        self.ids.get(self.from as usize..self.to as usize).unwrap_or_default()
    }
}

/// A part of a booking: the first block of a group, and the number of its blocks then.
#[derive(Clone, Copy)]
pub struct Piece {
    first: u32,
    blocks: u32,
}

impl Piece {
    pub fn blocks(&self) -> usize {
        self.blocks as usize
    }
}

/// The active blocks of all ranks.
pub struct ActiveBlocks {
    blocks: Table<Block>,
    groups: Table<Group>,
    by_hash: TagMap,
    secret: Secret,
}

impl ActiveBlocks {
    pub fn new() -> Self {
        Self { blocks: Table::new(), groups: Table::new(), by_hash: TagMap::new(), secret: Secret::random() }
    }

    /// Returns the number of distinct active blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the memory of the tables, in bytes.
    pub fn bytes(&self) -> usize {
        self.blocks.bytes() + self.groups.bytes() + self.by_hash.bytes()
    }

    /// Adds the distinct blocks of a booking for a rank. Returns its pieces, and how many blocks the rank did not use
    /// before; None, with nothing changed, if there is not enough memory.
    pub fn add(&mut self, hashes: &[u64], slot: u32) -> Option<(Box<[Piece]>, u64)> {
        let mut pieces = Vec::new();
        let mut gained = 0;
        let mut left = hashes;
        while let Some(first) = left.first() {
            let found = match self.find(*first) {
                Some(block) => self.cut_out(block, left),
                None => self.new_group(left),
            };
            let Some(piece) = found else {
                self.release(&pieces, slot);
                return None;
            };
            if self.groups.at_mut(self.blocks.at(piece.first).group).users.enter(slot) {
                gained += u64::from(piece.blocks);
            }
            pieces.push(piece);
            left = left.get(piece.blocks as usize..).unwrap_or_default();
        }
        Some((pieces.into_boxed_slice(), gained))
    }

    /// Removes the pieces that `add` returned. Returns how many blocks the rank no longer uses.
    pub fn release(&mut self, pieces: &[Piece], slot: u32) -> u64 {
        let mut lost = 0;
        for piece in pieces {
            let (mut first, mut left) = (piece.first, piece.blocks);
            while left > 0 {
                let id = self.blocks.at(first).group;
                let group = self.groups.at_mut(id);
                let (blocks, rest) = (group.len(), group.rest);
                match group.users.leave(slot) {
                    Some(last) => lost += if last { u64::from(blocks) } else { 0 },
                    None => break,
                }
                if group.users.is_empty() {
                    let gone = self.groups.take(id);
                    self.forget(gone.blocks());
                }
                left = left.saturating_sub(blocks);
                first = rest;
            }
        }
        if self.blocks.len() == 0 && self.bytes() > KEPT_BYTES {
            self.blocks.shrink();
            self.groups.shrink();
            self.by_hash.shrink();
        }
        lost
    }

    /// Returns for each slot how many leading blocks of a prompt its rank uses.
    pub fn leading(&self, hashes: &[u64], slots: usize) -> Vec<u32> {
        let mut leading = vec![0; slots];
        // Ranks that use all blocks so far. Each leaves once and none returns.
        let mut along = vec![u64::MAX; slots.div_ceil(64)];
        let mut scratch = Vec::new();
        let mut at = 0;
        while let Some(id) = hashes.get(at).and_then(|hash| self.find(*hash)) {
            let block = self.blocks.at(id);
            let group = self.groups.at(block.group);
            let users = group.users.bits(&mut scratch);
            let mut left = 0;
            for (place, along) in along.iter_mut().enumerate() {
                let stay = *along & users.get(place).copied().unwrap_or(0);
                each_slot(place, *along & !stay, |slot| put(&mut leading, slot, at as u32));
                *along = stay;
                left |= stay;
            }
            if left == 0 {
                return leading;
            }
            at += self.common(group, block.at, hashes.get(at..).unwrap_or_default()).max(1) as usize;
        }
        for (place, along) in along.iter().enumerate() {
            each_slot(place, *along, |slot| put(&mut leading, slot, at as u32));
        }
        leading
    }

    #[inline]
    fn find(&self, hash: u64) -> Option<u32> {
        self.by_hash.find(self.secret.mix(hash), |id| self.blocks.at(id).hash == hash)
    }

    /// Returns how many blocks of a group, from `at` on, are equal to the first of `hashes`. In a chain of hashes, those
    /// before an equal one are equal, so a few are compared instead of thousands.
    fn common(&self, group: &Group, at: u32, hashes: &[u64]) -> u32 {
        let ids = group.ids.get(at as usize..group.to as usize).unwrap_or_default();
        let ids = ids.get(..hashes.len()).unwrap_or(ids);
        let is_same = |number: usize, id: u32| hashes.get(number) == Some(&self.blocks.at(id).hash);
        if ids.last().is_some_and(|id| is_same(ids.len() - 1, *id)) {
            return ids.len() as u32;
        }
        let (mut same, mut differs) = (0, ids.len());
        while same < differs {
            let middle = same.midpoint(differs);
            if ids.get(middle).is_some_and(|id| is_same(middle, *id)) { same = middle + 1 } else { differs = middle }
        }
        same as u32
    }

    /// Splits groups so that the first of `hashes`, which begin with the block `first`, form a group.
    fn cut_out(&mut self, first: u32, hashes: &[u64]) -> Option<Piece> {
        let &Block { group, at, .. } = self.blocks.at(first);
        self.cut(group, at)?;
        let group = self.blocks.at(first).group;
        let same = self.common(self.groups.at(group), at, hashes);
        self.cut(group, at + same)?;
        Some(Piece { first, blocks: same })
    }

    /// Splits a group before `at`, unless the group begins or ends there.
    fn cut(&mut self, group: u32, at: u32) -> Option<()> {
        let old = self.groups.at(group);
        if at <= old.from || at >= old.to {
            return Some(());
        }
        let (mut head, mut tail) = (old.clone(), old.clone());
        head.to = at;
        tail.from = at;
        head.rest = tail.blocks().first().copied()?;
        let (kept, moved) = if head.len() < tail.len() { (tail, head) } else { (head, tail) };
        let ids = Arc::clone(&moved.ids);
        let (from, to) = (moved.from as usize, moved.to as usize);
        let new = self.groups.add(moved, u32::MAX)?;
        for id in ids.get(from..to).unwrap_or_default() {
            self.blocks.at_mut(*id).group = new;
        }
        *self.groups.at_mut(group) = kept;
        Some(())
    }

    /// Adds a group of the first of `hashes`, which are distinct, up to one that is active.
    fn new_group(&mut self, hashes: &[u64]) -> Option<Piece> {
        let is_same = |at: usize, id: u32| Some(&self.blocks.at(id).hash) == hashes.get(at);
        let mut keys: Vec<(u64, u32)> = hashes.iter().map(|hash| (self.secret.mix(*hash), u32::MAX)).collect();
        keys.truncate(self.by_hash.absent(&keys, is_same));
        let group = self.groups.add(Group::default(), u32::MAX)?;
        let new = (0u32..).zip(hashes).take(keys.len()).map(|(at, hash)| Block { hash: *hash, group, at });
        let mut ids: Vec<u32> = Vec::with_capacity(keys.len());
        ids.extend(new.map_while(|block| self.blocks.add(block, u32::MAX)));
        keys.iter_mut().zip(&ids).for_each(|((_, to), id)| *to = *id);
        let (blocks, secret) = (&self.blocks, self.secret);
        let is_whole = ids.len() == keys.len()
            && self.by_hash.grow(keys.len(), &|id| secret.mix(blocks.at(id).hash))
            && self.by_hash.insert_alone(&keys, |_, _| false) == keys.len();
        if !is_whole {
            self.forget(&ids);
            self.groups.take(group);
            return None;
        }
        let (first, blocks) = (ids.first().copied()?, ids.len() as u32);
        *self.groups.at_mut(group) = Group { ids: ids.into(), to: blocks, ..Group::default() };
        Some(Piece { first, blocks })
    }

    fn forget(&mut self, ids: &[u32]) {
        let secret = self.secret;
        let keys: Vec<(u64, u32)> = ids.iter().map(|id| (secret.mix(self.blocks.take(*id).hash), *id)).collect();
        self.by_hash.remove_all(&keys);
        if self.by_hash.bytes() > KEPT_TABLE_BYTES {
            let blocks = &self.blocks;
            self.by_hash.shrink_to_fit(&|id: u32| secret.mix(blocks.at(id).hash));
        }
    }
}

fn put(leading: &mut [u32], slot: usize, blocks: u32) {
    if let Some(leading) = leading.get_mut(slot) {
        *leading = blocks;
    }
}

/// Returns the distinct hashes in order of their first positions; None if all hashes are distinct.
pub fn without_repeats(hashes: &[u64], secret: &Secret) -> Option<Vec<u64>> {
    // The table is at most half full and randomly filled, so that each hash is found in few steps.
    let mask = (hashes.len() * 2).next_power_of_two() - 1;
    let mut places = vec![u32::MAX; mask + 1];
    let mut first = |number: &u32, hash: &u64| {
        let mut at = secret.mix(*hash) as usize & mask;
        while let Some(place) = places.get_mut(at) {
            if *place == u32::MAX {
                *place = *number;
                return true;
            }
            if hashes.get(*place as usize) == Some(hash) {
                return false;
            }
            at = (at + 1) & mask;
        }
        true
    };
    let repeat = (0u32..).zip(hashes).find(|(number, hash)| !first(number, hash))?.0;
    let later = (repeat..).zip(hashes.iter().skip(repeat as usize)).filter(|(number, hash)| first(number, hash));
    Some(hashes.iter().take(repeat as usize).chain(later.map(|(_, hash)| hash)).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Stretch = (u32, u32, Vec<(u32, u32)>);

    /// Returns each active part of a prompt: its first block, its length, and its ranks.
    fn stretches(active: &ActiveBlocks, hashes: &[u64]) -> Vec<Stretch> {
        let (mut found, mut at) = (Vec::new(), 0);
        while at < hashes.len() {
            let Some(block) = active.find(hashes[at]).map(|id| active.blocks.at(id)) else {
                at += 1;
                continue;
            };
            let group = active.groups.at(block.group);
            let same = active.common(group, block.at, &hashes[at..]);
            found.push((at as u32, same, group.users.as_slice().to_vec()));
            at += same as usize;
        }
        found
    }

    #[test]
    fn groups_are_cut_where_bookings_part() {
        let mut active = ActiveBlocks::new();
        let (one, gained) = active.add(&[1, 2, 3, 4, 5], 0).unwrap();
        assert_eq!((one.len(), gained), (1, 5));
        let (two, gained) = active.add(&[1, 2, 9], 0).unwrap();
        assert_eq!((two.len(), gained), (2, 1));
        let (three, gained) = active.add(&[4, 5, 1], 7).unwrap();
        assert_eq!((three.len(), gained), (2, 3));
        assert_eq!(
            stretches(&active, &[8, 1, 2, 3, 4, 5]),
            [(1, 1, vec![(0, 2), (7, 1)]), (2, 1, vec![(0, 2)]), (3, 1, vec![(0, 1)]), (4, 2, vec![(0, 1), (7, 1)])]
        );
        assert_eq!(active.release(&one, 0), 3);
        assert_eq!(active.release(&three, 7), 3);
        assert_eq!(
            stretches(&active, &[1, 2, 3, 9]),
            [(0, 1, vec![(0, 1)]), (1, 1, vec![(0, 1)]), (3, 1, vec![(0, 1)])]
        );
        assert_eq!(active.release(&two, 0), 3);
        assert_eq!((active.len(), active.groups.len()), (0, 0));
        assert!((1..=KEPT_BYTES).contains(&active.bytes()));
    }

    #[test]
    fn leading_blocks_end_at_the_first_one_that_a_rank_lacks() {
        let mut active = ActiveBlocks::new();
        active.add(&[1, 2, 3, 4], 0).unwrap();
        active.add(&[1, 2], 70).unwrap();
        active.add(&[3, 4], 2).unwrap();
        let leading = active.leading(&[1, 2, 3, 4, 5], 71);
        assert_eq!((leading[0], leading[70], leading[2], leading[1]), (4, 2, 0, 0));
        let leading = active.leading(&[1, 9, 2, 3], 71);
        assert_eq!((leading[0], leading[70], leading[2]), (1, 1, 0));
        assert!(active.leading(&[1], 0).is_empty());
    }

    #[test]
    fn ids_that_are_used_again_are_no_one_elses() {
        let mut active = ActiveBlocks::new();
        let (long, _) = active.add(&[1, 2, 3, 4], 0).unwrap();
        let (short, _) = active.add(&[1, 2], 0).unwrap();
        active.release(&long, 0);
        let (other, _) = active.add(&[7, 8], 1).unwrap();
        let (single, _) = active.add(&[1], 2).unwrap();
        assert_eq!(active.release(&short, 0), 2);
        assert_eq!(stretches(&active, &[7, 8, 1, 2]), [(0, 2, vec![(1, 1)]), (2, 1, vec![(2, 1)])]);
        assert_eq!(active.release(&single, 2), 1);
        assert_eq!(active.release(&other, 1), 2);
        assert_eq!(active.len(), 0);
    }

    #[test]
    fn repeats_are_left_out() {
        let secret = Secret::random();
        assert!(without_repeats(&[], &secret).is_none());
        assert!(without_repeats(&[3, 1, 2], &secret).is_none());
        assert_eq!(without_repeats(&[3, 1, 3, 2, 1, 2, 4], &secret), Some(vec![3, 1, 2, 4]));
    }
}
