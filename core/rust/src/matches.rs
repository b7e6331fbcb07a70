//! Reads the answers of Indexers.

use crate::wire::{Fields, Malformed, Value, Writer};

/// Columns of an encoded `FindMatchesResponse`, with an entry for each rank.
#[derive(Default)]
pub struct Matches {
    /// The same message with nothing but the ranks and their incarnations.
    pub ranks: Vec<u8>,
    /// Leading blocks, a column for each tier or a faster one.
    pub blocks: [Vec<u32>; 4],
    pub event_ids: Vec<u64>,
    pub pooled: u32,
}

/// Reads an encoded `FindMatchesResponse`.
pub fn read(message: &[u8]) -> Result<Matches, Malformed> {
    let (mut ranks, mut matches) = (Writer::default(), Matches::default());
    let [device, host, disk, shared] = &mut matches.blocks;
    let mut fields = Fields::new(message);
    while let Some((number, value)) = fields.next()? {
        match (number, value) {
            (1 | 2 | 7, Value::Bytes(packed)) => {
                let is_whole =
                    if number == 7 { packed.len().is_multiple_of(8) } else { Fields::new(packed).are_varints() };
                if !is_whole {
                    return Err(Malformed("a column of the ranks ends within a number"));
                }
                ranks.bytes(number, packed);
            }
            (1 | 2, Value::Varint(single)) => ranks.packed(number, std::iter::once(single)),
            (7, Value::Fixed64(single)) => ranks.fixed64(number, single),
            (3, value) => add(device, value, |number| number as u32)?,
            (4, value) => add(host, value, |number| number as u32)?,
            (5, value) => add(disk, value, |number| number as u32)?,
            (6, value) => add(shared, value, |number| number as u32)?,
            (8, value) => add(&mut matches.event_ids, value, |number| number)?,
            (11, Value::Varint(pooled)) => matches.pooled = pooled as u32,
            _ => {}
        }
    }
    matches.ranks = ranks.0;
    Ok(matches)
}

/// Adds the numbers in a value of a repeated field. Ignores values of another wire type.
fn add<T>(column: &mut Vec<T>, value: Value<'_>, convert: impl Fn(u64) -> T) -> Result<(), Malformed> {
    match value {
        Value::Bytes(packed) => {
            column.reserve(packed.len());
            let mut numbers = Fields::new(packed);
            while let Some(number) = numbers.packed()? {
                column.push(convert(number));
            }
        }
        Value::Varint(single) => column.push(convert(single)),
        _ => {}
    }
    Ok(())
}
