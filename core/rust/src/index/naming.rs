//! Assigns engine hashes to stored blocks: one that all ranks share, or a hash alias of the rank.

use crate::index::Index;
use crate::index::store::{Chain, Refused};
use crate::index::tree::blocks::{LANES, Slot, bit, slot};
use crate::index::tree::keys::{SharedKeys, private_hash};
use crate::index::tree::nodes::SHARED;
use crate::index::tree::ranks::BlockPosition;

/// Maximum number of equal engine hashes in the shared table. Further ones become hash aliases, which are found by
/// (rank, engine hash), so that engines whose hashes are counters cause no long chains.
const MAX_EQUAL: usize = 3;

/// Number of blocks that are checked together after a block that needed a check of its own. If such blocks alternate
/// with others, the checks of the others are repeated.
const FEW: usize = 4;

/// Where the engine hash of a block is stored.
enum Name {
    /// It is the shared one of the block, possibly since this call.
    Shared,
    /// It is in an alias of the rank at this position.
    Known(u32),
    /// The rank needs an alias for it.
    Private,
}

impl Index {
    /// Makes the blocks `from..to` of the chain, which start in a node at `depth`, resident on the chain's rank.
    pub(crate) fn cover(
        &mut self,
        chain: &Chain<'_>,
        node: u32,
        depth: u32,
        from: usize,
        to: usize,
    ) -> Result<(), Refused> {
        let covered = self.cover_all(chain, node, depth, from, to);
        if covered.is_err() {
            self.nodes.at_mut(node).dropped = u32::MAX;
            self.loose.push(node);
        }
        covered
    }

