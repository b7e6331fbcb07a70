//! Reads the messages of call streams that have only calls or only responses, as nearly all do, and writes them.

use crate::wire::{Fields, Value, Writer};

/// The kind of a response that is a failure.
const FAILED: i32 = 4;

/// Upper bound of the bytes of an item besides its request or response, and its trace context.
const ITEM_BYTES: usize = 64;

/// Number, method, request, more, time left and trace context of a `CallRequest`.
pub type Call<'a> = (u64, u32, &'a [u8], bool, Option<u32>, &'a str);

/// The responses of an `OpenCallStreamResponse`: whole ones by number, and others by number and kind.
pub type Responses<'a> = (Vec<(u64, &'a [u8])>, Vec<(u64, i32, &'a [u8])>);

/// Calls of an encoded `OpenCallStreamRequest` that has nothing else. None if it has anything else, has no calls, is
/// encoded in an unusual way or is malformed.
pub fn calls_only(message: &[u8]) -> Option<Vec<Call<'_>>> {
    let mut calls = Vec::new();
    let mut fields = Fields::new(message);
    while let Some(field) = fields.next().ok()? {
        let (3, Value::Bytes(call)) = field else { return None };
        calls.push(read_call(call)?);
    }
    (!calls.is_empty()).then_some(calls)
}

fn read_call(message: &[u8]) -> Option<Call<'_>> {
    let mut call: Call<'_> = Default::default();
    let mut fields = Fields::new(message);
    while let Some(field) = fields.next().ok()? {
        match field {
            (1, Value::Varint(number)) => call.0 = number,
            (2, Value::Varint(method)) => call.1 = method as u32,
            (3, Value::Bytes(request)) => call.2 = request,
            (4, Value::Varint(more)) => call.3 = more != 0,
            (5, Value::Varint(milliseconds)) => call.4 = Some(milliseconds as u32),
            (6, Value::Bytes(text)) => call.5 = str::from_utf8(text).ok()?,
            _ => return None,
        }
    }
    Some(call)
}

/// Responses of an encoded `OpenCallStreamResponse` that has nothing else and no failure. None if it has anything else,
/// has no responses, is encoded in an unusual way or is malformed.
pub fn responses_only(message: &[u8]) -> Option<Responses<'_>> {
    let (mut whole, mut others) = Responses::default();
    let mut numbers = Fields::new(&[]);
    let mut has_numbers = false;
    let mut fields = Fields::new(message);
    while let Some(field) = fields.next().ok()? {
        match field {
            (2, Value::Bytes(response)) => others.push(read_response(response)?),
            (5, Value::Bytes(packed)) if !has_numbers => (numbers, has_numbers) = (Fields::new(packed), true),
            (6, Value::Bytes(response)) => whole.push((numbers.packed().ok()??, response)),
            _ => return None,
        }
    }
    let is_empty = whole.is_empty() && others.is_empty();
    (numbers.packed().ok()?.is_none() && !is_empty).then_some((whole, others))
}

fn read_response(message: &[u8]) -> Option<(u64, i32, &[u8])> {
    let (mut number, mut kind, mut response) = (0, 0, &[][..]);
    let mut fields = Fields::new(message);
    while let Some(field) = fields.next().ok()? {
        match field {
            (1, Value::Varint(value)) => number = value,
            (2, Value::Bytes(value)) => response = value,
            (3, Value::Varint(value)) if value as i32 != FAILED => kind = value as i32,
            _ => return None,
        }
    }
    Some((number, kind, response))
}

/// Adds a call to an encoded `OpenCallStreamRequest`.
pub fn write_call(message: &mut Writer, call: Call<'_>) {
    let (number, method, request, more, time_left_ms, trace_context) = call;
    let mut item = Writer(Vec::with_capacity(request.len() + trace_context.len() + ITEM_BYTES));
    item.varint(1, number);
    item.varint(2, method.into());
    if !request.is_empty() {
        item.bytes(3, request);
    }
    item.varint(4, more.into());
    if let Some(milliseconds) = time_left_ms {
        item.raw_varint(5 << 3);
        item.raw_varint(milliseconds.into());
    }
    if !trace_context.is_empty() {
        item.bytes(6, trace_context.as_bytes());
    }
    message.bytes(3, &item.0);
}

/// Adds a response that is not whole to an encoded `OpenCallStreamResponse`. That of a failure is an encoded
/// `CallFailure`.
pub fn write_response(message: &mut Writer, number: u64, kind: i32, response: &[u8]) {
    let mut item = Writer(Vec::with_capacity(response.len() + ITEM_BYTES));
    item.varint(1, number);
    if kind != FAILED && !response.is_empty() {
        item.bytes(2, response);
    }
    item.varint(3, kind as u64);
    if kind == FAILED {
        item.bytes(4, response);
    }
    message.bytes(2, &item.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_read_in_order() {
        let message = [18, 7, 8, 9, 18, 1, 65, 24, 1, 42, 3, 7, 0x80, 1, 50, 1, 66, 50, 0];
        let expected: Responses<'_> = (vec![(7, b"B"), (128, b"")], vec![(9, 1, b"A")]);
        assert_eq!(responses_only(&message), Some(expected));
    }

    #[test]
    fn messages_with_anything_else_are_left_to_others() {
        for message in [
            &[][..],
            &[10, 0],                       // a hello
            &[32, 1],                       // a pong
            &[26, 0],                       // the end of new calls
            &[42, 1, 7, 50, 0, 32, 1],      // a pong after a response
            &[42, 2, 7, 8, 50, 0],          // fewer responses than numbers
            &[42, 1, 7, 50, 0, 50, 0],      // more
            &[42, 1, 7, 50, 0, 42, 1, 8],   // numbers in two parts
            &[40, 7, 50, 0],                // numbers that are not packed
            &[50, 0, 42, 1, 7],             // numbers after their responses
            &[42, 1, 0x80, 50, 0],          // a number without an end
            &[18, 4, 8, 9, 34, 0],          // a failure
            &[18, 4, 8, 9, 24, 4],          // the same without details
            &[18, 3, 8, 9],                 // cut off
            &[18, 4, 8, 9, 40, 0],          // a field that is not defined
            &[42, 1, 7, 50, 0, 0x80, 1, 0], // another one
        ] {
            assert_eq!(responses_only(message), None, "{message:?}");
        }
    }

    #[test]
    fn calls_are_read_with_all_their_fields() {
        let message = [26, 14, 8, 9, 16, 2, 26, 1, 65, 32, 1, 40, 7, 50, 1, 97, 26, 0];
        let call: Call<'_> = (9, 2, b"A", true, Some(7), "a");
        assert_eq!(calls_only(&message), Some(vec![call, Default::default()]));
        for message in [&[][..], &[26, 0, 32, 1], &[26, 0, 18, 1, 1], &[26, 3, 50, 1, 0xFF], &[26, 2, 56, 0], &[26, 1]]
        {
            assert_eq!(calls_only(message), None, "{message:?}");
        }
    }
}
