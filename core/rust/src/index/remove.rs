//! Removing blocks, in any order.

use crate::index::Index;
use crate::index::store::CHUNKS_AHEAD;
use crate::index::tree::blocks::LANES;
use crate::index::tree::ranks::{Counting, Spot};
use crate::index::tree::runs::{SHARED, Seat};

impl Index {
    /// Removes a copy of each block from a seat (as a set: all copies). Returns how many were held.
    pub(crate) fn remove(&mut self, seat: Seat, counting: Counting, engines: &[u64]) -> u64 {
        let mut held = 0;
        let mut at = 0;
        while let Some(&engine) = engines.get(at) {
            let Some(spot) = self.spot_of_removed(seat, engine) else {
                held += u64::from(self.remove_floating(seat, counting, engine));
                at += 1;
                continue;
            };
            let run = self.runs.at(spot.run);
            let holding = run.find(seat, spot.label).ok().and_then(|at| run.holdings.get(at)).copied();
            let Some(holding) = holding.filter(|holding| self.has(run, holding, spot.depth)) else {
                at += 1; // held in another tier
                continue;
            };
            let counted = counting == Counting::Counted && self.drop_copy(seat, spot);
            let (mut from, mut to) = (spot.depth, spot.depth + 1);
            if !counted {
                let plain = holding.bits == 0 && self.ranks.get(seat.rank()).is_some_and(|rank| rank.extras.is_empty());
                if plain {
                    let rest = engines.get(at + 1..).unwrap_or_default();
                    // Engines remove from the leaf up, or from the root down: the neighbours follow.
                    from -= self.followed(spot, holding.lo, rest);
                    if from == spot.depth {
                        to += self.preceded(spot, holding.hi, rest);
                    }
                }
                self.release(seat, spot.run, spot.label, from, to);
                if self.loose.last() != Some(&spot.run) {
                    self.loose.push(spot.run);
                }
                if let Some(rank) = self.ranks.get_mut(seat.rank()) {
                    rank.removed = Some(Spot { depth: if to > spot.depth + 1 { to - 1 } else { from }, ..spot });
                }
            }
            held += u64::from(to - from);
            at += (to - from) as usize;
        }
        self.compact();
        held
    }

    /// How many of the engine hashes are those of the blocks before a spot, from the nearest on, down to `lo`.
    fn followed(&self, spot: Spot, lo: u32, engines: &[u64]) -> u32 {
        let run = self.runs.at(spot.run);
        if spot.label != SHARED {
            let same = |depth: u32, engine: &u64| self.engine_at(Spot { depth, ..spot }) == Some(*engine);
            return (lo..spot.depth).rev().zip(engines).take_while(|(depth, engine)| same(*depth, engine)).count()
                as u32;
        }
        let mut asked = engines.get(..(spot.depth - lo) as usize).unwrap_or(engines);
        let most = asked.len();
        let mut last = spot.depth - run.start;
        while last > 0 && !asked.is_empty() {
            last -= 1;
            let Some(&chunk) = run.chunks.get((last / LANES) as usize) else { break };
            if let Some(&ahead) = run.chunks.get(((last / LANES) as usize).wrapping_sub(CHUNKS_AHEAD)) {
                self.blocks.prefetch_engines(ahead);
            }
            let held = &self.blocks.chunk(chunk).engines;
            if let Some((eight, rest)) = asked.split_first_chunk::<8>()
                && last % LANES == LANES - 1
                && held.iter().rev().zip(eight).fold(0, |differences, (held, asked)| differences | (held ^ asked)) == 0
            {
                asked = rest;
                last -= LANES - 1;
                continue;
            }
            let held = held.get(..=(last % LANES) as usize).unwrap_or_default();
            let equal = held.iter().rev().zip(asked).take_while(|(held, asked)| held == asked).count();
            asked = asked.get(equal..).unwrap_or_default();
            if equal < held.len() {
                break;
            }
            last -= last % LANES;
        }
        (most - asked.len()) as u32
    }

    /// How many of the engine hashes are those of the blocks after a spot, up to `hi`.
    fn preceded(&self, spot: Spot, hi: u32, engines: &[u64]) -> u32 {
        let depths = spot.depth + 1..hi;
        let same = |(depth, engine): &(u32, &u64)| self.engine_at(Spot { depth: *depth, ..spot }) == Some(**engine);
        depths.zip(engines).take_while(same).count() as u32
    }

    /// Where a seat's rank holds an engine hash; beside the block removed last, if it is there.
    fn spot_of_removed(&self, seat: Seat, engine: u64) -> Option<Spot> {
        if let Some(last) = self.ranks.get(seat.rank())?.removed {
            for depth in [last.depth.wrapping_sub(1), last.depth.wrapping_add(1)] {
                let beside = Spot { depth, ..last };
                if self.engine_at(beside) == Some(engine) && self.holds(seat.rank(), beside) {
                    return Some(beside);
                }
            }
        }
        self.locate(seat.rank(), engine, self.secret.mix(engine))
    }

    /// Drops a copy beyond the first; whether there was one.
    fn drop_copy(&mut self, seat: Seat, spot: Spot) -> bool {
        if self.ranks.get(seat.rank()).is_none_or(|rank| rank.extras.is_empty()) {
            return false;
        }
        let key = self.extra(seat.tier(), spot);
        let Some(rank) = self.ranks.get_mut(seat.rank()) else { return false };
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
