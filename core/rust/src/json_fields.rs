//! Finds values in JSON texts, and what makes a text ambiguous: two parsers may read two different values where an object
//! has a field twice.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;

use crate::json_tokens::{find_by, skip_space};

/// Deepest nesting of a text. Parsers of Python end at about 1,000.
pub const MAX_DEPTH: usize = 1000;
/// Deepest nesting of a text whose values are found here: parsers of Python that are called deeply end before 1,000.
pub const MAX_SPLIT_DEPTH: usize = 100;
/// Most fields of one object.
pub const MAX_FIELDS: usize = 65_536;
/// Fields up to which comparing with each is faster than a set.
const FEW: usize = 16;
/// Bytes of a name that a description has.
const SHOWN: usize = 64;
/// How the URL of an image begins.
const DATA_URL: &[u8] = b"data:";

/// The names of an object, without escapes.
#[derive(Default)]
struct Names<'a> {
    few: Vec<Cow<'a, [u8]>>,
    many: HashSet<Cow<'a, [u8]>>,
}

impl<'a> Names<'a> {
    /// Adds a name, which is written as `shown`.
    fn add(&mut self, name: Cow<'a, [u8]>, shown: &[u8]) -> Result<(), Fault> {
        if self.many.len() + self.few.len() >= MAX_FIELDS {
            return Err(Fault::Flaw(format!("an object has more than {MAX_FIELDS} fields")));
        }
        if self.few.contains(&name) || self.many.contains(&name) {
            let shown = String::from_utf8_lossy(shown.get(..SHOWN).unwrap_or(shown));
            return Err(Fault::Flaw(format!("an object has the field \"{shown}\" twice")));
        }
        if self.few.len() < FEW {
            self.few.push(name);
        } else {
            self.many.insert(name);
        }
        Ok(())
    }
}

/// Why a text is refused.
enum Fault {
    Invalid,
    /// It cannot be passed on, although it is valid.
    Flaw(String),
}

/// The values of some fields of an object.
#[derive(Debug, PartialEq, Eq)]
pub struct Values {
    /// Where the value of each is; empty for a field that is missing.
    pub ranges: Vec<Range<usize>>,
    /// Whether `"data:` is anywhere in the text.
    pub has_data_url: bool,
}

/// Describes why a valid JSON text cannot be passed on; None if it can. An invalid text is not described.
pub fn flaw(text: &[u8]) -> Option<String> {
    match walk(text, &[], MAX_DEPTH) {
        Err(Fault::Flaw(described)) => Some(described),
        _ => None,
    }
}

/// Finds the values of fields in a JSON object; None if the text is no object, is nested deeply, or cannot be passed on.
pub fn find_values(text: &[u8], fields: &[&[u8]]) -> Option<Values> {
    walk(text, fields, MAX_SPLIT_DEPTH).ok().filter(|_| skip_space(text).starts_with(b"{"))
}

/// Reads a whole text: the grammar of JSON, in which `\\u` cannot name half of a pair. UTF-8 is not checked.
fn walk(text: &[u8], fields: &[&[u8]], max_depth: usize) -> Result<Values, Fault> {
    let mut values = Values { ranges: vec![0..0; fields.len()], has_data_url: false };
    let mut open: Vec<Option<Names>> = Vec::new();
    let mut found: Option<usize> = None;
    let mut rest = skip_space(text);
    loop {
        // At a value, or at the end of what has just begun.
        let mut is_next = match rest {
            [begin @ (b'{' | b'['), after @ ..] => {
                if open.len() == max_depth {
                    return Err(Fault::Flaw(format!("nested more than {max_depth} deep")));
                }
                open.push((*begin == b'{').then(Names::default));
                rest = skip_space(after);
                !matches!(rest, [b'}' | b']', ..])
            }
            [b'"', after @ ..] => {
                rest = string(after, &mut values.has_data_url).ok_or(Fault::Invalid)?.2;
                false
            }
            _ => {
                rest = scalar(rest).ok_or(Fault::Invalid)?;
                false
            }
        };
        while !is_next {
            if open.len() == 1
                && let Some(range) = found.take().and_then(|at| values.ranges.get_mut(at))
            {
                range.end = text.len() - rest.len();
            }
            rest = skip_space(rest);
            (rest, is_next) = match (rest, open.last()) {
                ([], None) => return Ok(values),
                ([b',', after @ ..], Some(_)) => (skip_space(after), true),
                ([b'}', after @ ..], Some(Some(_))) | ([b']', after @ ..], Some(None)) => {
                    open.pop();
                    (after, false)
                }
                _ => return Err(Fault::Invalid),
            };
        }
        let depth = open.len();
        let Some(Some(names)) = open.last_mut() else { continue };
        let [b'"', quoted @ ..] = rest else { return Err(Fault::Invalid) };
        let (content, escaped, after) = string(quoted, &mut values.has_data_url).ok_or(Fault::Invalid)?;
        let [b':', after @ ..] = skip_space(after) else { return Err(Fault::Invalid) };
        rest = skip_space(after);
        let name = if escaped { Cow::Owned(unescaped(content)) } else { Cow::Borrowed(content) };
        if depth == 1 {
            found = fields.iter().position(|field| *field == &*name);
            if let Some(range) = found.and_then(|at| values.ranges.get_mut(at)) {
                range.start = text.len() - rest.len();
            }
        }
        names.add(name, content)?;
    }
}

