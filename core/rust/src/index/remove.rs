//! Removes blocks, in any order.

use crate::index::Index;
use crate::index::store::CHUNKS_AHEAD;
use crate::index::tree::blocks::LANES;
use crate::index::tree::nodes::{RankTier, SHARED};
use crate::index::tree::ranks::{BlockPosition, Counting};

impl Index {
    /// Removes a copy of each block in a tier (with `Set` counting: all copies). Returns how many were resident.
    pub(crate) fn remove(&mut self, rank_tier: RankTier, counting: Counting, engines: &[u64]) -> u64 {
        let mut removed = 0;
        let mut at = 0;
        while let Some(&engine) = engines.get(at) {
            let Some(position) = self.position_of_removed(rank_tier, engine) else {
                removed += u64::from(self.remove_orphan(rank_tier, counting, engine));
                at += 1;
                continue;
            };
            let node = self.nodes.at(position.node);
            let range = node.find(rank_tier, position.alias).ok().and_then(|at| node.residency_ranges.get(at)).copied();
            let Some(range) = range.filter(|range| self.has(node, range, position.depth)) else {
                at += 1; // resident in another tier
                continue;
            };
            let counted = counting == Counting::Counted && self.drop_copy(rank_tier, position);
            let (mut from, mut to) = (position.depth, position.depth + 1);
            if !counted {
                let plain =
                    range.bits == 0 && self.ranks.get(rank_tier.rank()).is_some_and(|rank| rank.extras.is_empty());
                if plain {
                    let rest = engines.get(at + 1..).unwrap_or_default();
                    // Engines remove from the leaf up or from the root down, so neighbours usually follow.
                    from -= self.followed(position, range.lo, rest);
                    if from == position.depth {
                        to += self.preceded(position, range.hi, rest);
                    }
                }
                self.release(rank_tier, position.node, position.alias, from, to);
                if self.loose.last() != Some(&position.node) {
                    self.loose.push(position.node);
                }
                if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
                    rank.removed =
                        Some(BlockPosition { depth: if to > position.depth + 1 { to - 1 } else { from }, ..position });
                }
            }
            removed += u64::from(to - from);
            at += (to - from) as usize;
        }
        self.compact();
        removed
    }

    /// Returns how many of the engine hashes are those of the blocks before a position, nearest first, down to `lo`.
    fn followed(&self, position: BlockPosition, lo: u32, engines: &[u64]) -> u32 {
        let node = self.nodes.at(position.node);
        if position.alias != SHARED {
            let same = |depth: u32, engine: &u64| self.engine_at(BlockPosition { depth, ..position }) == Some(*engine);
            return (lo..position.depth).rev().zip(engines).take_while(|(depth, engine)| same(*depth, engine)).count()
                as u32;
        }
        let mut given = engines.get(..(position.depth - lo) as usize).unwrap_or(engines);
        let most = given.len();
        let mut last = position.depth - node.start;
        while last > 0 && !given.is_empty() {
            last -= 1;
            let Some(&chunk) = node.chunks.get((last / LANES) as usize) else { break };
            if let Some(&ahead) = node.chunks.get(((last / LANES) as usize).wrapping_sub(CHUNKS_AHEAD)) {
                self.blocks.prefetch_engines(ahead);
            }
            let stored = &self.blocks.chunk(chunk).engines;
            if let Some((eight, rest)) = given.split_first_chunk::<8>()
                && last % LANES == LANES - 1
                && stored.iter().rev().zip(eight).fold(0, |differences, (stored, given)| differences | (stored ^ given))
                    == 0
            {
                given = rest;
                last -= LANES - 1;
                continue;
            }
            let stored = stored.get(..=(last % LANES) as usize).unwrap_or_default();
            let equal = stored.iter().rev().zip(given).take_while(|(stored, given)| stored == given).count();
            given = given.get(equal..).unwrap_or_default();
            if equal < stored.len() {
                break;
            }
            last -= last % LANES;
        }
        (most - given.len()) as u32
    }

    /// Returns how many of the engine hashes are those of the blocks after a position, up to `hi`.
    fn preceded(&self, position: BlockPosition, hi: u32, engines: &[u64]) -> u32 {
        let depths = position.depth + 1..hi;
        let same = |(depth, engine): &(u32, &u64)| {
            self.engine_at(BlockPosition { depth: *depth, ..position }) == Some(**engine)
        };
        depths.zip(engines).take_while(same).count() as u32
    }

    /// Returns the position of an engine hash on a rank. Tries the neighbours of the last removed block first.
    fn position_of_removed(&self, rank_tier: RankTier, engine: u64) -> Option<BlockPosition> {
        if let Some(last) = self.ranks.get(rank_tier.rank())?.removed {
            for depth in [last.depth.wrapping_sub(1), last.depth.wrapping_add(1)] {
                let beside = BlockPosition { depth, ..last };
                if self.engine_at(beside) == Some(engine) && self.holds(rank_tier.rank(), beside) {
                    return Some(beside);
                }
            }
        }
        self.locate(rank_tier.rank(), engine, self.secret.mix(engine))
    }

    /// Drops an extra copy of a block. Returns whether there was one.
    fn drop_copy(&mut self, rank_tier: RankTier, position: BlockPosition) -> bool {
        if self.ranks.get(rank_tier.rank()).is_none_or(|rank| rank.extras.is_empty()) {
            return false;
        }
        let key = self.extra(rank_tier.tier(), position);
        let Some(rank) = self.ranks.get_mut(rank_tier.rank()) else { return false };
        let Some(extra) = rank.extras.get_mut(&key) else { return false };
        *extra -= 1;
        if *extra == 0 {
            rank.extras.remove(&key);
            if rank.extras.capacity() > 64 && rank.extras.len() < rank.extras.capacity() / 8 {
                rank.extras.shrink_to(rank.extras.len() * 2);
            }
        }
        true
    }
}
