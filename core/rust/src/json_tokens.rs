//! Token ids as JSON arrays: read into, and written from, little-endian u32.

use crate::hash::TOKEN_BYTES;

/// Bytes of the longest token id and a comma.
const LONGEST: usize = 11;

/// An element that is not an integer from 0 to 2^32 - 1, or is not followed by a comma or the end of the array.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAToken {
    /// Number of the element, from 0.
    pub index: usize,
}

/// Reads a JSON array of token ids. Stops after `limit` + 1 of them.
pub fn read(text: &[u8], limit: usize) -> Result<Vec<u8>, NotAToken> {
    let longest = limit.saturating_add(1).min(text.len() / 2 + 1);
    let mut tokens = Vec::with_capacity(longest.saturating_mul(TOKEN_BYTES));
    let [b'[', elements @ ..] = skip_space(text) else { return Err(NotAToken { index: 0 }) };
    let mut rest = elements;
    if let [b']', end @ ..] = skip_space(rest) {
        return if skip_space(end).is_empty() { Ok(tokens) } else { Err(NotAToken { index: 0 }) };
    }
    for index in 0..longest {
        let (token, after) = read_token(skip_space(rest)).ok_or(NotAToken { index })?;
        tokens.extend_from_slice(&token.to_le_bytes());
        match skip_space(after) {
            [b',', next @ ..] => rest = next,
            [b']', end @ ..] if skip_space(end).is_empty() => return Ok(tokens),
            _ => return Err(NotAToken { index }),
        }
    }
    Ok(tokens)
}

/// Writes token ids, little-endian u32, as a JSON array.
pub fn write(tokens: &[u8]) -> Vec<u8> {
    let tokens = tokens.chunks_exact(TOKEN_BYTES);
    let mut text = Vec::with_capacity(tokens.len().saturating_mul(LONGEST).saturating_add(2));
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

fn skip_space(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t' | b'\n' | b'\r', rest @ ..] = text {
        text = rest;
    }
    text
}

fn read_token(text: &[u8]) -> Option<(u32, &[u8])> {
    if let [b'0', rest @ ..] = text {
        return Some((0, rest));
    }
    let (mut value, mut rest, mut digits) = (0u64, text, 0);
    while let [digit @ b'0'..=b'9', after @ ..] = rest {
        value = value * 10 + u64::from(digit - b'0');
        digits += 1;
        if digits == LONGEST {
            return None;
        }
        rest = after;
    }
    if digits == 0 { None } else { Some((u32::try_from(value).ok()?, rest)) }
}

fn write_token(token: u32, text: &mut Vec<u8>) {
    let mut digits = [0; LONGEST - 1];
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
    fn reading_stops_beyond_the_limit() {
        assert_eq!(read(b"[1,2,3,x", 2), Ok(packed(&[1, 2, 3])));
        assert_eq!(read(b" [ 1 ,\t2\r\n] ", 2), Ok(packed(&[1, 2])));
    }
}
