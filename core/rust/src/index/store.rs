//! Stores chains of blocks in the tree.

use crate::index::tree::blocks::LANES;
use crate::index::tree::keys::{BranchKeys, branch_hash};
use crate::index::tree::nodes::{MAX_BLOCKS, Node, ROOT, RankTier};
use crate::index::tree::ranks::{BlockPosition, Counting};
use crate::index::{Index, MAX_RECORDS};

/// Distance of prefetching, in chunks: the number of cache misses that can be outstanding at a time.
pub(crate) const CHUNKS_AHEAD: usize = 24;

/// Why a chain was not stored.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The parent is not resident on the rank.
    UnknownParent,
    /// The event violates the contract.
    Malformed(&'static str),
    /// There is not enough memory, or no free id.
    Exhausted,
}

/// A chain that is being stored.
pub(crate) struct Chain<'a> {
    pub(crate) rank_tier: RankTier,
    pub(crate) counting: Counting,
    pub(crate) engines: &'a [u64],
    pub(crate) locals: &'a [u64],
    pub(crate) hashes: &'a [u64],
}

impl Index {
    /// Validates a chain. Keeps the hashes of its engine hashes for `store`.
    pub(crate) fn check_chain(&mut self, parent: Option<u64>, engines: &[u64], locals: &[u64]) -> Result<(), Refused> {
        if engines.is_empty() {
            return Err(Refused::Malformed("it has no blocks"));
        }
        if engines.len() != locals.len() {
            return Err(Refused::Malformed("it has different numbers of engine hashes and local hashes"));
        }
        let secret = self.secret;
        self.scratch.hashes.clear();
        self.scratch.hashes.extend(engines.iter().map(|engine| secret.mix(*engine)));
        if self.scratch.repeats(engines) {
            return Err(Refused::Malformed("it has an engine hash twice"));
        }
        if parent.is_some_and(|parent| engines.contains(&parent)) {
            return Err(Refused::Malformed("a block is its own parent"));
        }
        Ok(())
    }

    /// Stores a chain of blocks for a rank, below `parent` or from the start of a sequence. Call `check_chain` first.
    pub(crate) fn store(
        &mut self,
        rank_tier: RankTier,
        counting: Counting,
        parent: Option<u64>,
        engines: &[u64],
        locals: &[u64],
    ) -> Result<(), Refused> {
        let (node, depth) = match parent {
            None => (ROOT, 0),
            Some(parent) => match self.parent_place(rank_tier.rank(), parent) {
                Some(BlockPosition { node, depth, .. }) => (node, depth + 1),
                None => return self.store_below_orphan(rank_tier, counting, parent, engines, locals),
            },
        };
        let count = u32::try_from(engines.len()).map_err(|_| Refused::Exhausted)?;
        if depth.checked_add(count).is_none() {
            return Err(Refused::Malformed("its chain is deeper than 2^32 blocks"));
        }
        let hashes = std::mem::take(&mut self.scratch.hashes);
        let chain = Chain { rank_tier, counting, engines, locals, hashes: &hashes };
        let stored = self.walk_and_store(&chain, node, depth);
        self.scratch.hashes = hashes;
        self.compact();
        stored
    }

    fn parent_place(&self, rank: u32, parent: u64) -> Option<BlockPosition> {
        if let Some(tail) = self.ranks.get(rank)?.tail
            && self.engine_at(tail) == Some(parent)
            && self.holds(rank, tail)
        {
            return Some(tail);
        }
        self.locate(rank, parent, self.secret.mix(parent))
    }

    fn walk_and_store(&mut self, chain: &Chain<'_>, node: u32, depth: u32) -> Result<(), Refused> {
        let (mut node_id, mut depth, mut at) = (node, depth, 0);
        let count = chain.locals.len();
        while at < count {
            let rest = chain.locals.get(at..).unwrap_or_default();
            let Some(&next) = rest.first() else { break };
            let node = self.nodes.at(node_id);
            let same = if node_id == ROOT { 0 } else { self.common(node, depth, rest) };
            if same > 0 {
                self.cover(chain, node_id, depth, at, at + same)?;
                (at, depth) = (at + same, depth + same as u32);
                continue;
            }
            let node = self.nodes.at(node_id);
            if (node.children > 0 || node_id == ROOT)
                && let Some(branch) = self.branch(node_id, depth, next)
            {
                node_id = branch;
                continue;
            }
            let extends = node_id != ROOT && depth == node.end() && node.len < MAX_BLOCKS;
            if !extends {
                node_id = self.nodes.add(Node::branch(node_id, depth), MAX_RECORDS).ok_or(Refused::Exhausted)?;
            }
            let room = (MAX_BLOCKS - self.nodes.at(node_id).len) as usize;
            let added = rest.len().min(room);
            let made = self.extend(node_id, rest.get(..added).unwrap_or_default());
            if !extends {
                self.link(node_id)?;
            }
            if made.is_err() {
                self.nodes.at_mut(node_id).dropped = u32::MAX;
                self.loose.push(node_id);
            }
            made?;
            self.cover(chain, node_id, depth, at, at + added)?;
            (at, depth) = (at + added, depth + added as u32);
        }
        Ok(())
    }

