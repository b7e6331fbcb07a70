//! Reads a worker's pieces of output without a protobuf message.

use crate::hash::TOKEN_BYTES;
use crate::wire::{Fields, Value};

/// Fields of `GenerateOutput`.
const TOKEN_IDS: u32 = 1;
const TOKEN_ENGINE_NS: u32 = 2;
const CACHED_TOKENS: u32 = 3;
const FINISH_REASON: u32 = 4;
const ARRIVED_ENGINE_NS: u32 = 6;

/// A piece of output without probabilities, text and parameters of a transfer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PlainOutput<'a> {
    /// Token ids, little-endian u32.
    pub tokens: &'a [u8],
    pub finish_reason: i32,
    pub cached_tokens: Option<u32>,
}

/// Reads an encoded `WorkerServiceGenerateResponse` that may have the engine's times too. None if it has anything else,
/// is encoded in an unusual way or is malformed.
pub fn plain_output(response: &[u8]) -> Option<PlainOutput<'_>> {
    let mut output = PlainOutput::default();
    let mut fields = fields_of_output(response)?;
    while let Some(field) = fields.next().ok()? {
        match field {
            (TOKEN_IDS, Value::Bytes(tokens))
                if output.tokens.is_empty() && tokens.len().is_multiple_of(TOKEN_BYTES) =>
            {
                output.tokens = tokens;
            }
            (CACHED_TOKENS, Value::Varint(tokens)) => output.cached_tokens = Some(tokens as u32),
            (FINISH_REASON, Value::Varint(reason)) => output.finish_reason = reason as i32,
            (ARRIVED_ENGINE_NS, Value::Varint(_)) => {}
            _ if is_time(field) => {}
            _ => return None,
        }
    }
    Some(output)
}

/// Returns the token of a response that has one token and, but for the engine's times, nothing else.
pub fn only_token(response: &[u8]) -> Option<u32> {
    let PlainOutput { tokens, finish_reason: 0, cached_tokens: None } = plain_output(response)? else { return None };
    Some(u32::from_le_bytes(tokens.try_into().ok()?))
}

/// Returns the fields of the output of a response that has nothing else.
fn fields_of_output(response: &[u8]) -> Option<Fields<'_>> {
    let mut fields = Fields::new(response);
    let (1, Value::Bytes(output)) = fields.next().ok()?? else { return None };
    fields.next().ok()?.is_none().then(|| Fields::new(output))
}

fn is_time(field: (u32, Value<'_>)) -> bool {
    match field {
        (TOKEN_ENGINE_NS, Value::Varint(_)) => true,
        (TOKEN_ENGINE_NS, Value::Bytes(times)) => Fields::new(times).are_varints(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_with_and_without_times() {
        let expected = Some(PlainOutput { tokens: &[57, 48, 0, 0], ..Default::default() });
        assert_eq!(plain_output(&[10, 6, 10, 4, 57, 48, 0, 0]), expected);
        assert_eq!(plain_output(&[10, 10, 10, 4, 57, 48, 0, 0, 18, 2, 0x80, 1]), expected);
    }

    #[test]
    fn a_single_token_alone_is_recognized() {
        assert_eq!(only_token(&[10, 6, 10, 4, 57, 48, 0, 0]), Some(12345));
        for response in [&[10, 0][..], &[10, 10, 10, 8, 1, 0, 0, 0, 2, 0, 0, 0], &[10, 8, 10, 4, 1, 0, 0, 0, 32, 2]] {
            assert_eq!(only_token(response), None, "{response:?}");
        }
        assert_eq!(only_token(&[10, 8, 10, 4, 1, 0, 0, 0, 24, 0]), None, "cached tokens");
    }

    #[test]
    fn a_piece_that_begins_and_ends_the_output_is_read() {
        let response = [10, 14, 10, 4, 57, 48, 0, 0, 24, 0x80, 1, 32, 2, 48, 5, 16];
        assert_eq!(plain_output(&response), None, "cut off");
        let expected = PlainOutput { tokens: &[57, 48, 0, 0], finish_reason: 2, cached_tokens: Some(128) };
        assert_eq!(plain_output(&[&[10, 13], &response[2..15]].concat()), Some(expected));
        assert_eq!(plain_output(&[10, 0]), Some(PlainOutput::default()));
        for other in [[66, 0], [74, 0], [42, 0], [56, 1], [98, 0]] {
            assert_eq!(plain_output(&[10, 2, other[0], other[1]]), None, "{other:?}");
        }
    }

    #[test]
    fn whatever_else_a_piece_has_is_left_to_others() {
        for response in [
            &[][..],
            &[10, 5, 10, 3, 57, 48, 0],                      // not a whole token
            &[10, 6, 10, 4, 57, 48, 0],                      // cut off
            &[10, 9, 10, 4, 57, 48, 0, 0, 18, 1, 0x80],      // a time without an end
            &[10, 6, 10, 4, 57, 48, 0, 0, 10, 2, 32, 2],     // a second output
            &[10, 12, 10, 4, 1, 0, 0, 0, 10, 4, 2, 0, 0, 0], // tokens in two parts
        ] {
            assert_eq!(plain_output(response), None, "{response:?}");
        }
    }
}
