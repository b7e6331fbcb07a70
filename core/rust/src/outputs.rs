//! Reads the output of a worker if it has only tokens, as nearly every piece of a stream.

use crate::hash::TOKEN_BYTES;
use crate::wire::{Fields, Value};

/// Fields of `GenerateOutput`.
const TOKEN_IDS: u32 = 1;
const TOKEN_ENGINE_NS: u32 = 2;

/// Token ids, little-endian u32, of an encoded `WorkerServiceGenerateResponse` that has nothing else but the engine's
/// times of them. None if it has anything else, has no tokens, is encoded in an unusual way or is malformed.
pub fn tokens_only(response: &[u8]) -> Option<&[u8]> {
    let mut fields = Fields::new(response);
    let (1, Value::Bytes(output)) = fields.next().ok()?? else { return None };
    if fields.next().ok()?.is_some() {
        return None;
    }
    let mut fields = Fields::new(output);
    let (TOKEN_IDS, Value::Bytes(tokens)) = fields.next().ok()?? else { return None };
    if tokens.is_empty() || !tokens.len().is_multiple_of(TOKEN_BYTES) {
        return None;
    }
    while let Some(field) = fields.next().ok()? {
        match field {
            (TOKEN_ENGINE_NS, Value::Varint(_)) => {}
            (TOKEN_ENGINE_NS, Value::Bytes(times)) if Fields::new(times).are_varints() => {}
            _ => return None,
        }
    }
    Some(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_with_and_without_times() {
        let plain = [10, 6, 10, 4, 57, 48, 0, 0];
        assert_eq!(tokens_only(&plain), Some(&[57, 48, 0, 0][..]));
        let timed = [10, 10, 10, 4, 57, 48, 0, 0, 18, 2, 0x80, 1];
        assert_eq!(tokens_only(&timed), Some(&[57, 48, 0, 0][..]));
    }

    #[test]
    fn whatever_else_a_piece_has_is_left_to_others() {
        for response in [
            &[][..],
            &[10, 0],
            &[10, 2, 10, 0],                                 // no tokens
            &[10, 5, 10, 3, 57, 48, 0],                      // not a whole token
            &[10, 6, 10, 4, 57, 48, 0],                      // cut off
            &[10, 8, 10, 4, 57, 48, 0, 0, 32, 2],            // a finish reason
            &[10, 8, 10, 4, 57, 48, 0, 0, 24, 0],            // cached tokens
            &[10, 9, 10, 4, 57, 48, 0, 0, 18, 1, 0x80],      // a time without an end
            &[10, 6, 10, 4, 57, 48, 0, 0, 10, 2, 32, 2],     // a second output
            &[10, 12, 10, 4, 1, 0, 0, 0, 10, 4, 2, 0, 0, 0], // tokens in two parts
        ] {
            assert_eq!(tokens_only(response), None, "{response:?}");
        }
    }
}
