from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.token_caches import PIECE_CHARACTERS, Cutter, PieceCache
from kvrouter.frontend.text.tokenizer import InvalidTokenizer, ModelTokenizer
from kvrouter.v1.errors import PromptTooLong

FRAGMENTS = [
    *(
        "the ",
        "a ",
        " b",
        "x y",
        "naïve ",
        "café",
        "你好",
        "🙂",
        " ",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "don't ",
        " WHY",
        "12",
        "12 w3",
        "...",
    ),
    *("e\u0301 ", " \u0301x", "<|im_start|>", "<|im_end|>", "<|im_", "▁", "Ġ", " of the world and all that is in it "),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=400).map("".join)
LIMIT = 1 << 20


def tokens(packed: bytes) -> list[int]:
    return list(array("I", packed))


def encoded(tokenizer: ModelTokenizer, text: str, **options: Any) -> bytes:
    return completed(tokenizer.encode(text, **options))


def family(model_files: dict[str, bytes], **changes: Any) -> ModelTokenizer:
    """The small tokenizer with other rules, as other families have."""
    definition = json.loads(model_files["tokenizer.json"]) | changes
    return ModelTokenizer(json.dumps(definition).encode(), cache_bytes=1 << 20)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=3))
def test_tokens_with_the_cache_equal_those_without(model: ModelText, texts: list[str]) -> None:
    # Texts with a common prefix, twice each, so that pieces come out of the cache; some have long pieces.
    long = 8 * "".join(texts)
    for text in (*texts, texts[0] + texts[1], texts[0] + texts[-1], *texts, long, long + texts[0]):
        found = encoded(model.tokenizer, text, special_tokens=False, limit=LIMIT)
        assert found == model.tokenizer.encode_whole(text)


@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_tokens_found_at_once_equal_the_others(model: ModelText, text: str) -> None:
    at_once = model.tokenizer.encode_at_once(text, special_tokens=False, limit=LIMIT)
    assert at_once in (None, model.tokenizer.encode_whole(text))


def test_a_text_with_few_new_words_is_tokenized_at_once(model_files: dict[str, bytes]) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)

    def at_once(text: str) -> bytes | None:
        return tokenizer.encode_at_once(text, special_tokens=False, limit=LIMIT)

    known = "a shared prefix with many words. " * 20
    new = "a" + "".join(f" w{number}" for number in range(300))
    assert at_once(new) is None
    for text in (known, known + "and two more"):
        assert at_once(text) == tokenizer.encode_whole(text)
    assert at_once(known + new) is None
    encoded(tokenizer, new, special_tokens=False, limit=LIMIT)
    assert at_once(known * 90) == tokenizer.encode_whole(known * 90)
    assert at_once(known * 100) is None
    with pytest.raises(PromptTooLong):
        tokenizer.encode_at_once(known, special_tokens=False, limit=10)


@pytest.mark.parametrize("text", ["你好" * 1_000, "你好" * 6_000, "w" * 1_000, "w" * 15_000, "x,\ny" * 200])
def test_a_text_without_spaces_is_not_tokenized_at_once(model_files: dict[str, bytes], text: str) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    chat = f"<|im_start|>user\n{text}<|im_end|>\n"
    for _ in range(2):
        assert tokenizer.encode_at_once(chat, special_tokens=False, limit=LIMIT) is None


def test_the_search_for_cuts_of_a_known_text_is_bounded(model_files: dict[str, bytes]) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    known = "".join(f"{'好' * 400}{number} a" for number in range(100))
    encoded(tokenizer, known, special_tokens=False, limit=LIMIT)
    assert tokenizer.encode_at_once(known, special_tokens=False, limit=LIMIT) is None


