//! What is recorded of a rank's blocks, and of the events that changed them.

use std::fmt;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::hash::SEED;
use crate::wire::TIERS;

/// What besides the tokens decides whether a block may be shared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope {
    pub lora_name: String,
    pub cache_salt: String,
    pub tenant: String,
}

/// A resident block.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Engine hash of the parent when this block was stored; None at the start of a sequence.
    pub parent: Option<u64>,
    /// Sequence hash of the parent; 0 at the start of a sequence.
    pub parent_place: u64,
    pub local: u64,
    pub sequence: u64,
    /// Position in the sequence, from 0.
    pub depth: u32,
    /// Physical copies by tier.
    pub copies: [u32; TIERS],
    /// What few blocks have; None for most.
    pub notes: Option<Arc<Notes>>,
}

impl Block {
    /// Returns the scope of its sequence, which its children inherit; None for the base scope.
    pub fn scope(&self) -> Option<Arc<Scope>> {
        self.notes.as_ref().and_then(|notes| notes.scope.clone())
    }

    /// Returns the number of blocks that its engine's block consists of; above 1, this is the last of them.
    pub fn parts(&self) -> u32 {
        self.notes.as_ref().map_or(1, |notes| notes.parts)
    }
}

/// Scope and parts of blocks.
#[derive(Debug, PartialEq)]
pub struct Notes {
    scope: Option<Arc<Scope>>,
    parts: u32,
}

impl Notes {
    /// Returns the notes on blocks; None if they have the base scope and are whole.
    pub fn new(scope: Option<Arc<Scope>>, parts: u32) -> Option<Arc<Self>> {
        (scope.is_some() || parts > 1).then(|| Arc::new(Self { scope, parts: parts.max(1) }))
    }
}

/// An encoded KvEvent with its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    pub id: u64,
    pub encoded: Arc<[u8]>,
    /// Digest of the rank's state after the event.
    pub digest: u64,
}

/// Why a report is refused, or events cannot be returned. Nothing was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The report is inconsistent.
    Invalid(String),
    /// The parent of stored blocks is not resident.
    UnknownParent(u64),
    /// Requested events are no longer stored or do not exist yet.
    Gone(String),
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(message) | Self::Gone(message) => to.write_str(message),
            Self::UnknownParent(parent) => {
                write!(to, "the parent {parent:#018x} is not resident: report it as stored before its children")
            }
        }
    }
}

impl std::error::Error for Error {}

/// Returns the place of a tier in `Block::copies`.
pub fn tier_index(tier: i32) -> Result<usize, Error> {
    match tier {
        1.. if tier as usize <= TIERS => Ok(tier as usize - 1),
        _ => Err(Error::Invalid(format!(
            "expected device, host, disk, shared or checkpoint as the tier, received {tier}"
        ))),
    }
}

/// Returns engine hashes for the blocks that an engine's larger block consists of; the last one has its own hash.
///
/// So a child finds its parent, and equal blocks have equal parts.
pub fn part_hashes(engine_hash: u64, parts: u32) -> impl Iterator<Item = u64> {
    let derived = (0..u64::from(parts.saturating_sub(1))).map(move |number| {
        let pair = (u128::from(engine_hash) | u128::from(number) << 64).to_le_bytes();
        xxh3_64_with_seed(&pair, SEED)
    });
    derived.chain([engine_hash])
}
