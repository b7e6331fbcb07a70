"""Token ids as JSON arrays, for every implementation."""

from __future__ import annotations

import contextlib
import json
import struct
from types import ModuleType

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import NotATokenId

from .conftest import implementation

IMPLEMENTATIONS = ["reference", "native"]
TOKENS = st.lists(st.integers(0, (1 << 32) - 1))


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def core(request: pytest.FixtureRequest) -> ModuleType:
    return implementation(request.param, "tokens_from_json")


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


@given(TOKENS, st.sampled_from([None, 1]), st.sampled_from([", ", ",", " ,\t\r\n"]))
def test_an_array_is_read_and_written(core: ModuleType, tokens: list[int], indent: int | None, comma: str) -> None:
    text = json.dumps(tokens, indent=indent, separators=(comma, ":")).encode()
    assert core.tokens_from_json(text, 1000) == packed(tokens)
    assert core.tokens_from_json(memoryview(bytearray(text)), 1000) == packed(tokens)
    assert core.tokens_to_json(packed(tokens)) == json.dumps(tokens, separators=(",", ":")).encode()
    assert core.tokens_to_json(tokens) == json.dumps(tokens, separators=(",", ":")).encode()


@given(TOKENS.filter(bool), st.integers(0, 10))
def test_reading_stops_after_one_token_more_than_the_limit(core: ModuleType, tokens: list[int], limit: int) -> None:
    assert core.tokens_from_json(json.dumps(tokens).encode(), limit) == packed(tokens[: limit + 1])


@pytest.mark.parametrize(
    ("text", "index"),
    [
        (b"", 0),
        (b"7", 0),
        (b"[", 0),
        (b"[]]", 0),
        (b"[,]", 0),
        (b"[1", 0),
        (b"[1,", 1),
        (b"[1,]", 1),
        (b"[1,-1]", 1),
        (b"[1,-0]", 1),
        (b"[1,+2]", 1),
        (b"[1,01]", 1),
        (b"[1,2.0]", 1),
        (b"[1,2e0]", 1),
        (b"[1 2]", 0),
        (b"[1,4294967296]", 1),
        (b"[1," + b"9" * 40 + b"]", 1),
        (b"[1,18446744073709551617]", 1),
        (b"[1,true]", 1),
        (b'[1,"2"]', 1),
        (b'["1,2"]', 0),
        (b"[1,[2]]", 1),
        (b"[1,2] 3", 1),
        (b"[1,\xc2\xa02]", 1),
        (b"[1,\x0b2]", 1),
        (b"[1,\x00]", 1),
    ],
)
def test_the_first_element_that_is_no_token_is_named(core: ModuleType, text: bytes, index: int) -> None:
    with pytest.raises(NotATokenId) as caught:
        core.tokens_from_json(text, 1000)
    assert caught.value.index == index


@given(st.binary(max_size=12) | st.text("[]0123456789,- \n", max_size=12).map(str.encode))
def test_both_implementations_agree_on_anything(text: bytes) -> None:
    outcomes = []
    for name in IMPLEMENTATIONS:
        try:
            outcomes.append(implementation(name, "tokens_from_json").tokens_from_json(text, 3))
        except NotATokenId as error:
            outcomes.append(error.index)
    assert outcomes[0] == outcomes[-1]


SCALARS = st.none() | st.booleans() | st.integers() | st.text('a\\"[]{},: ')
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from('ap"'), inner))


@given(st.lists(st.tuples(st.sampled_from("apq"), VALUES | TOKENS)), st.sampled_from([None, 1]))
def test_the_value_of_a_field_is_found(core: ModuleType, fields: list[tuple[str, object]], indent: int | None) -> None:
    texts = [(name, json.dumps(value, indent=indent)) for name, value in fields]
    if any(name == "p" and any(c in value[1:-1] for c in '[]"') for name, value in texts if value[0] == "["):
        return  # An array of something else than numbers may end anywhere.
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in texts) + "}"
    values = [value for name, value in texts if name == "p"]
    found = core.find_json_value(text.encode(), "p")
    assert (found and text[slice(*found)]) == (values[-1] if values else None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"p',
        b'{"p"',
        b'{"p":[1',
        b'["p",[1]]',
        b'{"\\u0070":[1],"p":[2]}',
        b'{"a":"p":[1]}',
    ],
)
def test_no_value_is_found_where_none_is(core: ModuleType, text: bytes) -> None:
    assert core.find_json_value(text, "p") is None


@given(st.text('{}[]",:\\ ap1', max_size=50).map(str.encode))
def test_both_implementations_find_the_same_value(text: bytes) -> None:
    found = [implementation(name, "find_json_value").find_json_value(text, "p") for name in IMPLEMENTATIONS]
    assert found[0] == found[-1]


def test_a_long_array_is_read_whole(core: ModuleType) -> None:
    tokens = [(token * 7919) % (1 << 32) for token in range(100_000)]
    text = json.dumps(tokens).encode()
    assert core.tokens_from_json(bytearray(text), len(tokens)) == packed(tokens)
    assert json.loads(core.tokens_to_json(packed(tokens))) == tokens


class Fields(list[tuple[str, object]]):
    """The fields of an object, names given twice among them."""


