//! Which ranks use which blocks, and for how many bookings.
//!
//! Blocks that are used together form a group: consecutive blocks of a prompt, with the ranks that use all of them. A
//! booking that uses only a part of a group splits it. A prompt is thus looked up, and its ranks counted, once per group
//! instead of once per block. A booking remembers the groups that it began with; a group that is split links to its
//! rest. Groups are identified by their first block, so that the smaller part of a split can become the new group: a
//! block moves at most as often as its group can be halved.

use std::sync::Arc;

use crate::hash::Secret;
use crate::load::block_users::{Users, each_slot};
use crate::storage::table::Table;
use crate::storage::tagmap::TagMap;

/// Blocks ahead whose table entries are prefetched.
const AHEAD: usize = 8;

#[derive(Default)]
struct Block {
    hash: u64,
    group: u32,
    /// Where the block is among the `ids` of its group.
    at: u32,
}

#[derive(Clone, Default)]
struct Group {
    /// The blocks that came together, in which those of the group are from `from` to before `to`.
    ids: Arc<[u32]>,
    from: u32,
    to: u32,
    users: Users,
    /// First block of what was cut off behind, the last time. Stale where no booking goes on there.
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

/// A part of a booking: the first block of a group, and how many it had.
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

/// Blocks in use.
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

    /// Distinct blocks in use.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes of the tables.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.blocks.bytes() + self.groups.bytes() + self.by_hash.bytes()
    }

    /// Adds a booking's blocks, each once, for a rank. Returns its pieces, and how many blocks the rank did not use
    /// before; None, with nothing changed, if there is no memory.
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

    /// Takes back what `add` returned. Returns how many blocks the rank uses no more.
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
        if self.blocks.len() == 0 {
            self.blocks.shrink();
            self.groups.shrink();
            self.by_hash.shrink();
        }
        lost
    }

    /// What each of so many ranks uses of a prompt, by slot: its blocks in use there, and how many of those lead.
    pub fn usage(&self, hashes: &[u64], slots: usize) -> Vec<(u32, u32)> {
        let mut used = vec![(0, 0); slots];
        // Ranks that use all blocks so far. In a chain of hashes, a rank that uses a block uses all blocks before it,
        // so each rank leaves once and none returns.
        let mut along = vec![u64::MAX; slots.div_ceil(64)];
        let mut scratch = Vec::new();
        let mut reached = 0;
        self.visit(hashes, |at, blocks, users| {
            let users = users.bits(&mut scratch);
            for (place, along) in along.iter_mut().enumerate() {
                let here = users.get(place).copied().unwrap_or(0);
                let stay = if at == reached { *along & here } else { 0 };
                each_slot(place, *along & !stay, |slot| put(&mut used, slot, (reached, reached)));
                each_slot(place, here & !stay, |slot| {
                    let (present, leading) = used.get(slot).copied().unwrap_or_default();
                    put(&mut used, slot, (present + blocks, leading));
                });
                *along = stay;
            }
            reached = at + blocks;
        });
        for (place, along) in along.iter().enumerate() {
            each_slot(place, *along, |slot| put(&mut used, slot, (reached, reached)));
        }
        used
    }

    /// Calls `f` with every stretch of a prompt that is in use: its first block, its length, and its ranks.
    fn visit(&self, hashes: &[u64], mut f: impl FnMut(u32, u32, &Users)) {
        let mut at = 0;
        while let Some(hash) = hashes.get(at) {
            self.prefetch(hashes, at);
            let Some(block) = self.find(*hash).map(|id| self.blocks.at(id)) else {
                at += 1;
                continue;
            };
            let group = self.groups.at(block.group);
            let same = self.common(group, block.at, hashes.get(at..).unwrap_or_default()).max(1);
            f(at as u32, same, &group.users);
            at += same as usize;
        }
    }

    #[inline]
    fn find(&self, hash: u64) -> Option<u32> {
        self.by_hash.find(self.secret.mix(hash), |id| self.blocks.at(id).hash == hash)
    }

    #[inline]
    fn prefetch(&self, hashes: &[u64], at: usize) {
        if let Some(later) = hashes.get(at + AHEAD) {
            self.by_hash.prefetch(self.secret.mix(*later));
        }
    }

    /// How many blocks of a group, from that at `at` on, are the first of `hashes`.
    fn common(&self, group: &Group, at: u32, hashes: &[u64]) -> u32 {
        let ids = group.ids.get(at as usize..group.to as usize).unwrap_or_default();
        ids.iter().zip(hashes).take_while(|(id, hash)| self.blocks.at(**id).hash == **hash).count() as u32
    }

    /// Makes the first of `hashes`, from the block `first` on, a group of their own.
    fn cut_out(&mut self, first: u32, hashes: &[u64]) -> Option<Piece> {
        let &Block { group, at, .. } = self.blocks.at(first);
        self.cut(group, at)?;
        let group = self.blocks.at(first).group;
        let same = self.common(self.groups.at(group), at, hashes);
        self.cut(group, at + same)?;
        Some(Piece { first, blocks: same })
    }

    /// Cuts a group in two before what is at `at`, unless an end is there.
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

    /// A group of the first of `hashes`, up to one that is in use.
    fn new_group(&mut self, hashes: &[u64]) -> Option<Piece> {
        let group = self.groups.add(Group::default(), u32::MAX)?;
        let mut ids = Vec::with_capacity(hashes.len());
        for (at, hash) in (0u32..).zip(hashes) {
            self.prefetch(hashes, at as usize);
            if at > 0 && self.find(*hash).is_some() {
                break;
            }
            if let Some(id) = self.new_block(*hash, group, at) {
                ids.push(id);
            } else {
                self.forget(&ids);
                self.groups.take(group);
                return None;
            }
        }
        let (first, blocks) = (ids.first().copied()?, ids.len() as u32);
        *self.groups.at_mut(group) = Group { ids: ids.into(), to: blocks, ..Group::default() };
        Some(Piece { first, blocks })
    }

    fn new_block(&mut self, hash: u64, group: u32, at: u32) -> Option<u32> {
        let id = self.blocks.add(Block { hash, group, at }, u32::MAX)?;
        let (blocks, secret) = (&self.blocks, self.secret);
        if self.by_hash.insert(secret.mix(hash), id, |id| secret.mix(blocks.at(id).hash)) {
            return Some(id);
        }
        self.blocks.take(id);
        None
    }

    fn forget(&mut self, ids: &[u32]) {
        for &id in ids {
            let (blocks, secret) = (&self.blocks, self.secret);
            self.by_hash.remove(secret.mix(blocks.at(id).hash), id, |id| secret.mix(blocks.at(id).hash));
            self.blocks.take(id);
        }
    }
}

