//! Reads whole messages of the NATS protocol, as nearly all that a client receives are.

/// Digits of a number that is read. Longer ones are left to others.
const MAX_DIGITS: usize = 9;

/// Id of the subscription, subject, reply subject, content and headers.
pub type Message<'a> = (usize, &'a [u8], &'a [u8], &'a [u8], Option<&'a [u8]>);

/// Returns the messages at the beginning of an input, up to anything else, and where each ends.
pub fn whole_messages(input: &[u8]) -> Vec<(usize, Message<'_>)> {
    let mut messages = Vec::new();
    let mut at = 0;
    while let Some((end, message)) = input.get(at..).and_then(first_message) {
        at += end;
        messages.push((at, message));
    }
    messages
}

fn first_message(input: &[u8]) -> Option<(usize, Message<'_>)> {
    let line_end = input.windows(2).position(|pair| pair == b"\r\n")?;
    let line = input.get(..line_end)?;
    let fields: Vec<&[u8]> =
        line.split(|byte| matches!(byte, b' ' | 9..=13)).filter(|field| !field.is_empty()).collect();
    let [subject, id, reply, header_bytes, bytes]: [&[u8]; 5] = match *fields {
        [b"MSG", subject, id, bytes] => [subject, id, b"", b"0", bytes],
        [b"MSG", subject, id, reply, bytes] => [subject, id, reply, b"0", bytes],
        [b"HMSG", subject, id, header_bytes, bytes] => [subject, id, b"", header_bytes, bytes],
        [b"HMSG", subject, id, reply, header_bytes, bytes] => [subject, id, reply, header_bytes, bytes],
        _ => return None,
    };
    let begin = line_end + 2;
    let (content, end) = (begin + number(header_bytes)?, begin + number(bytes)?);
    (end + 2 <= input.len()).then_some(())?;
    let headers = input.get(begin..content).filter(|headers| !headers.is_empty());
    Some((end + 2, (number(id)?, subject, reply, input.get(content..end)?, headers)))
}

fn number(digits: &[u8]) -> Option<usize> {
    let is_read = digits.len() <= MAX_DIGITS && digits.iter().all(u8::is_ascii_digit);
    is_read.then(|| digits.iter().fold(0, |number, digit| 10 * number + usize::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_up_to_anything_else() {
        let input = b"MSG a 7 2\r\nxy\r\nHMSG b 8 r 3 4\r\nh\r\nz\r\nPING\r\n";
        let expected: [(usize, Message<'_>); 2] =
            [(15, (7, b"a", b"", b"xy", None)), (37, (8, b"b", b"r", b"z", Some(b"h\r\n")))];
        assert_eq!(whole_messages(input), expected);
        assert_eq!(whole_messages(&input[..36]), expected[..1]);
        assert_eq!(whole_messages(b"MSG a +7 2\r\nxy\r\n"), []);
        assert_eq!(whole_messages(b"HMSG a 7 3 2\r\nxyz\r\n"), []);
    }
}
