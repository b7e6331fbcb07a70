"""The mock tokenizer, and stop strings in generated text."""

from __future__ import annotations

import pytest
from kvrouter.mocker.serving.output_text import OutputText
from kvrouter.mocker.serving.tokenizer import Decoder, decode, encode


@pytest.mark.parametrize(
    "text", ["", "hello", "naïve 日本", " t300 t31999", "t300", " t12", " t0300", " t99999999999", "a t256b"]
)
def test_text_survives_tokens(text: str) -> None:
    assert decode(encode(text)) == text


def test_generated_tokens_survive_text() -> None:
    token_ids = [300, 31999, 104, 105, 256, 4294967295]
    assert encode(decode(token_ids)) == token_ids


def test_a_character_appears_when_it_is_complete() -> None:
    decoder = Decoder()
    assert [decoder.push(byte) for byte in "日".encode()] == ["", "", "日"]
    decoder.push("日".encode()[0])
    assert decoder.push(300) == "\ufffd t300"


def pieces(text: OutputText, token_ids: list[int]) -> list[str]:
    """Returns the text after each token, up to the end."""
    taken = []
    for token_id in token_ids:
        stopped = text.push(token_id)
        taken.append(text.take(ended=stopped))
        if stopped:
            return taken
    return [*taken, text.take(ended=True)]


def test_what_may_begin_a_stop_string_is_kept_back() -> None:
    text = OutputText(["abc"])
    assert pieces(text, encode("xabxabcy")) == ["", "", "x", "a", "b", "x", ""]
    assert text.stopped_by == "abc"


def test_the_rest_appears_at_the_end() -> None:
    assert "".join(pieces(OutputText(["abc"]), encode("xab"))) == "xab"


def test_a_stop_string_can_be_a_part_of_the_text() -> None:
    assert "".join(pieces(OutputText(["abc"], include_stop=True), encode("xabcy"))) == "xabc"


def test_the_first_of_several_stop_strings_counts() -> None:
    text = OutputText(["cd", "bc"])
    assert "".join(pieces(text, encode("abcd"))) == "a"
    assert text.stopped_by == "bc"
