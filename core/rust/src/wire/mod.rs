//! Reader and writer of the protobuf wire format, for the messages of the core.
//!
//! As in protobuf, unknown fields and fields of another wire type are skipped, and repeated occurrences of a field are
//! merged. Lists of fixed64 are not copied out of the input.

mod rank_state;

use std::borrow::Cow;

pub use rank_state::{BlockRecord, RankState};

/// Number of tiers: device, host, disk, shared and checkpoints, whose numbers in the contract are 1 to 5.
pub const TIERS: usize = 5;

/// Why bytes cannot be parsed as a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A field's value, by wire type.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    /// A value that no message of the core uses: 32 bits or a group.
    Other,
}

/// Reads the fields of a message.
pub struct Fields<'a> {
    rest: &'a [u8],
}

/// Maximum depth of nested groups, the same as in other readers.
const MAX_NESTING: u32 = 100;

impl<'a> Fields<'a> {
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        if let Some((&byte, rest)) = self.rest.split_first()
            && byte < 0x80
        {
            self.rest = rest;
            return Ok(u64::from(byte));
        }
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let Some((&byte, rest)) = self.rest.split_first() else {
                return Err(Malformed("the input ends within a varint"));
            };
            self.rest = rest;
            // Bits beyond the 64th are dropped, as in other readers.
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed("a varint has more than ten bytes"))
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8], Malformed> {
        let split = usize::try_from(count).ok().and_then(|count| self.rest.split_at_checked(count));
        let Some((taken, rest)) = split else { return Err(Malformed("the input ends within a field")) };
        self.rest = rest;
        Ok(taken)
    }

    fn tag(&mut self) -> Result<(u32, u8), Malformed> {
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|number| (1..1 << 29).contains(number));
        match number {
            Some(number) => Ok((number, (tag & 7) as u8)),
            None => Err(Malformed("a field has an invalid number")),
        }
    }

    /// Returns whether the rest is varints without tags, as a packed field has them.
    pub fn are_varints(mut self) -> bool {
        while !self.rest.is_empty() {
            if self.varint().is_err() {
                return false;
            }
        }
        true
    }

    /// Returns the next varint without a tag, of a packed field; None at the end.
    pub fn packed(&mut self) -> Result<Option<u64>, Malformed> {
        if self.rest.is_empty() { Ok(None) } else { self.varint().map(Some) }
    }

    /// Returns the number and the value of the next field; None at the end.
    pub fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, Malformed> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let (number, wire_type) = self.tag()?;
        let value = match wire_type {
            0 => Value::Varint(self.varint()?),
            1 => Value::Fixed64(word(self.take(8)?)),
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            3 => {
                self.skip_group(number)?;
                Value::Other
            }
            5 => {
                self.take(4)?;
                Value::Other
            }
            _ => return Err(Malformed("a field has an invalid wire type")),
        };
        Ok(Some((number, value)))
    }

    fn skip_group(&mut self, number: u32) -> Result<(), Malformed> {
        let mut open = vec![number];
        while let Some(&innermost) = open.last() {
            let (number, wire_type) = self.tag()?;
            match wire_type {
                0 => drop(self.varint()?),
                1 => drop(self.take(8)?),
                2 => {
                    let length = self.varint()?;
                    self.take(length)?;
                }
                3 if open.len() < MAX_NESTING as usize => open.push(number),
                4 if number == innermost => drop(open.pop()),
                5 => drop(self.take(4)?),
                _ => return Err(Malformed("a group has no end")),
            }
        }
        Ok(())
    }
}

#[inline]
fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// A repeated fixed64. It refers to the input if it is contiguous there, as usual writers encode it.
#[derive(Clone, Debug, Default)]
pub struct Words<'a>(Cow<'a, [u8]>);

impl<'a> Words<'a> {
    /// Adds the value of a field. Ignores values of another wire type.
    fn add(&mut self, value: Value<'a>) -> Result<(), Malformed> {
        match value {
            Value::Bytes(packed) if !packed.len().is_multiple_of(8) => {
                return Err(Malformed("the size of a list of hashes is not a multiple of 8 bytes"));
            }
            Value::Bytes(packed) if self.0.is_empty() => self.0 = Cow::Borrowed(packed),
            Value::Bytes(packed) => self.0.to_mut().extend_from_slice(packed),
            Value::Fixed64(single) => self.0.to_mut().extend_from_slice(&single.to_le_bytes()),
            _ => {}
        }
        Ok(())
    }