    fn cover_all(&mut self, chain: &Chain<'_>, node: u32, depth: u32, from: usize, to: usize) -> Result<(), Refused> {
        let rank_tier = chain.rank_tier;
        let depth_of = |at: usize| depth + (at - from) as u32;
        let mut at = from;
        let mut ahead = usize::MAX;
        while at < to {
            let first = at;
            at = self.name_shared(chain, node, depth_of(at), at, to, &mut ahead);
            let mut name = Name::Shared;
            if at < to {
                name = self.name(chain, BlockPosition { node, alias: SHARED, depth: depth_of(at) }, at);
                if let Name::Shared = name {
                    at += 1;
                }
            }
            if at > first {
                self.add_resident(rank_tier, node, SHARED, depth_of(first), depth_of(at), chain.counting);
            }
            let alias = match name {
                Name::Shared => SHARED,
                Name::Known(alias) => alias,
                Name::Private => {
                    let engine = chain.engines.get(at).copied().unwrap_or_default();
                    let alias = self.alias_for(rank_tier.rank(), node, depth_of(at)).ok_or(Refused::Exhausted)?;
                    if !self.put_private(alias, depth_of(at), engine) {
                        return Err(Refused::Exhausted);
                    }
                    alias
                }
            };
            if alias != SHARED {
                // The block becomes resident at once, because an alias is freed with its last resident block.
                self.add_resident(rank_tier, node, alias, depth_of(at), depth_of(at) + 1, chain.counting);
                at += 1;
            }
            let last = BlockPosition { node, alias, depth: depth_of(at) - 1 };
            if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
                rank.tail = Some(last);
            }
        }
        Ok(())
    }

    /// Proceeds while engine hashes are, or can directly become, the shared ones. Returns where it stopped. It checks
    /// `ahead` blocks together: few after a stop, and more again while there is none.
    fn name_shared(
        &mut self,
        chain: &Chain<'_>,
        node: u32,
        depth: u32,
        from: usize,
        to: usize,
        ahead: &mut usize,
    ) -> usize {
        let Some(rank) = self.ranks.get(chain.rank_tier.rank()) else { return from };
        if !rank.orphans.is_empty() {
            return from;
        }
        let private = rank.private > 0;
        let mut at = from;
        while at < to {
            let end = at.saturating_add(*ahead).min(to);
            let most = if private { at + self.without_aliases(chain, at, end) } else { end };
            while at < most {
                let depth = depth + (at - from) as u32;
                let known = self.named_alike(chain, node, depth, at, most);
                let new = self.name_new(chain, node, depth + known as u32, at + known, most);
                at += known + new;
                if known + new == 0 {
                    break;
                }
            }
            if at < end {
                *ahead = FEW;
                break;
            }
            *ahead = ahead.saturating_mul(4);
        }
        at
    }

    /// Returns a number of blocks of a chain, from `from` on, that certainly have no alias on its rank.
    fn without_aliases(&mut self, chain: &Chain<'_>, from: usize, to: usize) -> usize {
        let rank = chain.rank_tier.rank();
        let mut hashes = std::mem::take(&mut self.scratch.references);
        let engines = chain.engines.get(from..to).unwrap_or_default();
        hashes.extend(engines.iter().map(|engine| (private_hash(self.secret, rank, *engine), 0)));
        let (blocks, aliases) = (&self.alias_blocks, &self.aliases);
        let absent = self.private.absent(&hashes, |number, at| {
            engines.get(number) == Some(&blocks.engine(at)) && aliases.at(blocks.header(at).owner).rank == rank
        });
        hashes.clear();
        self.scratch.references = hashes;
        absent
    }

    /// Returns how many blocks, from a depth on, have the chain's engine hashes as shared ones listed only once.
    fn named_alike(&self, chain: &Chain<'_>, node: u32, depth: u32, from: usize, to: usize) -> usize {
        let node = self.nodes.at(node);
        let mut offset = depth - node.start;
        let mut at = from;
        while at < to
            && let Some(&chunk) = node.chunks.get((offset / LANES) as usize)
        {
            let lane = offset % LANES;
            if let Some(&ahead) = node.chunks.get((offset / LANES) as usize + 16) {
                self.blocks.prefetch_engines(ahead);
            }
            let header = self.blocks.header(slot(chunk, lane));
            let named = ((header.listed & !header.doubled) >> lane).trailing_ones();
            let shared = self.blocks.chunk(chunk).engines.iter().skip(lane as usize).take(named as usize);
            let given = chain.engines.get(at..to).unwrap_or_default();
            let alike = shared.zip(given).take_while(|(shared, given)| shared == given).count();
            at += alike;
            offset += alike as u32;
            if alike < (LANES - lane) as usize {
                break;
            }
        }
        at - from
    }

    /// Sets the shared engine hashes of blocks without one to those of the chain, unless another block uses the hash.
    /// Returns the number of blocks.
    fn name_new(&mut self, chain: &Chain<'_>, node_id: u32, depth: u32, from: usize, to: usize) -> usize {
        let node = self.nodes.at(node_id);
        let start = depth - node.start;
        let mut references = std::mem::take(&mut self.scratch.references);
        let mut hashes = chain.hashes.get(from..to).unwrap_or_default();
        let mut engines = chain.engines.get(from..to).unwrap_or_default();
        for number in start / LANES.. {
            let Some(&chunk) = node.chunks.get(number as usize).filter(|_| !hashes.is_empty()) else { break };
            let lane = if number == start / LANES { start % LANES } else { 0 };
            let Some((header, content)) = self.blocks.both_mut(chunk) else { break };
            let free = (header.listed >> lane).trailing_zeros().min(LANES - lane);
            let (now, later) = hashes.split_at(hashes.len().min(free as usize));
            references.extend(now.iter().zip(lane..).map(|(hash, lane)| (*hash, slot(chunk, lane))));
            hashes = later;
            let (now, later) = engines.split_at(now.len());
            for (to, engine) in content.engines.iter_mut().skip(lane as usize).zip(now) {
                *to = *engine;
            }
            engines = later;
            if free < LANES - lane {
                break;
            }
        }
        let keys = SharedKeys { secret: self.secret, blocks: &self.blocks };
        let mut named = 0;
        if self.shared.grow(references.len(), &keys) {
            let engines = chain.engines.get(from..).unwrap_or_default();
            let is_same = |number: usize, at| engines.get(number) == Some(&self.blocks.engine(at));
            named = self.shared.insert_alone(&references, is_same);
        }
        references.clear();
        self.scratch.references = references;
        let node = self.nodes.at(node_id);
        let mut left = named as u32;
        for number in start / LANES.. {
            let Some(&chunk) = node.chunks.get(number as usize).filter(|_| left > 0) else { break };
            let lane = if number == start / LANES { start % LANES } else { 0 };
            let count = left.min(LANES - lane);
            if let Some(header) = self.blocks.header_mut(slot(chunk, 0)) {
                header.listed |= (((1u32 << count) - 1) << lane) as u8;
            }
            left -= count;
        }
        named
    }

    /// Finds the name of a block on a rank. Releases the engine hash at another position of the rank.
    fn name(&mut self, chain: &Chain<'_>, position: BlockPosition, at: usize) -> Name {
        let (Some(&engine), Some(&hash)) = (chain.engines.get(at), chain.hashes.get(at)) else { return Name::Private };
        let rank = chain.rank_tier.rank();
        self.adopt_orphan(rank, engine, position);
        if let Some(resident) = self.locate(rank, engine, hash) {
            if (resident.node, resident.depth) == (position.node, position.depth) {
                return if resident.alias == SHARED { Name::Shared } else { Name::Known(resident.alias) };
            }
            self.release_everywhere(rank, resident);
        }
        let slot = self.nodes.at(position.node).slot(position.depth);
        if self.blocks.header(slot).listed & bit(slot) != 0 {
            return if self.blocks.engine(slot) == engine { Name::Shared } else { Name::Private };
        }
        let mut equals: [Slot; MAX_EQUAL] = [0; MAX_EQUAL];
        let mut found = 0;
        let blocks = &self.blocks;
        self.shared.find(hash, |other| {
            if blocks.engine(other) == engine {
                if let Some(place) = equals.get_mut(found) {
                    *place = other;
                }
                found += 1;
            }
            found >= MAX_EQUAL
        });
        let keys = SharedKeys { secret: self.secret, blocks };
        if found >= MAX_EQUAL || !self.shared.insert(hash, slot, keys) {
            return Name::Private;
        }
        self.blocks.set_engine(slot, engine);
        if let Some(header) = self.blocks.header_mut(slot) {
            header.listed |= bit(slot);
            header.doubled = if found > 0 { header.doubled | bit(slot) } else { header.doubled & !bit(slot) };
        }
        for other in equals.into_iter().take(found) {
            if let Some(header) = self.blocks.header_mut(other) {
                header.doubled |= bit(other);
            }
        }
        Name::Shared
    }
}
