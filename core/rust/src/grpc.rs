//! Reads gRPC messages from HTTP/2 frames that contain only whole messages, as nearly all do, and writes such frames.

pub const FRAME_HEADER_BYTES: usize = 9;
pub const MESSAGE_HEADER_BYTES: usize = 5;
/// Size of a frame's payload that every peer accepts.
pub const MAX_FRAME_BYTES: usize = 1 << 14;

/// The messages at the beginning of an input, and the frames that they take.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Messages<'a> {
    /// Stream of the frames.
    pub stream: u32,
    pub messages: Vec<&'a [u8]>,
    /// Number of frames whose payload is short.
    pub short_frames: usize,
    /// Size of the payloads.
    pub payload_bytes: usize,
    /// Size of the frames.
    pub bytes: usize,
}

/// Returns the messages at the beginning of an input, up to the first frame that must be read in another way: one that
/// is incomplete, is no DATA frame of the stream of the first one, has a flag, or contains anything but whole, uncompressed
/// messages.
pub fn whole_messages(input: &[u8], short_bytes: usize) -> Messages<'_> {
    let mut read = Messages::default();
    while let Some((stream, payload)) = input.get(read.bytes..).and_then(data) {
        let before = read.messages.len();
        if (read.bytes > 0 && stream != read.stream) || !split(payload, &mut read.messages) {
            read.messages.truncate(before);
            break;
        }
        read.stream = stream;
        read.short_frames += usize::from(payload.len() < short_bytes);
        read.payload_bytes += payload.len();
        read.bytes += FRAME_HEADER_BYTES + payload.len();
    }
    read
}

/// Returns stream and payload of the first frame if it is whole, and is data without any flag.
pub fn data(input: &[u8]) -> Option<(u32, &[u8])> {
    let (header, rest) = input.split_first_chunk::<FRAME_HEADER_BYTES>()?;
    let [high, middle, low, kind, flags, number @ ..] = *header;
    let size = u32::from_be_bytes([0, high, middle, low]) as usize;
    (kind == 0 && flags == 0 && size <= MAX_FRAME_BYTES).then_some(())?;
    Some((u32::from_be_bytes(number) & !(1 << 31), rest.get(..size)?))
}

/// Adds the messages of a payload. Returns whether there are any, and nothing else.
fn split<'a>(mut payload: &'a [u8], messages: &mut Vec<&'a [u8]>) -> bool {
    let has_any = !payload.is_empty();
    while let Some((&[compressed, size @ ..], rest)) = payload.split_first_chunk::<MESSAGE_HEADER_BYTES>() {
        let size = u32::from_be_bytes(size) as usize;
        if compressed != 0 || size > rest.len() {
            return false;
        }
        let (message, others) = rest.split_at(size);
        messages.push(message);
        payload = others;
    }
    has_any && payload.is_empty()
}

/// Returns the message of a payload that has one, uncompressed, and nothing else.
pub fn only_message(payload: &[u8]) -> Option<&[u8]> {
    let (&[compressed, size @ ..], message) = payload.split_first_chunk::<MESSAGE_HEADER_BYTES>()?;
    (compressed == 0 && u32::from_be_bytes(size) as usize == message.len()).then_some(message)
}

/// Adds a frame with one message, which must fit, of a stream.
pub fn write_message(frames: &mut Vec<u8>, stream: u32, message: &[u8]) {
    let size = message.len() as u32;
    let [_, high, middle, low] = (size + MESSAGE_HEADER_BYTES as u32).to_be_bytes();
    frames.extend_from_slice(&[high, middle, low, 0, 0]);
    frames.extend_from_slice(&stream.to_be_bytes());
    frames.push(0);
    frames.extend_from_slice(&size.to_be_bytes());
    frames.extend_from_slice(message);
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: [u8; 16] = [0, 0, 7, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2, 65, 66];

    #[test]
    fn messages_are_read_up_to_the_first_other_frame() {
        let two = [&FRAME[..], &[0, 0, 10, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9]].concat();
        let read = whole_messages(&two, 10);
        let messages: [&[u8]; 3] = [b"AB", b"", b""];
        let expected = Messages { stream: 1, messages: messages.into(), short_frames: 1, payload_bytes: 17, bytes: 35 };
        assert_eq!(read, expected);
        let other = [&two[..16], &two[..8], &[3], &two[9..]].concat();
        assert_eq!(whole_messages(&other, 10).bytes, 16);
    }

    #[test]
    fn frames_with_anything_else_are_left_to_others() {
        for (position, value) in [(3, 8), (4, 1), (2, 8), (2, 6), (2, 0), (9, 1), (13, 1), (13, 3), (0, 1)] {
            let mut frame = FRAME;
            frame[position] = value;
            assert_eq!(whole_messages(&frame, 10), Messages::default(), "{position}");
        }
    }
}