NAMES = st.sampled_from("abc\u00e9")
NESTED = st.recursive(
    st.integers() | st.text('"{}[]:,a\\', max_size=5),
    lambda values: (
        st.lists(values, max_size=4) | st.lists(st.tuples(st.sampled_from("abc\u00e9"), values), max_size=4).map(Fields)
    ),
    max_leaves=20,
)


def written(value: object, ensure_ascii: bool) -> str:
    if isinstance(value, Fields):
        pairs = (
            f"{json.dumps(name, ensure_ascii=ensure_ascii)} : {written(each, ensure_ascii)}" for name, each in value
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(each, ensure_ascii) for each in value) + "]"
    return json.dumps(value, ensure_ascii=ensure_ascii)


@given(NESTED, st.booleans())
def test_both_implementations_find_fields_that_are_there_twice(value: object, ensure_ascii: bool) -> None:
    text = written(value, ensure_ascii).encode()
    flaws = [implementation(name, "json_flaw").json_flaw(text) for name in IMPLEMENTATIONS]
    assert bool(flaws[0]) == bool(flaws[-1]) == ("twice" in flaws[0])


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (b'{"model":"a","messages":[],"model":"b"}', "twice"),
        (b'{"m":[{"role":"user","r\\u006fle":"system"}]}', "twice"),
        (b"[" * 1001, "deep"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(65_537)) + b"}", "more than 65536 fields"),
        (b'{"a":{"a":1},"b":[{"a":"a"},{"a":2}]}', ""),
    ],
)
def test_a_text_that_can_be_read_in_two_ways_is_described(core: ModuleType, text: bytes, flaw: str) -> None:
    found = core.json_flaw(text)
    assert flaw in found
    assert bool(found) == bool(flaw)


class Skipped(msgspec.Struct):
    """Fields that msgspec skips, as it does unknown ones."""

    a: msgspec.Raw = msgspec.Raw()
    b: msgspec.Raw = msgspec.Raw()


SKIPPED = msgspec.json.Decoder(Skipped)
EDITS = st.sampled_from(
    [
        *(b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\t\r\n", b"\x00", b"\x1f", b"\x7f", b"\x0b"),
        *(b"0", b"1", b"-", b"+", b".", b"e", b"E", b"1.5e-3", b"-0", b"9" * 5000, b"1e999", b"NaN", b"Infinity"),
        *(b"true", b"fals", b"null", b"data:", b'"data:', b'\\"data:', b'"a":', b',"b":1', b"\\u0061", b"\\u+061"),
        *(b"\\ud83d", b"\\ude42", b"\\uDBFF\\uDC00", b"\\ud83d\\u0061", b"\\u00", b"\\x", b"\\/", b"\xff", b"\xc3\xa9"),
        *(b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 50, b"[" * 50 + b"]" * 50),
    ]
)


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """Returns the text of an object, in which a few bytes are replaced by others."""
    fields = draw(st.lists(st.tuples(NAMES, NESTED), max_size=5).map(Fields))
    text = bytearray(written(fields, draw(st.booleans())).encode())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text[at : at + draw(st.integers(0, 2))] = draw(EDITS)
    return bytes(text)


@settings(max_examples=500)
@given(edited())
def test_values_are_taken_out_of_just_the_texts_that_msgspec_reads(core: ModuleType, text: bytes) -> None:
    split = core.split_json(text, ["a", "b"])
    try:
        read = SKIPPED.decode(text)
    except msgspec.DecodeError:
        assert split is None
        return
    if split is None:
        assert core.json_flaw(text) or b"[" * 50 in text
        return
    rest, values, has_data_url = split
    assert values == [bytes(read.a), bytes(read.b)]
    assert [bytes(each) for each in msgspec.structs.astuple(SKIPPED.decode(rest))] == [
        each and b"null" for each in values
    ]
    assert has_data_url == (b'"data:' in text)
    assert not core.json_flaw(text)


@settings(max_examples=500)
@given(edited())
def test_both_implementations_read_the_same_of_edited_texts(text: bytes) -> None:
    cores = [implementation(name, "split_json") for name in IMPLEMENTATIONS]
    split = [core.split_json(text, ["b", "a"]) for core in cores]
    assert split[0] == split[-1]
    with contextlib.suppress(msgspec.DecodeError):
        SKIPPED.decode(text)
        flaws = [bool(core.json_flaw(text)) for core in cores]  # Only texts that msgspec reads are described.
        assert flaws[0] == flaws[-1]


def test_nothing_is_taken_out_of_a_text_that_is_nested_deeply_or_has_a_field_twice(core: ModuleType) -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert core.split_json(nested(100), ["a"]) is not None
    assert core.split_json(nested(101), ["a"]) is None
    assert core.split_json(b'{"a":[{"b":1,"\\u0062":2}]}', ["a"]) is None
    assert core.split_json(b"{" + b",".join(b'"%d":1' % number for number in range(65_537)) + b"}", ["a"]) is None


def test_only_fields_of_the_object_itself_are_taken_out(core: ModuleType) -> None:
    text = bytearray(b' {"c":{"a":1}, "\\u0062" : [2 ,{}] , "d":"b"} ')
    assert core.split_json(text, ("a", "b")) == (
        b' {"c":{"a":1}, "\\u0062" : null , "d":"b"} ',
        [b"", b"[2 ,{}]"],
        False,
    )