    fn heap(&self) -> usize {
        match &self.0 {
            Cow::Owned(bytes) => bytes.capacity(),
            Cow::Borrowed(_) => 0,
        }
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.0.len() / 8
    }

    /// Copies the words to a vector.
    pub fn copy_to(&self, to: &mut Vec<u64>) {
        to.clear();
        to.extend(self.0.chunks_exact(8).map(word));
    }
}

/// The change of an event.
#[derive(Clone, Debug)]
pub enum Change<'a> {
    None,
    Stored { parent: Option<u64>, engines: Words<'a>, locals: Words<'a> },
    Removed { engines: Words<'a> },
    Cleared,
}

/// A KvEvent.
#[derive(Clone, Debug)]
pub struct Event<'a> {
    pub id: u64,
    pub tier: i32,
    pub change: Change<'a>,
}

/// A KvEventBatch.
#[derive(Debug, Default)]
pub struct Batch<'a> {
    pub worker_id: u64,
    pub dp_rank: u32,
    pub incarnation: u64,
    pub block_size: u32,
    pub next_event_id: u64,
    pub digest: Option<u64>,
    pub published_unix_ns: u64,
    pub counting: i32,
    pub events: Vec<Event<'a>>,
}

impl<'a> Batch<'a> {
    pub fn parse(message: &'a [u8]) -> Result<Self, Malformed> {
        let mut batch = Self::default();
        let mut fields = Fields::new(message);
        while let Some(field) = fields.next()? {
            match field {
                (1, Value::Varint(value)) => batch.worker_id = value,
                (2, Value::Varint(value)) => batch.dp_rank = value as u32,
                (3, Value::Fixed64(value)) => batch.incarnation = value,
                (4, Value::Bytes(event)) => batch.events.push(Event::parse(event)?),
                (5, Value::Varint(value)) => batch.block_size = value as u32,
                (6, Value::Varint(value)) => batch.next_event_id = value,
                (7, Value::Fixed64(value)) => batch.digest = Some(value),
                (8, Value::Fixed64(value)) => batch.published_unix_ns = value,
                (9, Value::Varint(value)) => batch.counting = value as i32,
                _ => {}
            }
        }
        Ok(batch)
    }

    /// Returns the cursor after the batch: the first event id that is not in it.
    pub fn reached(&self) -> u64 {
        let after = self.events.iter().map(|event| event.id.saturating_add(1)).max();
        after.unwrap_or_default().max(self.next_event_id)
    }

    /// Returns whether an event clears one tier or all tiers.
    pub fn clears(&self) -> bool {
        self.events.iter().any(|event| matches!(event.change, Change::Cleared))
    }

    /// Returns whether an event clears all tiers.
    pub fn clears_all(&self) -> bool {
        self.events.iter().any(|event| matches!(event.change, Change::Cleared) && event.tier == 0)
    }

    /// Returns the heap memory in bytes, without the input.
    pub fn heap(&self) -> usize {
        let lists: usize = self.events.iter().map(|event| event.change.heap()).sum();
        self.events.capacity() * size_of::<Event<'_>>() + lists
    }
}

impl Change<'_> {
    fn heap(&self) -> usize {
        match self {
            Self::Stored { engines, locals, .. } => engines.heap() + locals.heap(),
            Self::Removed { engines } => engines.heap(),
            Self::None | Self::Cleared => 0,
        }
    }
}

impl<'a> Event<'a> {
    fn parse(message: &'a [u8]) -> Result<Self, Malformed> {
        let mut event = Self { id: 0, tier: 0, change: Change::None };
        let mut fields = Fields::new(message);
        while let Some(field) = fields.next()? {
            match field {
                (1, Value::Varint(value)) => event.id = value,
                (2, Value::Varint(value)) => event.tier = value as i32,
                (3, Value::Bytes(stored)) => event.merge_stored(stored)?,
                (4, Value::Bytes(removed)) => event.merge_removed(removed)?,
                (5, Value::Bytes(cleared)) => {
                    let mut fields = Fields::new(cleared);
                    while fields.next()?.is_some() {}
                    event.change = Change::Cleared;
                }
                _ => {}
            }
        }
        Ok(event)
    }