def test_a_text_with_many_new_pieces_of_known_words_is_not_tokenized_at_once(model_files: dict[str, bytes]) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    words = [f"w{number % 7}x{number % 11}" for number in range(77)]

    def text(shift: int, count: int) -> str:
        return " ".join(words[shift * number % 77] for number in range(count))

    encoded(tokenizer, text(1, 500), special_tokens=False, limit=LIMIT)
    known = text(2, 5_000)
    assert tokenizer.encode_at_once(known, special_tokens=False, limit=LIMIT) is None
    encoded(tokenizer, known, special_tokens=False, limit=LIMIT)
    for suffix, is_short in ((text(3, 1_000), True), (text(5, 5_000), False)):
        at_once = tokenizer.encode_at_once(f"{known} {suffix}", special_tokens=False, limit=LIMIT)
        assert at_once == (tokenizer.encode_whole(f"{known} {suffix}") if is_short else None)


LONG_WORDS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": SPACES, "pre_tokenizer": None},
        {"normalizer": PREPENDED, "pre_tokenizer": None},
        {"pre_tokenizer": LONG_WORDS},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ],
    ids=["nfc", "no pre-tokenizer", "prepended", "metaspace", "unknown pre-tokenizer"],
)
def test_other_families_have_the_same_tokens_with_the_cache(
    model_files: dict[str, bytes], changes: dict[str, Any]
) -> None:
    tokenizer = family(model_files, **changes)

    @settings(max_examples=30, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        for _ in range(2):
            assert encoded(tokenizer, text, special_tokens=False, limit=LIMIT) == tokenizer.encode_whole(text)

    check()


@pytest.mark.parametrize("words", ["a shared prefix with many words ", "w123 w456 item 7 of line 89 "])
def test_a_shared_prefix_is_tokenized_once(model_files: dict[str, bytes], words: str) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    prefix = words * 1000
    encoded(tokenizer, prefix + "first", special_tokens=False, limit=LIMIT)
    known = tokenizer._cache.size
    encoded(tokenizer, prefix + "second", special_tokens=False, limit=LIMIT)
    # Only what contains the end of the prefix is new, and it is not kept, since no cut ends it.
    assert tokenizer._cache.size == known > 0


def test_the_cache_stays_within_its_memory() -> None:
    cache = PieceCache(10_000)
    for number in range(1000):
        cache.put(f"{number:0300}", b"\0" * 400)
    assert 0 < cache.size <= 10_000
    assert cache.get(f"{999:0300}") is not None
    assert cache.get(f"{0:0300}") is None


def test_pieces_are_cut_between_words_and_before_special_tokens() -> None:
    cutter = Cutter(after="abcdefghijklmnopqrstuvwxyz", before=["<|im_start|>"])
    text = "word " * 100 + "<|im_start|>" + "1234567890" * 60 + "<|im_start|>rest"
    pieces = cutter.pieces(text)
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(len(piece) >= PIECE_CHARACTERS for piece in pieces[:-1])
    assert all(piece.startswith((" ", "<|im_start|>")) for piece in pieces[1:])


def test_a_prompt_gets_the_tokens_that_its_tokenizer_adds(model_files: dict[str, bytes]) -> None:
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    template = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer = family(
        model_files,
        post_processor={
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": bos},
        },
    )
    plain = tokens(encoded(tokenizer, "some text", special_tokens=False, limit=LIMIT))
    assert tokens(encoded(tokenizer, "some text", special_tokens=True, limit=LIMIT)) == [0, *plain]
    assert tokens(encoded(tokenizer, "", special_tokens=True, limit=LIMIT)) == [0]


def test_a_prompt_over_the_limit_is_refused_with_its_field(model: ModelText) -> None:
    with pytest.raises(PromptTooLong, match="limit of 10 tokens") as caught:
        encoded(model.tokenizer, "1 2 3 4 5 6 7 8 9 10 11 12", special_tokens=True, limit=10, field="messages")
    assert caught.value.info.field == "messages"


def test_a_prompt_that_must_be_over_the_limit_is_refused_before_it_is_tokenized(
    model: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "_encoded_parts", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(PromptTooLong):
        encoded(model.tokenizer, "x" * 1_000_000, special_tokens=True, limit=10)


@pytest.mark.parametrize("definition", [b"", b"{}", b"[1]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_loaded_is_reported(definition: bytes) -> None:
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json"):
        ModelTokenizer(definition, cache_bytes=1 << 20)


def test_words_of_a_new_text_are_tokenized_once(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    assert tokenizer._words is not None
    for text in ("the red fox sees the dog. a", "a dog (red) sees 12 foxes, a") * 4:
        encoded(tokenizer, text, special_tokens=False, limit=LIMIT)
    expected = tokenizer.encode_whole("a fox sees (red) foxes, the dog. the fox")
    tokenized: list[str] = []
    encode = tokenizer._words._encode

    def recorded(texts: Sequence[str]) -> Sequence[bytes]:
        tokenized.extend(texts)
        return encode(texts)

    monkeypatch.setattr(tokenizer._words, "_encode", recorded)
    assert encoded(tokenizer, "a fox sees (red) foxes, the dog. the fox", special_tokens=False, limit=LIMIT) == expected
    # The first word has no space before it.
    assert tokenized == ["a"]


def test_the_words_that_are_kept_are_bounded(model_files: dict[str, bytes]) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 16)
    assert tokenizer._words is not None
    for number in range(200):
        encoded(tokenizer, f"a word{number}", special_tokens=False, limit=LIMIT)
        encoded(tokenizer, "a known", special_tokens=False, limit=LIMIT)
        assert len(tokenizer._words) <= (1 << 16) // 8 // 384


def test_a_long_new_word_is_never_tokenized_at_once(model_files: dict[str, bytes]) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    known = "a shared prefix with many words. " * 20
    encoded(tokenizer, known, special_tokens=False, limit=LIMIT)
    assert tokenizer.encode_at_once(f"{known}and {'w' * 10_000}. the", special_tokens=False, limit=LIMIT) is None


def library_work(tokenizer: ModelTokenizer, text: str) -> list[str] | None:
    """What the library has to tokenize of a text in a thread; None if the text is tokenized at once."""
    if tokenizer.encode_at_once(text, special_tokens=False, limit=LIMIT) is not None:
        return None
    passed: list[str] = []
    for holder in (tokenizer, tokenizer._words):
        encode = holder._encode  # type: ignore[union-attr]

        def recorded(texts: Sequence[str], encode: Any = encode) -> Any:
            passed.extend(texts)
            return encode(texts)

        holder._encode = recorded  # type: ignore[union-attr, method-assign]
    try:
        encoded(tokenizer, text, special_tokens=False, limit=LIMIT)
    finally:
        del tokenizer._encode  # type: ignore[misc]
        tokenizer._words._encode = tokenizer._encode  # type: ignore[union-attr]
    return passed


SECRET = "".join(f"item{number} costs {number * 7} and " for number in range(400)) + "no more."


@pytest.mark.parametrize(("sender", "prober"), [("a", ""), ("", "b"), ("a", "b")])
def test_no_domain_sees_in_the_work_of_a_probe_what_another_one_sent(
    model_files: dict[str, bytes], sender: str, prober: str
) -> None:
    def domain(tokenizer: ModelTokenizer, name: str) -> ModelTokenizer:
        return tokenizer.of_domain(name) if name else tokenizer

    untouched, used = (ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20) for _ in range(2))
    for _ in range(3):
        encoded(domain(used, sender), SECRET, special_tokens=False, limit=LIMIT)
    for probe in (SECRET, SECRET[:1000], SECRET[:5000] + " other"):
        assert library_work(domain(used, prober), probe) == library_work(domain(untouched, prober), probe)
    if sender:
        # Within the domain the cache works: the text is tokenized at once.
        assert library_work(domain(used, sender), SECRET) is None
        # Its words must not be in the library's own cache, which the others share.
        assert domain(used, sender).library is not used.library


def test_the_domains_with_caches_are_bounded(model_files: dict[str, bytes]) -> None:
    tokenizer = ModelTokenizer(model_files["tokenizer.json"], cache_bytes=1 << 20)
    for number in range(40):
        tokenizer.of_domain(f"t{number}")
    assert tokenizer.of_known_domain("t0") is None
    assert tokenizer.of_known_domain("t39") is tokenizer.of_domain("t39")
    assert len(tokenizer._isolated) == 16
