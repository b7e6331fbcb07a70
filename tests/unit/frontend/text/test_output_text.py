from __future__ import annotations

from array import array

from hypothesis import given, settings, strategies as st
from kvrouter.frontend.text.model_text import ModelText

TEXTS = st.lists(
    st.sampled_from(["word ", "é", "你好", "🙂", "👩‍👩‍👧", "\n", " x"]) | st.text(max_size=5), max_size=30
).map("".join)


def token_ids(model: ModelText, text: str) -> list[int]:
    return list(array("I", model.tokenizer.encode_whole(text)))


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_the_pieces_of_an_output_are_its_text(model: ModelText, text: str, sizes: list[int]) -> None:
    ids = token_ids(model, text)
    detokenizer = model.detokenizer(b"")
    pieces, start = [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start += size
    assert "".join(pieces) == model.tokenizer.library.decode(ids, skip_special_tokens=True)


def test_a_character_appears_with_its_last_token(model: ModelText) -> None:
    ids = token_ids(model, "🙂")
    assert len(ids) > 1
    detokenizer = model.detokenizer(b"")
    pieces = [detokenizer.text_of(token) for token in ids]
    assert pieces == [""] * (len(ids) - 1) + ["🙂"]


def test_special_tokens_have_text_only_if_they_are_not_skipped(model: ModelText) -> None:
    end = model.tokenizer.id_of("<|im_end|>")
    assert end is not None
    assert model.detokenizer(b"").feed([end]) == ""
    assert model.detokenizer(b"", skip_special_tokens=False).feed([end]) == "<|im_end|>"


def test_tokens_out_of_the_vocabulary_have_no_text(model: ModelText) -> None:
    assert model.detokenizer(array("I", [1 << 31]).tobytes()).feed([1 << 31, 4_000_000]) == ""
