//! What is recorded of a rank's blocks, and of the events that changed them.

use std::fmt;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::hash::SEED;

/// Number of tiers: device, host, disk and shared, whose numbers in the contract are 1 to 4.
pub const TIERS: usize = 4;

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
    /// Scope of its sequence, which its children inherit; None for the base scope.
    pub scope: Option<Arc<Scope>>,
    /// Number of blocks that its engine's block consists of; above 1, this is the last of them.
    pub parts: u32,
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
        1..=4 => Ok(tier as usize - 1),
        _ => Err(Error::Invalid(format!("expected device, host, disk or shared as the tier, received {tier}"))),
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
