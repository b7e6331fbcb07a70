//! Reads gRPC messages from HTTP/2 frames that contain only whole messages, as nearly all of a call stream do.

const FRAME_HEADER_BYTES: usize = 9;
const MESSAGE_HEADER_BYTES: usize = 5;
/// Size of a frame's payload that every peer accepts.
const MAX_FRAME_BYTES: usize = 1 << 14;

/// The messages at the beginning of an input, and the frames that they take.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Messages<'a> {
    pub messages: Vec<&'a [u8]>,
    /// Number of frames whose payload is short.
    pub short_frames: usize,
    /// Size of the payloads.
    pub payload_bytes: usize,
    /// Size of the frames.
    pub bytes: usize,
}

/// Returns the messages at the beginning of an input, up to the first frame that must be read in another way: one that
/// is incomplete, is no DATA frame of the stream, has a flag, or contains anything but whole, uncompressed messages of at
/// most `max_message_bytes`.
pub fn whole_messages(input: &[u8], stream: u32, max_message_bytes: usize, short_bytes: usize) -> Messages<'_> {
    let mut read = Messages::default();
    while let Some(payload) = input.get(read.bytes..).and_then(|rest| data_of(rest, stream)) {
        let before = read.messages.len();
        if !split(payload, max_message_bytes, &mut read.messages) {
            read.messages.truncate(before);
            break;
        }
        read.short_frames += usize::from(payload.len() < short_bytes);
        read.payload_bytes += payload.len();
        read.bytes += FRAME_HEADER_BYTES + payload.len();
    }
    read
}

/// Returns the payload of the first frame if it is whole, and is data of a stream without any flag.
fn data_of(input: &[u8], stream: u32) -> Option<&[u8]> {
    let (header, rest) = input.split_first_chunk::<FRAME_HEADER_BYTES>()?;
    let [high, middle, low, kind, flags, number @ ..] = *header;
    let size = u32::from_be_bytes([0, high, middle, low]) as usize;
    let is_data = kind == 0 && flags == 0 && u32::from_be_bytes(number) & !(1 << 31) == stream;
    (is_data && size <= MAX_FRAME_BYTES).then_some(())?;
    rest.get(..size)
}

/// Adds the messages of a payload. Returns whether there are any, and nothing else.
fn split<'a>(mut payload: &'a [u8], max_bytes: usize, messages: &mut Vec<&'a [u8]>) -> bool {
    let has_any = !payload.is_empty();
    while let Some((&[compressed, size @ ..], rest)) = payload.split_first_chunk::<MESSAGE_HEADER_BYTES>() {
        let size = u32::from_be_bytes(size) as usize;
        if compressed != 0 || size > max_bytes || size > rest.len() {
            return false;
        }
        let (message, others) = rest.split_at(size);
        messages.push(message);
        payload = others;
    }
    has_any && payload.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: [u8; 16] = [0, 0, 7, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2, 65, 66];

    #[test]
    fn messages_are_read_up_to_the_first_other_frame() {
        let two = [&FRAME[..], &[0, 0, 10, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9]].concat();
        let read = whole_messages(&two, 1, 100, 10);
        let expected: [&[u8]; 3] = [b"AB", b"", b""];
        assert_eq!((read.messages, read.short_frames, read.payload_bytes, read.bytes), (expected.into(), 1, 17, 35));
    }

    #[test]
    fn frames_with_anything_else_are_left_to_others() {
        for (position, value) in [(3, 8), (4, 1), (8, 3), (2, 8), (2, 6), (2, 0), (9, 1), (13, 1), (13, 3), (0, 1)] {
            let mut frame = FRAME;
            frame[position] = value;
            assert_eq!(whole_messages(&frame, 1, 100, 10), Messages::default(), "{position}");
        }
        assert_eq!(whole_messages(&FRAME, 1, 1, 10), Messages::default());
    }
}
