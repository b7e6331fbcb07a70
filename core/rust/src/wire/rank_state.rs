//! Messages of a dump: RankState and BlockRecord.

use super::{Fields, Malformed, Value};

/// A BlockRecord.
#[derive(Clone, Debug, Default)]
pub struct BlockRecord {
    pub engine: u64,
    pub parent: Option<u64>,
    pub local: u64,
    pub sequence: u64,
    pub depth: u32,
    pub copies: Copies,
}

/// Pairs (tier, copies) of a block, in the order of the input. Nearly all blocks have one, which takes no allocation.
#[derive(Clone, Debug, Default)]
pub struct Copies {
    first: Option<(i32, u32)>,
    others: Vec<(i32, u32)>,
}

impl Copies {
    pub fn iter(&self) -> impl Iterator<Item = (i32, u32)> {
        self.first.iter().chain(&self.others).copied()
    }

    fn push(&mut self, pair: (i32, u32)) {
        match self.first {
            None => self.first = Some(pair),
            Some(_) => self.others.push(pair),
        }
    }
}

/// A RankState.
#[derive(Debug, Default)]
pub struct RankState {
    pub rank: Option<(u64, u32)>,
    pub cursor: Option<(u64, u64)>,
    pub blocks: Vec<BlockRecord>,
    pub last: bool,
    pub digest: u64,
    pub counting: i32,
    pub partial: bool,
}

impl RankState {
    /// Returns the number of blocks in an encoded message; of those before the error if it is malformed.
    pub fn count_blocks(message: &[u8]) -> usize {
        let mut fields = Fields::new(message);
        let mut blocks = 0;
        while let Ok(Some(field)) = fields.next() {
            blocks += usize::from(matches!(field, (3, Value::Bytes(_))));
        }
        blocks
    }

    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let mut state = Self { blocks: Vec::with_capacity(Self::count_blocks(message)), ..Self::default() };
        let mut fields = Fields::new(message);
        while let Some(field) = fields.next()? {
            match field {
                (1, Value::Bytes(rank)) => {
                    let (worker_id, dp_rank) = state.rank.get_or_insert_default();
                    let mut fields = Fields::new(rank);
                    while let Some(field) = fields.next()? {
                        match field {
                            (1, Value::Varint(value)) => *worker_id = value,
                            (2, Value::Varint(value)) => *dp_rank = value as u32,
                            _ => {}
                        }
                    }
                }
                (2, Value::Bytes(cursor)) => {
                    let (incarnation, next_event_id) = state.cursor.get_or_insert_default();
                    let mut fields = Fields::new(cursor);
                    while let Some(field) = fields.next()? {
                        match field {
                            (1, Value::Fixed64(value)) => *incarnation = value,
                            (2, Value::Varint(value)) => *next_event_id = value,
                            _ => {}
                        }
                    }
                }
                (3, Value::Bytes(block)) => state.blocks.push(BlockRecord::parse(block)?),
                (4, Value::Varint(value)) => state.last = value != 0,
                (5, Value::Fixed64(value)) => state.digest = value,
                (6, Value::Varint(value)) => state.counting = value as i32,
                (7, Value::Varint(value)) => state.partial = value != 0,
                _ => {}
            }
        }
        Ok(state)
    }
}

impl BlockRecord {
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let mut record = Self::default();
        let mut fields = Fields::new(message);
        while let Some(field) = fields.next()? {
            match field {
                (1, Value::Fixed64(value)) => record.engine = value,
                (2, Value::Fixed64(value)) => record.parent = Some(value),
                (3, Value::Fixed64(value)) => record.local = value,
                (4, Value::Fixed64(value)) => record.sequence = value,
                (5, Value::Varint(value)) => record.depth = value as u32,
                (6, Value::Bytes(copies)) => {
                    let mut fields = Fields::new(copies);
                    let (mut tier, mut count) = (0, 0);
                    while let Some(field) = fields.next()? {
                        match field {
                            (1, Value::Varint(value)) => tier = value as i32,
                            (2, Value::Varint(value)) => count = value as u32,
                            _ => {}
                        }
                    }
                    record.copies.push((tier, count));
                }
                _ => {}
            }
        }
        Ok(record)
    }
}
