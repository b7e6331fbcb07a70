//! Reads chunks of an HTTP/1.1 body that have server-sent events, without a parser's state.

const EVENT_END: &[u8] = b"\n\n";
const CHUNK_END: &[u8] = b"\r\n";
const DATA: &[u8] = b"data:";
const USAGE: &[u8] = b"\"usage\"";
const NULL: &[u8] = b"null";
/// Digits of the size of a chunk.
const MAX_DIGITS: usize = 8;

/// Returns for how many tokens events stand, one for each, if `bytes` are whole chunks of which each has whole events.
/// None for anything else, and if there is a usage: somebody must read that.
pub fn count_tokens(bytes: &[u8]) -> Option<u64> {
    let (mut rest, mut tokens) = (bytes, 0);
    while !rest.is_empty() {
        let (events, after) = split_chunk(rest)?;
        if !events.ends_with(EVENT_END) {
            return None;
        }
        tokens += count_events(events)?;
        rest = after;
    }
    Some(tokens)
}

/// Returns the data of the first chunk, and the bytes after it.
fn split_chunk(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let digits = bytes.iter().take(MAX_DIGITS).take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (size, rest) = bytes.split_at_checked(digits)?;
    let size = usize::from_str_radix(str::from_utf8(size).ok()?, 16).ok()?;
    let (data, rest) = rest.strip_prefix(CHUNK_END)?.split_at_checked(size)?;
    Some((data, rest.strip_prefix(CHUNK_END)?))
}

/// Returns the number of events that have data; None if there is a usage.
fn count_events(events: &[u8]) -> Option<u64> {
    let mut count = 0;
    for (at, byte) in events.iter().enumerate() {
        let is_data = *byte == b'd';
        if !is_data && *byte != b'"' {
            continue;
        }
        let text = events.get(at..)?;
        if is_data {
            count += u64::from(text.starts_with(DATA));
        } else if let Some(after) = text.strip_prefix(USAGE) {
            let value = after.trim_ascii_start().strip_prefix(b":")?;
            if !value.trim_ascii_start().starts_with(NULL) {
                return None;
            }
        }
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(data: &str) -> String {
        format!("{:x}\r\n{data}\r\n", data.len())
    }

    #[test]
    fn events_in_whole_chunks_are_counted() {
        let both = chunk("data: {\"usage\" : null}\n\n")
            + &chunk(": comment\n\ndata: 1\n\n").to_uppercase().replace("DATA", "data");
        assert_eq!(count_tokens(both.as_bytes()), Some(2));
        assert_eq!(count_tokens(b""), Some(0));
    }

    #[test]
    fn whatever_else_there_is_is_left_to_others() {
        let event = chunk("data: {}\n\n");
        for bytes in [
            event.trim_end().to_owned(),
            format!("{event}1"),
            format!("+{event}"),
            format!("00000000{event}"),
            event.replacen("\r\n", ";a=b\r\n", 1),
            chunk("data: {}"),
            chunk(""),
            chunk("data: {\"usage\":{}}\n\n"),
            chunk("data: {\"usage\"\n\n"),
        ] {
            assert_eq!(count_tokens(bytes.as_bytes()), None, "{bytes:?}");
        }
    }
}
