//! Server-sent events of a response that differ only in a token.

use crate::json_tokens::{MAX_DIGITS, write_token};

/// The parts that all events of a response have in common.
#[derive(Debug)]
pub struct TokenEvents {
    /// The bytes before the token, by its number of digits less one.
    heads: [Vec<u8>; MAX_DIGITS],
    tail: Vec<u8>,
}

impl TokenEvents {
    /// Takes the bytes before and after the token. With `are_chunks`, each event is a chunk of an HTTP/1.1 body.
    pub fn new(before: &[u8], after: &[u8], are_chunks: bool) -> Self {
        let size = |digits| before.len() + digits + after.len();
        let chunk = |digits| if are_chunks { format!("{:x}\r\n", size(digits)) } else { String::new() };
        let heads = std::array::from_fn(|more| [chunk(1 + more).as_bytes(), before].concat());
        Self { heads, tail: [after, if are_chunks { b"\r\n" } else { &[] }].concat() }
    }

    /// Returns the event of a token.
    pub fn event(&self, token: u32) -> Vec<u8> {
        let more = token.checked_ilog10().unwrap_or(0) as usize;
        let head = self.heads.get(more).map_or(&[][..], Vec::as_slice);
        let mut event = Vec::with_capacity(head.len() + MAX_DIGITS + self.tail.len());
        event.extend_from_slice(head);
        write_token(token, &mut event);
        event.extend_from_slice(&self.tail);
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_chunks_on_request() {
        let events = TokenEvents::new(b"[", b"]]]]]]", false);
        assert_eq!(events.event(0), b"[0]]]]]]");
        assert_eq!(events.event(1234), b"[1234]]]]]]");
        assert_eq!(TokenEvents::new(b"[", b"]]]]]]", true).event(u32::MAX), b"11\r\n[4294967295]]]]]]\r\n");
    }
}
