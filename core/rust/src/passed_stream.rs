//! Answers the pieces of a streamed response which a gateway sends to its external processor.

use crate::wire::{Fields, Value, Writer};

/// Fields of Envoy's `ProcessingRequest`.
const RESPONSE_BODY: u32 = 5;
const METADATA_CONTEXT: u32 = 8;
const ATTRIBUTES: u32 = 9;

/// A `ProcessingResponse` that lets a piece pass as it is.
const UNCHANGED: [u8; 4] = [0x22, 2, 0x0A, 0];
/// The fields around a piece in a `ProcessingResponse` that sends it back, from the innermost one.
const AROUND_PIECE: [u32; 5] = [1, 3, 3, 1, 4];

/// Bytes of pieces beyond which those taken must be counted.
const MAX_KEPT_BYTES: usize = 64 << 10;
const DATA: &[u8] = b"data:";
const EVENT_END: &[u8] = b"\n\n";

/// Implements `kvrouter.core.reference.PassedStream`.
#[derive(Debug, Default)]
pub struct PassedStream {
    pub sends_back: bool,
    pub hidden: Vec<Vec<u8>>,
    pub is_held: bool,
    pub limit: i64,
    pub most_received: i64,
    pub most_sent: usize,
    pub received: usize,
    pub sent: usize,
    pub tokens: i64,
    pub passed: Vec<u8>,
}

impl PassedStream {
    /// Returns the answer to a message with a piece that may pass; None for anything else. The answer has at most
    /// `most` bytes. `around` is the size of what surrounds the message, and the answer, in a frame: it counts for both.
    pub fn answer(&mut self, message: &[u8], around: usize, most: usize) -> Option<Vec<u8>> {
        let piece = piece_of(message).filter(|piece| !self.is_held && self.shows(piece))?;
        let answer = if self.sends_back { sent_back(piece) } else { UNCHANGED.to_vec() };
        let sent = self.sent + answer.len() + around;
        if answer.len() > most || sent > self.most_sent {
            return None;
        }
        self.sent = sent;
        self.received += message.len() + around;
        self.tokens += count_tokens(piece);
        self.passed.extend_from_slice(piece);
        Some(answer)
    }

    /// Returns whether what it has taken must be counted before it takes more.
    pub fn is_due(&self) -> bool {
        self.tokens > self.limit
            || self.passed.len() > MAX_KEPT_BYTES
            || i64::try_from(self.received).is_ok_and(|received| received > self.most_received)
    }

    /// Returns whether the client may see a piece: whole events without hidden names, if there are any.
    fn shows(&self, piece: &[u8]) -> bool {
        let has_name = |text: &[u8]| self.hidden.iter().any(|name| text.starts_with(name));
        self.hidden.is_empty()
            || (piece.ends_with(EVENT_END)
                && !piece.contains(&b'\r')
                && !(0..piece.len()).any(|at| piece.get(at..).is_some_and(has_name)))
    }
}

/// Returns the piece in a `ProcessingRequest` that has one, which is not the last, and but for metadata and attributes
/// nothing else.
fn piece_of(message: &[u8]) -> Option<&[u8]> {
    let mut body = None;
    let mut fields = Fields::new(message);
    while let Some(field) = fields.next().ok()? {
        match field {
            (RESPONSE_BODY, Value::Bytes(encoded)) if body.is_none() => body = Some(encoded),
            (METADATA_CONTEXT | ATTRIBUTES, Value::Bytes(_)) => {}
            _ => return None,
        }
    }
    let mut fields = Fields::new(body?);
    let (1, Value::Bytes(piece)) = fields.next().ok()?? else { return None };
    (fields.next().ok()?.is_none() && !piece.is_empty()).then_some(piece)
}

fn sent_back(piece: &[u8]) -> Vec<u8> {
    let mut answer = piece.to_vec();
    for number in AROUND_PIECE {
        let mut outer = Writer::default();
        outer.bytes(number, &answer);
        answer = outer.0;
    }
    answer
}

/// Returns for how many tokens a piece stands: one for each event, at least one.
fn count_tokens(piece: &[u8]) -> i64 {
    let events = piece.windows(DATA.len()).filter(|window| *window == DATA).count();
    i64::try_from(events).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: [u8; 11] = [0x2A, 9, 0x0A, 7, b'd', b'a', b't', b'a', b':', b'\n', b'\n'];

    fn stream() -> PassedStream {
        PassedStream { most_received: 100, most_sent: 100, ..Default::default() }
    }

    #[test]
    fn a_piece_passes_unchanged_or_is_sent_back() {
        let mut each = stream();
        assert_eq!(each.answer(&MESSAGE, 5, 100), Some(UNCHANGED.into()));
        assert_eq!((each.received, each.sent, each.tokens, &each.passed[..]), (16, 9, 1, &b"data:\n\n"[..]));
        assert!(each.is_due());
        each.sends_back = true;
        let back = [&[0x22, 15, 0x0A, 13, 0x1A, 11, 0x1A, 9][..], &MESSAGE[2..]].concat();
        assert_eq!(each.answer(&MESSAGE, 5, 100), Some(back));
    }

    #[test]
    fn whatever_else_there_is_is_left_to_others() {
        for message in [
            &[][..],
            &[0x2A, 0],
            &[0x2A, 2, 0x0A, 0],                  // an empty piece
            &[0x2A, 5, 0x0A, 1, 65, 16, 1],       // the last piece
            &[0x22, 3, 0x0A, 1, 65],              // of a request
            &[0x2A, 3, 0x0A, 1, 65, 0x5A, 0],     // a configuration
            &[0x2A, 3, 0x0A, 1, 65, 0x2A, 0],     // two bodies
            &[0x2A, 6, 0x0A, 1, 65, 0x0A, 1, 65], // two pieces
            &[0x2A, 3, 0x0A, 1, 65, 0x42, 1],     // cut off
        ] {
            assert_eq!(stream().answer(message, 5, 100), None, "{message:?}");
        }
        assert_eq!(stream().answer(&MESSAGE, 5, 3), None);
        assert_eq!(PassedStream { most_sent: 8, ..stream() }.answer(&MESSAGE, 5, 100), None);
        assert_eq!(PassedStream { is_held: true, ..stream() }.answer(&MESSAGE, 5, 100), None);
        assert_eq!(PassedStream { hidden: vec![b"ata".into()], ..stream() }.answer(&MESSAGE, 5, 100), None);
        assert!(PassedStream { hidden: vec![b"atb".into()], ..stream() }.answer(&MESSAGE, 5, 100).is_some());
    }
}
