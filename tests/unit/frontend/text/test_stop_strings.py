from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.text.output_text import StopStrings

LETTERS = st.text(alphabet="ab<", max_size=5)


def first_stop(text: str, stop: list[str]) -> int:
    places = [text.find(each) for each in stop if each in text]
    return min(places, default=-1)


@given(pieces=st.lists(LETTERS, max_size=12), stop=st.lists(LETTERS.filter(bool), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string_however_it_is_divided(pieces: list[str], stop: list[str]) -> None:
    strings = StopStrings(stop)
    passed = ""
    for count, piece in enumerate(pieces, start=1):
        passed += strings.feed(piece)
        so_far = "".join(pieces[:count])
        place = first_stop(so_far, stop)
        if place >= 0:
            assert strings.matched is not None
            assert passed == so_far[:place]
            return
        # What is kept may begin a stop string, and nothing that may be passed on is kept.
        kept = so_far[len(passed) :]
        assert passed + kept == so_far
        assert not kept or any(each.startswith(kept) for each in stop)
    assert passed + strings.end() == "".join(pieces)
    assert strings.matched is None


def test_the_longer_of_two_stop_strings_at_one_place_is_reported() -> None:
    strings = StopStrings(["a", "ab"])
    assert strings.feed("xab") == "x"
    assert strings.matched == "ab"


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xSTOP")])
def test_a_stop_string_is_part_of_the_text_if_that_is_wanted(include: bool, text: str) -> None:
    strings = StopStrings(["STOP"], include=include)
    assert strings.feed("xST") + strings.feed("OPy") + strings.feed("z") == text
