//! Token ids as JSON arrays: read into, and written from, little-endian u32.

use std::iter;
use std::ops::Range;

use crate::hash::TOKEN_BYTES;

/// Bytes that are searched at once.
const CHUNK: usize = 32;

/// Digits of the longest token id.
pub const MAX_DIGITS: usize = 10;

/// An element that is not an integer from 0 to 2^32 - 1, or is not followed by a comma or the end of the array.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAToken {
    /// Number of the element, from 0.
    pub index: usize,
}

/// Reads a JSON array of token ids. Stops after `limit` + 1 of them.
pub fn read(text: &[u8], limit: usize) -> Result<Vec<u8>, NotAToken> {
    let [b'[', elements @ ..] = skip_space(text) else { return Err(NotAToken { index: 0 }) };
    if let [b']', end @ ..] = skip_space(elements) {
        return if skip_space(end).is_empty() { Ok(Vec::new()) } else { Err(NotAToken { index: 0 }) };
    }
    let longest = limit.saturating_add(1).min(text.len() / 2 + 1);
    let mut tokens = Vec::with_capacity(longest);
    let mut rest = elements;
    loop {
        rest = read_short_tokens(rest, &mut tokens, longest);
        let index = tokens.len();
        if index == longest {
            break;
        }
        let (token, after) = read_digits(skip_space(rest)).ok_or(NotAToken { index })?;
        tokens.push(token.to_le_bytes());
        match skip_space(after) {
            [b',', next @ ..] => rest = next,
            [b']', end @ ..] if skip_space(end).is_empty() => break,
            _ => return Err(NotAToken { index }),
        }
    }
    Ok(tokens.into_flattened())
}

/// Writes token ids, little-endian u32, as a JSON array.
pub fn write(tokens: &[u8]) -> Vec<u8> {
    let tokens = tokens.chunks_exact(TOKEN_BYTES);
    let mut text = Vec::with_capacity(tokens.len().saturating_mul(MAX_DIGITS + 1).saturating_add(2));
    text.push(b'[');
    for token in tokens {
        if text.len() > 1 {
            text.push(b',');
        }
        write_token(token.first_chunk().map_or(0, |token| u32::from_le_bytes(*token)), &mut text);
    }
    text.push(b']');
    text
}

/// Where in a JSON object the value of a field is: the last one, if there are several. None if there is none, or if a
/// name is written with an escape, which may be that of the field.
///
/// Nothing is validated, and an array ends at its first `]` unless it begins with a text or an array. If the value is
/// valid, and the object is valid with `[]` in its place, then the text was valid.
pub fn find_value(text: &[u8], field: &[u8]) -> Option<Range<usize>> {
    let [b'{', object @ ..] = skip_space(text) else { return None };
    let (mut rest, mut found) = (object, None);
    loop {
        let [b'"', quoted @ ..] = skip_space(rest) else { return found };
        let length = quoted.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
        let (name, after) = quoted.split_at_checked(length)?;
        let [b'"', after @ ..] = after else { return None };
        let [b':', after @ ..] = skip_space(after) else { return found };
        let value = skip_space(after);
        rest = match value.first() {
            Some(b'[') if name == field && !is_nested(value) => value.get(find(value, [b']'])? + 1..)?,
            _ => skip_value(value),
        };
        if name == field {
            found = Some(text.len() - value.len()..text.len() - rest.len());
        }
        match skip_space(rest) {
            [b',', next @ ..] => rest = next,
            _ => return found,
        }
    }
}

/// Whether an array begins with a text or another array, so that it has more brackets than its own.
fn is_nested(array: &[u8]) -> bool {
    matches!(array.get(1..).map(skip_space), Some([b'"' | b'[', ..]))
}

/// Where the first of the wanted bytes is; fast, since a chunk is searched without a branch for each byte.
fn find<const N: usize>(text: &[u8], wanted: [u8; N]) -> Option<usize> {
    find_by(text, |byte| wanted.iter().fold(0, |found, each| found | u8::from(byte == each)))
}