    fn merge_stored(&mut self, message: &'a [u8]) -> Result<(), Malformed> {
        if !matches!(self.change, Change::Stored { .. }) {
            self.change = Change::Stored { parent: None, engines: Words::default(), locals: Words::default() };
        }
        let Change::Stored { parent, engines, locals } = &mut self.change else { return Ok(()) };
        let mut fields = Fields::new(message);
        while let Some((number, value)) = fields.next()? {
            match (number, value) {
                (1, Value::Fixed64(hash)) => *parent = Some(hash),
                (2, value) => engines.add(value)?,
                (3, value) => locals.add(value)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn merge_removed(&mut self, message: &'a [u8]) -> Result<(), Malformed> {
        if !matches!(self.change, Change::Removed { .. }) {
            self.change = Change::Removed { engines: Words::default() };
        }
        let Change::Removed { engines } = &mut self.change else { return Ok(()) };
        let mut fields = Fields::new(message);
        while let Some((number, value)) = fields.next()? {
            if number == 1 {
                engines.add(value)?;
            }
        }
        Ok(())
    }
}

/// Encodes a message.
#[derive(Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn raw_varint(&mut self, value: u64) {
        let mut value = value;
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// Writes a varint field, or nothing for 0, as proto3 requires.
    pub fn varint(&mut self, number: u32, value: u64) {
        if value != 0 {
            self.raw_varint(u64::from(number) << 3);
            self.raw_varint(value);
        }
    }

    /// Writes a fixed64 field, also for 0.
    pub fn fixed64(&mut self, number: u32, value: u64) {
        self.raw_varint(u64::from(number) << 3 | 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a field of bytes or a message.
    pub fn bytes(&mut self, number: u32, value: &[u8]) {
        self.raw_varint(u64::from(number) << 3 | 2);
        self.raw_varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    /// Writes a packed list of varints.
    pub fn packed(&mut self, number: u32, values: impl Iterator<Item = u64> + Clone) {
        let length: u64 = values.clone().map(|value| (70 - u64::from((value | 1).leading_zeros())) / 7).sum();
        if length > 0 {
            self.raw_varint(u64::from(number) << 3 | 2);
            self.raw_varint(length);
            for value in values {
                self.raw_varint(value);
            }
        }
    }

    /// Writes a packed list of fixed64.
    pub fn packed_fixed64(&mut self, number: u32, values: impl ExactSizeIterator<Item = u64>) {
        if values.len() > 0 {
            self.raw_varint(u64::from(number) << 3 | 2);
            self.raw_varint(values.len() as u64 * 8);
            for value in values {
                self.0.extend_from_slice(&value.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_varints_are_right() {
        for value in [0, 1, 127, 128, 16383, 16384, u64::from(u32::MAX), 1 << 62, 1 << 63, u64::MAX] {
            let (mut packed, mut raw) = (Writer::default(), Writer::default());
            packed.packed(1, [value].into_iter());
            raw.raw_varint(value);
            assert_eq!(packed.0.len(), raw.0.len() + 2, "{value}");
            assert_eq!(Fields::new(&raw.0).varint(), Ok(value));
        }
    }

    #[test]
    fn no_bytes_panic() {
        let mut state = 1u64;
        for length in 0..2000usize {
            let bytes: Vec<u8> = (0..length % 97)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    [0x0A, 0x22, 0x12, 0x1A, 0xFF, (state >> 40) as u8][(state >> 56) as usize % 6]
                })
                .collect();
            let _ = Batch::parse(&bytes);
            let _ = RankState::parse(&bytes);
        }
        assert!(Batch::parse(&[0xFF; 11]).is_err());
        assert!(Batch::parse(&[0x22, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]).is_err());
        assert!(Batch::parse(&[0x0B; 200]).is_err());
        assert!(Batch::parse(&[0x0B, 0x0C]).is_ok());
        assert!(Batch::parse(&[]).is_ok());
    }

    #[test]
    fn lists_of_hashes_may_come_in_pieces() {
        let mut stored = Writer::default();
        stored.packed_fixed64(2, [1u64, 2].into_iter());
        stored.fixed64(2, 3);
        stored.packed_fixed64(2, [4u64].into_iter());
        let mut event = Writer::default();
        event.bytes(3, &stored.0);
        let mut batch = Writer::default();
        batch.bytes(4, &event.0);
        let parsed = Batch::parse(&batch.0).unwrap();
        let Change::Stored { engines, .. } = &parsed.events[0].change else { panic!() };
        let mut words = Vec::new();
        engines.copy_to(&mut words);
        assert_eq!(words, [1, 2, 3, 4]);
    }
}
