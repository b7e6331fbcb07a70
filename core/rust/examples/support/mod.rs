//! Event batches of worker 7, and numbers to fill them with.

#![allow(dead_code)]

/// Numbers that look random (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    pub fn words(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.word()).collect()
    }
}

fn varint(mut value: u64, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn field(number: u64, value: &[u8], to: &mut Vec<u8>) {
    varint(number << 3 | 2, to);
    varint(value.len() as u64, to);
    to.extend_from_slice(value);
}

fn batch(event_id: u64, number: u64, change: &[u8]) -> Vec<u8> {
    let mut event = vec![0x08];
    varint(event_id, &mut event);
    event.extend_from_slice(&[0x10, 0x01]);
    field(number, change, &mut event);
    let mut message = vec![0x08, 7, 0x19];
    message.extend(1u64.to_le_bytes());
    field(4, &event, &mut message);
    message
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A batch that stores a chain from the start of a sequence.
pub fn stored(event_id: u64, engines: &[u64], locals: &[u64]) -> Vec<u8> {
    let mut change = Vec::new();
    field(2, &bytes(engines), &mut change);
    field(3, &bytes(locals), &mut change);
    batch(event_id, 3, &change)
}

/// A batch that removes blocks.
pub fn removed(event_id: u64, engines: &[u64]) -> Vec<u8> {
    let mut change = Vec::new();
    field(1, &bytes(engines), &mut change);
    batch(event_id, 4, &change)
}