/// Does the same with a function that returns 1 for a wanted byte, and 0 for another one.
pub(crate) fn find_by(text: &[u8], is_wanted: impl Fn(&u8) -> u8) -> Option<usize> {
    // Bits of a byte each: of booleans the compiler makes no vectors.
    let (chunks, _) = text.as_chunks::<CHUNK>();
    let contains = |chunk: &[u8; CHUNK]| chunk.iter().fold(0, |found, byte| found | is_wanted(byte)) != 0;
    let start = CHUNK * chunks.iter().position(contains).unwrap_or(chunks.len());
    Some(start + text.get(start..)?.iter().position(|byte| is_wanted(byte) != 0)?)
}

/// What follows a value: at a comma or the end of the object, if the text is valid.
fn skip_value(mut text: &[u8]) -> &[u8] {
    let mut depth = 0usize;
    loop {
        match text {
            [b'"', rest @ ..] => text = skip_string(rest),
            [b'[' | b'{', rest @ ..] => (depth, text) = (depth + 1, rest),
            [b']' | b'}', rest @ ..] if depth > 0 => (depth, text) = (depth - 1, rest),
            [b',', ..] if depth == 0 => return text,
            [] | [b']' | b'}', ..] => return text,
            [_, rest @ ..] => text = rest,
        }
    }
}

/// What follows a string, from after its first quotation mark.
fn skip_string(mut text: &[u8]) -> &[u8] {
    while let Some(mark) = find(text, [b'"', b'\\']) {
        match text.get(mark..) {
            Some([b'\\', _, rest @ ..]) => text = rest,
            Some([b'"', rest @ ..]) => return rest,
            _ => break,
        }
    }
    &[]
}

pub(crate) fn skip_space(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t' | b'\n' | b'\r', rest @ ..] = text {
        text = rest;
    }
    text
}

/// Reads tokens as long as `read_short` can, up to `longest` in all. Returns the rest of the text.
#[inline(never)] // with the other cases in one loop, registers do not suffice
fn read_short_tokens<'a>(mut text: &'a [u8], tokens: &mut Vec<[u8; TOKEN_BYTES]>, longest: usize) -> &'a [u8] {
    let short = iter::from_fn(|| {
        let (token, rest) = read_short(text)?;
        text = rest;
        Some(token.to_le_bytes())
    });
    tokens.extend(short.take(longest - tokens.len()));
    text
}

/// Reads a token of one to seven digits and the comma behind it, without a branch for each digit: the lengths of token
/// ids cannot be predicted. None if it begins with 0 or white space, or has few bytes behind it.
#[inline]
fn read_short(text: &[u8]) -> Option<(u32, &[u8])> {
    let head: &[u8; 9] = text.first_chunk()?;
    let word = u64::from_le_bytes(*head.first_chunk()?);
    let digits = word ^ 0x3030_3030_3030_3030;
    let others = (digits.wrapping_add(0x7676_7676_7676_7676) | digits) & 0x8080_8080_8080_8080;
    if others == 0 || !matches!(word as u8, b'1'..=b'9') {
        return None;
    }
    let length = others.trailing_zeros() as usize / 8;
    if *head.get(length)? != b',' {
        return None;
    }
    let gap = 1 + usize::from(*head.get(length + 1)? == b' ');
    // The digits move to the high end, so that zeros precede them. Then pairs, fours and all eight are joined.
    let pairs = (digits << (64 - 8 * length)).wrapping_mul(10 << 8 | 1) >> 8;
    let fours = (pairs & 0x00ff_00ff_00ff_00ff).wrapping_mul(100 << 16 | 1) >> 16;
    let value = (fours & 0x0000_ffff_0000_ffff).wrapping_mul(10_000 << 32 | 1) >> 32;
    Some((value as u32, text.get(length + gap..)?))
}

fn read_digits(text: &[u8]) -> Option<(u32, &[u8])> {
    if let [b'0', rest @ ..] = text {
        return Some((0, rest));
    }
    let (mut value, mut rest, mut digits) = (0u64, text, 0);
    while let [digit @ b'0'..=b'9', after @ ..] = rest {
        value = value * 10 + u64::from(digit - b'0');
        digits += 1;
        if digits > MAX_DIGITS {
            return None;
        }
        rest = after;
    }
    if digits == 0 { None } else { Some((u32::try_from(value).ok()?, rest)) }
}

