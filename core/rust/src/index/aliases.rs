//! Hash aliases: engine hashes that only one rank uses for blocks of a node.

use crate::index::tree::blocks::{LANES, bit};
use crate::index::tree::keys::{PrivateKeys, private_hash};
use crate::index::tree::nodes::{HashAlias, MAX_BLOCKS, SHARED};
use crate::index::tree::ranks::BlockPosition;
use crate::index::{Index, MAX_RECORDS};

impl Index {
    /// Returns an alias of the rank with room for an engine hash at a depth. Adds one if there is none.
    pub(crate) fn alias_for(&mut self, rank: u32, node_id: u32, depth: u32) -> Option<u32> {
        let node = self.nodes.at(node_id);
        for range in node.of_rank(rank).iter().filter(|range| range.alias != SHARED) {
            let alias = self.aliases.at(range.alias);
            let slot = alias.slot(depth);
            let inside = alias.start <= depth && depth < alias.end();
            if (inside && self.alias_blocks.header(slot).listed & bit(slot) == 0)
                || (depth == alias.end() && alias.len < MAX_BLOCKS)
            {
                return Some(range.alias);
            }
        }
        self.aliases.add(HashAlias { rank, node: node_id, start: depth, ..HashAlias::default() }, MAX_RECORDS)
    }

    /// Sets the engine hash of a block in an alias, inside it or at its end.
    pub(crate) fn put_private(&mut self, alias_id: u32, depth: u32, engine: u64) -> bool {
        let alias = self.aliases.at_mut(alias_id);
        let before = alias.heap();
        if depth == alias.end() {
            if alias.len >= MAX_BLOCKS {
                return false;
            }
            if alias.len.is_multiple_of(LANES) {
                let Some(chunk) = self.alias_blocks.allocate(alias_id, alias.chunks.len() as u16) else {
                    if alias.len == 0 {
                        self.aliases.take(alias_id);
                    }
                    return false;
                };
                alias.chunks.push(chunk);
            }
            alias.len += 1;
        }
        self.heap = self.heap + alias.heap() - before;
        let (rank, slot) = (alias.rank, alias.slot(depth));
        self.alias_blocks.set_engine(slot, engine);
        let hash = private_hash(self.secret, rank, engine);
        let keys = PrivateKeys { secret: self.secret, blocks: &self.alias_blocks, aliases: &self.aliases };
        if !self.private.insert(hash, slot, keys) {
            let node = self.aliases.at(alias_id).node;
            self.unlist_private(rank, node, alias_id, depth, depth);
            return false;
        }
        if let Some(header) = self.alias_blocks.header_mut(slot) {
            header.listed |= bit(slot);
        }
        if let Some(rank) = self.ranks.get_mut(rank) {
            rank.private += 1;
        }
        true
    }

    /// Removes from the table the engine hashes of an alias whose blocks are no longer resident in any tier, and
    /// shortens the alias.
    pub(crate) fn unlist_private(&mut self, rank: u32, node_id: u32, alias_id: u32, from: u32, to: u32) {
        for depth in from..to {
            if self.holds(rank, BlockPosition { node: node_id, alias: alias_id, depth }) {
                continue;
            }
            let at = self.aliases.at(alias_id).slot(depth);
            let listed = self.alias_blocks.header(at).listed & bit(at) != 0;
            if !listed {
                continue;
            }
            let hash = private_hash(self.secret, rank, self.alias_blocks.engine(at));
            let keys = PrivateKeys { secret: self.secret, blocks: &self.alias_blocks, aliases: &self.aliases };
            self.private.remove(hash, at, keys);
            if let Some(header) = self.alias_blocks.header_mut(at) {
                header.listed &= !bit(at);
            }
            if let Some(rank) = self.ranks.get_mut(rank) {
                rank.private -= 1;
            }
        }
        let ranges = self.nodes.at(node_id).of_rank(rank);
        let end = ranges.iter().filter(|range| range.alias == alias_id).map(|range| range.hi).max();
        let alias = self.aliases.at_mut(alias_id);
        let before = alias.heap();
        alias.len = end.unwrap_or(alias.start) - alias.start;
        while alias.chunks.len() as u32 > alias.len.div_ceil(8) {
            if let Some(chunk) = alias.chunks.pop() {
                self.alias_blocks.pages_mut().free(chunk);
            }
        }
        if alias.len == 0 {
            self.aliases.take(alias_id);
            self.heap -= before;
        }
    }
}