    /// Returns how many local hashes are equal to those of the node from a depth on.
    pub(crate) fn common(&self, node: &Node, depth: u32, locals: &[u64]) -> usize {
        let offset = depth.wrapping_sub(node.start);
        let most = locals.len().min(node.len.saturating_sub(offset) as usize);
        let (first, end) = ((offset / LANES) as usize, (offset as usize + most).div_ceil(LANES as usize));
        let chunks = node.chunks.get(first..end).unwrap_or_default();
        for &chunk in chunks.iter().take(CHUNKS_AHEAD) {
            self.blocks.prefetch_locals(chunk);
        }
        let mut lane = (offset % LANES) as usize;
        let mut given = locals.get(..most).unwrap_or_default();
        for (at, &chunk) in chunks.iter().enumerate() {
            if let Some(&ahead) = chunks.get(at + CHUNKS_AHEAD) {
                self.blocks.prefetch_locals(ahead);
            }
            let stored = &self.blocks.chunk(chunk).locals;
            if let Some((eight, rest)) = given.split_first_chunk::<8>()
                && lane == 0
                && stored.iter().zip(eight).fold(0, |differences, (stored, given)| differences | (stored ^ given)) == 0
            {
                given = rest;
                continue;
            }
            let stored = stored.get(lane..).unwrap_or_default();
            let equal = stored.iter().zip(given).take_while(|(stored, given)| stored == given).count();
            given = given.get(equal..).unwrap_or_default();
            if equal < stored.len() {
                break;
            }
            lane = 0;
        }
        most - given.len()
    }

    /// Adds a new node, whose first block is set, to the table of branches.
    fn link(&mut self, id: u32) -> Result<(), Refused> {
        let node = self.nodes.at(id);
        if node.len == 0 {
            let node = self.nodes.take(id);
            self.heap -= node.heap();
            return Err(Refused::Exhausted);
        }
        let (parent, start) = (node.parent, node.start);
        let hash = branch_hash(self.secret, parent, start, self.blocks.local(node.slot(start)));
        let keys = BranchKeys { secret: self.secret, nodes: &self.nodes, blocks: &self.blocks };
        if !self.branches.insert(hash, id, keys) {
            let node = self.nodes.take(id);
            self.heap -= node.heap();
            for chunk in node.chunks {
                self.blocks.pages_mut().free(chunk);
            }
            return Err(Refused::Exhausted);
        }
        if parent != ROOT {
            let above = self.nodes.at_mut(parent);
            above.children += 1;
            above.deepest_branch = above.deepest_branch.max(start);
        }
        Ok(())
    }

    /// Adds blocks without engine hashes at the end of a node.
    fn extend(&mut self, node_id: u32, locals: &[u64]) -> Result<(), Refused> {
        let node = self.nodes.at_mut(node_id);
        let before = node.heap();
        let chunks = (node.len as usize + locals.len()).div_ceil(LANES as usize);
        node.chunks.reserve_exact(if node.chunks.is_empty() {
            chunks
        } else {
            // A node that grows repeatedly must not be copied each time.
            let more = chunks.saturating_sub(node.chunks.len());
            if more > node.chunks.capacity() - node.chunks.len() { more.max(node.chunks.len() / 4) } else { 0 }
        });
        let mut rest = locals;
        let mut made = Ok(());
        while !rest.is_empty() {
            let lane = node.len % LANES;
            if lane == 0 {
                let Some(chunk) = self.blocks.allocate(node_id, node.chunks.len() as u16) else {
                    made = Err(Refused::Exhausted);
                    break;
                };
                node.chunks.push(chunk);
            }
            let Some(chunk) = node.chunks.last().and_then(|&chunk| self.blocks.chunk_mut(chunk)) else { break };
            let room = chunk.locals.get_mut(lane as usize..).unwrap_or_default();
            let taken = room.len().min(rest.len());
            for (to, local) in room.iter_mut().zip(rest) {
                *to = *local;
            }
            node.len += taken as u32;
            rest = rest.get(taken..).unwrap_or_default();
        }
        self.heap = self.heap + node.heap() - before;
        made
    }
}
