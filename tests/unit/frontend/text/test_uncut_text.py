"""Texts that are tokenized in slices have the tokens of the whole text."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from kvrouter.frontend.text import tokenizer as tokenizer_module, uncut_text
from kvrouter.frontend.text.client_work import Slices, completed
from kvrouter.frontend.text.tokenizer import ModelTokenizer
from kvrouter.v1.errors import BadRequest, PromptTooLong

LIMIT = 1 << 24
SLICE = 48
AFTER = 24

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(*patterns: str) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, BYTES]}}


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama 3": split(LLAMA),
    "qwen": split(QWEN) | {"normalizer": {"type": "NFC"}},
    "gpt-oss": split(O200K),
    "deepseek": split(r"\p{N}{1,3}", r"[一-龥\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK),
    "no words": {"normalizer": SPACES, "pre_tokenizer": None, "unk_token": "<|endoftext|>"},
    "dropped characters": {"normalizer": SPACES, "pre_tokenizer": None},
    "long digits": {"pre_tokenizer": {"type": "Digits", "individual_digits": False}},
    "metaspace": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}},
    "prepended": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]},
        "pre_tokenizer": None,
    },
    "looks back": split(r"(?<=a)b|[^b]+|b"),
}
ALPHABETS = (
    *("a", "ab", "abcdefghijklmnopqrstuvwxyz", "0123456789", "a1", "0123456789,.", "<|im_start|>", "'stel"),
    *(
        "你好世界",
        "🙂👍🏽",
        "e\u0301o\u0308",
        "가각ᄀ\u1161\u11a8",
        "\n",
        "\n ",
        " ",
        "\t\r\n a",
        "!?-(",
        "(a",
        "Aa",
        "ÄaB'm1 ",
    ),
)
RUN = st.sampled_from(ALPHABETS).flatmap(lambda characters: st.text(characters, max_size=300))
TEXTS = st.lists(RUN | st.text(max_size=20), max_size=6).map("".join)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "SLICE", SLICE)
    monkeypatch.setattr(uncut_text, "SLICE", SLICE)
    monkeypatch.setattr(uncut_text, "_AFTER_SLICE", AFTER)


def family(model_files: dict[str, bytes], **changes: Any) -> ModelTokenizer:
    definition = json.loads(model_files["tokenizer.json"])
    definition["model"]["unk_token"] = changes.pop("unk_token", None)
    definition |= changes
    return ModelTokenizer(json.dumps(definition).encode(), cache_bytes=1 << 20)


def whole(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return list(array("I", tokenizer.encode_whole(text)))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("small_slices")
def test_slices_have_the_tokens_of_the_whole_text(model_files: dict[str, bytes], name: str) -> None:
    tokenizer = family(model_files, **FAMILIES[name])

    @settings(max_examples=60, deadline=None)
    @example(text="0000 \x80ࠀ𐀀𐀀𐀀aaaaaaaaaaaaaaaaaaaaaaaaa00000 \x80ࠀ𐀀¡  aaaaaaaaaaaaaaaaaaaaaaaaa00000  ¡0000")
    @given(text=TEXTS)
    def check(text: str) -> None:
        encoded = completed(tokenizer.encode(text, special_tokens=False, limit=LIMIT))
        assert list(array("I", encoded)) == whole(tokenizer, text)

    check()


WORDS = ("a" * 900, "abcdefghij" * 90, "0123456789," * 90, "你好世界" * 200, "🙂" * 300, "((((" * 200, "AbC" * 300)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["gpt2", "llama 3", "qwen", "gpt-oss", "deepseek", "no words"])
@pytest.mark.usefixtures("small_slices")
def test_a_word_without_end_is_cut_into_slices(model_files: dict[str, bytes], name: str, word: str) -> None:
    tokenizer = family(model_files, **FAMILIES[name])
    if name == "no words" and not word.isascii():
        pytest.skip("its vocabulary has no such characters")
    longest = max(map(len, _tokenized(tokenizer, word)))
    assert longest <= 4 * (SLICE + AFTER + len("<|endoftext|>"))


def _tokenized(tokenizer: ModelTokenizer, text: str) -> list[str]:
    """Returns what the library tokenizes of a text, only in batches, for which it gives up the GIL."""
    passed: list[str] = []
    library = tokenizer.library

    class Recording:
        normalizer = library.normalizer

        def encode_batch(self, parts: list[str], **options: Any) -> Any:
            passed.extend(parts)
            return list(map(Encoded, library.encode_batch(parts, **options)))

    class Encoded:
        """Returns its tokens once, since each time takes as long as a millisecond."""

        def __init__(self, encoding: Any) -> None:
            self._encoding = encoding
            self._lists = 0

        def __getattr__(self, name: str) -> Any:
            self._lists += name == "ids"
            assert self._lists < 2
            return getattr(self._encoding, name)

    tokenizer._uncut._tokenizer = Recording()  # type: ignore[assignment]
    encoded = completed(tokenizer.encode(text, special_tokens=False, limit=LIMIT))
    assert encoded == tokenizer.encode_whole(text)
    return passed


@pytest.mark.usefixtures("small_slices")
def test_tokenizing_ends_with_the_slice_that_exceeds_the_limit(model_files: dict[str, bytes]) -> None:
    tokenizer = family(model_files)
    slices = tokenizer.encode("w123" * 100_000, special_tokens=False, limit=100_000)
    ran = 0

    def counted() -> Slices[bytes]:
        nonlocal ran
        for each in slices:
            ran += 1
            yield each
        return b""

    with pytest.raises(PromptTooLong):
        completed(counted())
    assert ran <= 1 + 100_000 * 3 // SLICE


def test_a_text_that_cannot_be_divided_is_refused_where_it_is_too_long(
    model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncut_text, "MAX_UNCUT_CHARACTERS", 50_000)
    tokenizer = family(model_files, **FAMILIES["prepended"])
    text = "x y" * 15_000
    assert completed(tokenizer.encode(text, special_tokens=False, limit=LIMIT)) == tokenizer.encode_whole(text)
    with pytest.raises(BadRequest, match="cannot divide") as refused:
        completed(tokenizer.encode(text * 3, special_tokens=False, limit=LIMIT, field="messages"))
    assert refused.value.info.field == "messages"
