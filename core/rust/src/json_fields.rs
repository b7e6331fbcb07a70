//! What makes a JSON text ambiguous: two parsers may read two different values where an object has a field twice.

use std::borrow::Cow;
use std::collections::HashSet;

use crate::json_tokens::{find, skip_space};

/// Deepest nesting of a text. Parsers of Python end at about 1,000.
pub const MAX_DEPTH: usize = 1000;
/// Most fields of one object.
pub const MAX_FIELDS: usize = 65_536;
/// Fields up to which comparing with each is faster than a set.
const FEW: usize = 16;
/// Bytes of a name that a description has.
const SHOWN: usize = 64;

/// The names of an object, without escapes.
#[derive(Default)]
struct Names<'a> {
    few: Vec<Cow<'a, [u8]>>,
    many: HashSet<Cow<'a, [u8]>>,
}

impl<'a> Names<'a> {
    /// Adds a name. Returns false if it is there already.
    fn add(&mut self, name: Cow<'a, [u8]>) -> bool {
        if self.few.contains(&name) || self.many.contains(&name) {
            return false;
        }
        if self.few.len() < FEW {
            self.few.push(name);
        } else {
            self.many.insert(name);
        }
        true
    }
}

/// Describes why a valid JSON text cannot be passed on; None if it can. An invalid text is not described.
pub fn flaw(text: &[u8]) -> Option<String> {
    let mut open: Vec<Option<Names>> = Vec::new();
    let mut rest = text;
    while let Some(at) = find(rest, [b'"', b'{', b'}', b'[', b']']) {
        let (mark, after) = rest.get(at..)?.split_first()?;
        rest = after;
        match mark {
            b'"' => {
                let (content, escaped) = string(rest)?;
                rest = rest.get(content.len() + 1..)?;
                let Some(Some(names)) = open.last_mut() else { continue };
                if !matches!(skip_space(rest), [b':', ..]) {
                    continue;
                }
                let name = if escaped { Cow::Owned(unescaped(content)) } else { Cow::Borrowed(content) };
                if names.many.len() + names.few.len() >= MAX_FIELDS {
                    return Some(format!("an object has more than {MAX_FIELDS} fields"));
                }
                if !names.add(name) {
                    let shown = String::from_utf8_lossy(content.get(..SHOWN.min(content.len()))?).into_owned();
                    return Some(format!("an object has the field \"{shown}\" twice"));
                }
            }
            b'{' | b'[' => {
                if open.len() == MAX_DEPTH {
                    return Some(format!("nested more than {MAX_DEPTH} deep"));
                }
                open.push((*mark == b'{').then(Names::default));
            }
            _ => drop(open.pop()),
        }
    }
    None
}

/// The content of a string from after its first quotation mark, and whether it has escapes. None if it does not end.
fn string(text: &[u8]) -> Option<(&[u8], bool)> {
    let (mut end, mut escaped) = (0, false);
    loop {
        end += find(text.get(end..)?, [b'"', b'\\'])?;
        if text.get(end) == Some(&b'"') {
            return Some((text.get(..end)?, escaped));
        }
        escaped = true;
        end += 2;
    }
}

/// A name without its escapes. The two halves of a pair become three bytes each, so that each name has one form.
fn unescaped(content: &[u8]) -> Vec<u8> {
    // A character outside of the basic plane is written as its pair, as its escape may be.
    let mut name = Vec::with_capacity(content.len());
    let mut rest = content;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'\\' {
            name.push(*byte);
            continue;
        }
        let Some((escape, after)) = rest.split_first() else { break };
        rest = after;
        match escape {
            b'u' => {
                let Some((mut code, after)) = hex(rest) else { break };
                rest = after;
                if let (0xd800..=0xdbff, [b'\\', b'u', low @ ..]) = (code, rest)
                    && let Some((low @ 0xdc00..=0xdfff, after)) = hex(low)
                {
                    code = 0x1_0000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    rest = after;
                }
                match char::from_u32(code) {
                    Some(character) => name.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
                    // Half of a pair, which UTF-8 cannot have, so no other name is like it.
                    None => name.extend_from_slice(&[0xff, (code >> 8) as u8, code as u8]),
                }
            }
            b'b' => name.push(8),
            b'f' => name.push(12),
            b'n' => name.push(b'\n'),
            b'r' => name.push(b'\r'),
            b't' => name.push(b'\t'),
            other => name.push(*other),
        }
    }
    name
}

fn hex(text: &[u8]) -> Option<(u32, &[u8])> {
    let (digits, rest) = text.split_at_checked(4)?;
    let code = u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    Some((code, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_an_object_has_twice_is_named() {
        for text in [
            r#"{"a":1,"a":2}"#,
            r#"{"b":1,"a":[{"x":1}], "a" : 2}"#,
            r#"[{"b":{"a":"","c":[],"a":{}}}]"#,
            r#"{"a":1,"\u0061":2}"#,
            r#"{"\ud83d\ude42":1,"🙂":2,"a":1,"a":1}"#,
        ] {
            assert!(flaw(text.as_bytes()).is_some_and(|found| found.contains("twice")), "{text}");
        }
    }

    #[test]
    fn other_texts_have_no_flaw() {
        for text in [
            "",
            "[1,2,3]",
            r#"{"a":{"a":{"a":"a"}},"b":["a","a",{"a":1},{"a":1}]}"#,
            r#"{"a":"\"a\":1,\"a\":2","b\"":1,"b":2}"#,
            r#"{"a":"x","b":"a","c":"a"}"#,
            r#"{"\ud83d":1,"\ude42":2}"#,
        ] {
            assert_eq!(flaw(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn depth_and_number_of_fields_are_bounded() {
        assert!(flaw("[".repeat(MAX_DEPTH + 1).as_bytes()).is_some_and(|found| found.contains("deep")));
        assert_eq!(flaw("[".repeat(MAX_DEPTH).as_bytes()), None);
        let fields = |count: usize| (0..count).map(|n| format!("\"{n}\":1")).collect::<Vec<_>>().join(",");
        assert_eq!(flaw(format!("{{{}}}", fields(MAX_FIELDS)).as_bytes()), None);
        assert!(flaw(format!("{{{}}}", fields(MAX_FIELDS + 1)).as_bytes()).is_some_and(|found| found.contains("more")));
    }
}