/// The content of a string from after its first quotation mark, whether it has escapes, and what follows it. None if it
/// is invalid.
fn string<'a>(text: &'a [u8], has_data_url: &mut bool) -> Option<(&'a [u8], bool, &'a [u8])> {
    let is_mark = |byte: &u8| u8::from(*byte == b'"') | u8::from(*byte == b'\\') | u8::from(*byte < b' ');
    let (mut end, mut escaped) = (0, false);
    *has_data_url |= text.starts_with(DATA_URL);
    loop {
        end += find_by(text.get(end..)?, is_mark)?;
        end += match text.get(end..)? {
            [b'"', after @ ..] => return Some((text.get(..end)?, escaped, after)),
            [b'\\', b'u', digits @ ..] => match hex(digits)? {
                (0xdc00..=0xdfff, _) => return None,
                (0xd800..=0xdbff, [b'\\', b'u', low @ ..]) if matches!(hex(low)?, (0xdc00..=0xdfff, _)) => 12,
                (0xd800..=0xdbff, _) => return None,
                _ => 6,
            },
            [b'\\', b'"', after @ ..] => {
                *has_data_url |= after.starts_with(DATA_URL);
                2
            }
            [b'\\', b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', ..] => 2,
            _ => return None,
        };
        escaped = true;
    }
}

/// What follows a number or a literal. None if it is invalid.
fn scalar(text: &[u8]) -> Option<&[u8]> {
    if let Some(rest) = [&b"true"[..], b"false", b"null"].iter().find_map(|literal| text.strip_prefix(*literal)) {
        return Some(rest);
    }
    let mut rest = match text.strip_prefix(b"-").unwrap_or(text) {
        [b'0', after @ ..] => after,
        begun => digits(begun)?,
    };
    if let [b'.', after @ ..] = rest {
        rest = digits(after)?;
    }
    if let [b'e' | b'E', b'+' | b'-', after @ ..] | [b'e' | b'E', after @ ..] = rest {
        rest = digits(after)?;
    }
    Some(rest)
}

/// What follows one or more digits.
fn digits(text: &[u8]) -> Option<&[u8]> {
    let count = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if count == 0 { None } else { text.get(count..) }
}

/// A valid name without its escapes.
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
                let character = char::from_u32(code).unwrap_or_default();
                name.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
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
    let (digits, rest) = text.split_at_checked(4).filter(|(digits, _)| digits.iter().all(u8::is_ascii_hexdigit))?;
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
    fn values_of_an_object_are_found() {
        let text = r#" {"a": [1, {"b": "]\""}] ,"\u0062" :-1.5e+3,"c":"data","d":{"b":{}}} "#;
        let found = find_values(text.as_bytes(), &[b"b", b"a", b"e", b"d"]).unwrap();
        let shown: Vec<&str> = found.ranges.into_iter().map(|range| &text[range]).collect();
        assert_eq!(shown, ["-1.5e+3", r#"[1, {"b": "]\""}]"#, "", r#"{"b":{}}"#]);
        for (text, has_data_url) in [
            (r#"{"a":"data:"}"#, true),
            (r#"{"a":"x\"data:"}"#, true),
            (r#"{"data:":[]}"#, true),
            (r#"{"a":"x data:"}"#, false),
            (r#"{"a":"\u0022data:"}"#, false),
        ] {
            assert_eq!(find_values(text.as_bytes(), &[]).map(|found| found.has_data_url), Some(has_data_url), "{text}");
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