/// Adds a token id to a text.
pub fn write_token(token: u32, text: &mut Vec<u8>) {
    let mut digits = [0; MAX_DIGITS];
    let (mut left, mut count) = (token, 0);
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (left % 10) as u8;
        left /= 10;
        count += 1;
        if left == 0 {
            break;
        }
    }
    text.extend(digits.iter().skip(digits.len() - count));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(tokens: &[u32]) -> Vec<u8> {
        tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        for tokens in [&[][..], &[0], &[10, 4_294_967_295, 7, 100]] {
            assert_eq!(read(&write(&packed(tokens)), 10), Ok(packed(tokens)));
        }
        assert_eq!(write(&packed(&[0, 10, u32::MAX])), b"[0,10,4294967295]");
    }

    #[test]
    fn the_first_element_that_is_no_token_is_named() {
        for (text, index) in [
            ("", 0),
            ("1", 0),
            ("[", 0),
            ("[]]", 0),
            ("[1", 0),
            ("[1,", 1),
            ("[1,]", 1),
            ("[1,-1]", 1),
            ("[1,01]", 1),
            ("[1,2.0]", 1),
            ("[1 2]", 0),
            ("[1,4294967296]", 1),
            ("[1,18446744073709551617]", 1),
            ("[1,2] 3", 1),
        ] {
            assert_eq!(read(text.as_bytes(), 10), Err(NotAToken { index }), "{text}");
        }
    }

    #[test]
    fn numbers_of_every_length_are_read() {
        let mut token = 1u64;
        while token <= 1 << 33 {
            for token in [token - 1, token, token + 1] {
                let text = format!("[{token},{token}, {token}]");
                let expected =
                    u32::try_from(token).map_or(Err(NotAToken { index: 0 }), |token| Ok(packed(&[token; 3])));
                assert_eq!(read(text.as_bytes(), 10), expected, "{text}");
            }
            token *= if token.is_multiple_of(3) { 5 } else { 3 };
        }
    }

    #[test]
    fn the_value_of_a_field_is_found() {
        for (text, value) in [
            (r#"{"p":[1,2]}"#, Some("[1,2]")),
            (r#" { "a" : "p\"[" , "p" : [ 1 ] , "b":2} "#, Some("[ 1 ]")),
            (r#"{"a":{"p":[1]},"b":[{"p":[2]}],"p":[3]}"#, Some("[3]")),
            (r#"{"p":[1],"p":[2],"q":[3]}"#, Some("[2]")),
            (r#"{"a":"\\","p":[1]}"#, Some("[1]")),
            (r#"{"a":"0123456789abcde\"0123456789abcd\\","p":[1]}"#, Some("[1]")),
            (r#"{"p":"[1]"}"#, Some("\"[1]\"")),
            (r#"{"p":[ "]",[1]],"q":1}"#, Some(r#"[ "]",[1]]"#)),
            (r#"{"p":[[1],[2]]}"#, Some("[[1],[2]]")),
            (r#"{"p":[1],"p":{"a":[2]}}"#, Some(r#"{"a":[2]}"#)),
            (r#"{"\u0070":[1],"p":[2]}"#, None),
            (r#"["p",[1]]"#, None),
            (r#"{"a":"p":[1]"#, None),
            (r#"{"p":[1"#, None),
            (r#"{"p"#, None),
            ("", None),
        ] {
            let found = find_value(text.as_bytes(), b"p").map(|range| &text[range]);
            assert_eq!(found, value, "{text}");
        }
    }

    #[test]
    fn reading_stops_beyond_the_limit() {
        assert_eq!(read(b"[1,2,3,x", 2), Ok(packed(&[1, 2, 3])));
        assert_eq!(read(b" [ 1 ,\t2\r\n] ", 2), Ok(packed(&[1, 2])));
    }
}