fn put(used: &mut [(u32, u32)], slot: usize, what: (u32, u32)) {
    if let Some(used) = used.get_mut(slot) {
        *used = what;
    }
}

/// The hashes that are not also earlier ones, with where they were; None if they all are.
pub fn without_repeats(hashes: &[u64], secret: &Secret) -> Option<(Vec<u64>, Vec<u32>)> {
    // Half empty and randomly filled, so that few steps lead to each hash.
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
    let kept = (0..repeat).zip(hashes.iter().copied());
    let later =
        (repeat..).zip(hashes.iter().copied().skip(repeat as usize)).filter(|(number, hash)| first(number, hash));
    let (origins, distinct) = kept.chain(later).unzip();
    Some((distinct, origins))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Stretch = (u32, u32, Vec<(u32, u32)>);

    fn stretches(active: &ActiveBlocks, hashes: &[u64]) -> Vec<Stretch> {
        let mut found = Vec::new();
        active.visit(hashes, |at, blocks, users| found.push((at, blocks, users.as_slice().to_vec())));
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
        assert_eq!((active.len(), active.groups.len(), active.by_hash.bytes()), (0, 0, 0));
    }

    #[test]
    fn usage_counts_the_blocks_that_each_rank_uses() {
        let mut active = ActiveBlocks::new();
        active.add(&[1, 2, 3, 4], 0).unwrap();
        active.add(&[1, 2], 70).unwrap();
        active.add(&[3, 4], 2).unwrap();
        let usage = active.usage(&[1, 2, 3, 4, 5], 71);
        assert_eq!((usage[0], usage[70], usage[2], usage[1]), ((4, 4), (2, 2), (2, 0), (0, 0)));
        let usage = active.usage(&[1, 9, 2, 3], 71);
        assert_eq!((usage[0], usage[70], usage[2], usage[1]), ((3, 1), (2, 1), (1, 0), (0, 0)));
        assert!(active.usage(&[1], 0).is_empty());
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
        assert_eq!(without_repeats(&[3, 1, 3, 2, 1, 2, 4], &secret), Some((vec![3, 1, 2, 4], vec![0, 1, 3, 6])));
    }
}
