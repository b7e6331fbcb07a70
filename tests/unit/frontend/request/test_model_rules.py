"""The file of models, and which model each request prefers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.edge.model_name import NamedModel, renamed
from kvrouter.frontend.request.current_choice import ModelChoice
from kvrouter.frontend.request.model_rules import Canary, ModelFileError, ModelRule, ordered, read_model_rules


def models(choices: tuple[ModelChoice, ...]) -> list[tuple[str, str]]:
    return [(each.model, each.reason.value) for each in choices]


def test_models_are_in_order_and_each_is_there_once() -> None:
    rule = ModelRule(serves="a", fallbacks=("b", "a", "c", "b"), canary=Canary("c", share=0.5))
    stable, canary = (ordered("x", rule, "", {}, draw) for draw in (0.5, 0.49))
    assert models(stable) == [("a", "alias"), ("b", "fallback"), ("c", "fallback")]
    assert models(canary) == [("c", "canary"), ("a", "fallback"), ("b", "fallback")]
    assert models(ordered("x", ModelRule(), "", {}, 0.0)) == [("x", "name")]


def test_pools_are_in_order_before_other_models() -> None:
    rule = ModelRule(serves="a", pools=("p", "q"), fallbacks=("b", "a"), canary=Canary("c", share=0.5))
    found = [(each.model, each.pool, each.reason) for each in ordered("x", rule, "", {}, 0.5)]
    others = [("b", "", "fallback"), ("a", "", "fallback")]
    assert found == [("a", "p", "alias"), ("a", "q", "fallback"), *others]
    assert [each.pool for each in ordered("x", rule, "", {}, 0.0)] == ["", "p", "q", "", ""]


@given(st.text(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_moves_sessions_to_the_canary_only(session: str, low: float, high: float, draw: float) -> None:
    low, high = sorted((low, high))
    if Canary("c", share=low).takes("x", session, {}, draw):
        assert Canary("c", share=high).takes("x", session, {}, draw)


@given(st.text(min_size=1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_session_stays_on_its_side(session: str, share: float, first: float, second: float) -> None:
    canary = Canary("c", share=share)
    assert canary.takes("x", session, {}, first) == canary.takes("x", session, {}, second)


def test_the_share_of_the_sessions_is_that_of_the_canary() -> None:
    canary = Canary("c", share=0.2)
    taken = sum(canary.takes("x", f"session {number}", {}, 0.0) for number in range(10_000))
    assert 1_800 < taken < 2_200
    assert not any(Canary("c").takes("x", f"session {number}", {}, 0.0) for number in range(100))


@pytest.mark.parametrize(("value", "takes"), [("always", True), (" Always ", True), ("never", False), ("yes", False)])
def test_a_header_chooses_the_side(value: str, takes: bool) -> None:
    assert Canary("c", header="X-Canary").takes("x", "", {"x-canary": value}, 0.0) is takes


def test_other_tables_of_the_file_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('port = 1\n[frontend]\nmodels_file = "x"\n[models."a/b"]\nfallbacks = ["c"]\n')
    assert read_model_rules(path) == {"a/b": ModelRule(fallbacks=("c",))}
    path.write_text("port = 1\n")
    assert read_model_rules(path) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("models = 3", "object"),
        ("[models.a]\nserve = 'b'", "serve"),
        ("[models.a]\nfallbacks = ['']", "fallbacks"),
        ('[models.a]\nserves = "b\\n"', "serves"),
        ("[models.a.canary]\nmodel = 'b'\nshare = 1.5", "canary.share"),
        ("[models.a.canary]\nshare = 0.5", "model"),
        ("[models.a.canary]\nmodel = 'b'\nheader = 'x:y'", "canary.header"),
        ("[models.a]\nserves = 'b'\n[models.c]\nfallbacks = ['a']", "'a' stands for 'b'"),
        ("[models.a]\nserves = 'a'", "'a' stands for 'a'"),
        ("[models", "not valid TOML"),
        ("\n".join(f"[models.m{number}]" for number in range(1001)), "at most 1000"),
    ],
)
def test_an_invalid_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(content)
    with pytest.raises(ModelFileError, match=re.escape(str(path))) as refused:
        read_model_rules(path)
    assert message in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        read_model_rules(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"model": 3}', b'{"prompt": 1}', b'{"model": "a"', b"\xff", b"[" * 9999]
)
def test_a_body_without_a_name_has_none(body: bytes) -> None:
    assert NamedModel.read(body).model == ""


def test_a_renamed_body_keeps_its_values_and_one_name() -> None:
    body = b'{"odd": 1e2, "model": "a", "text": "\\u00e9", "model":"b"}'
    assert NamedModel.read(body).model == "b"
    assert renamed(body, "c") == b'{"odd":1e2,"model":"c","text":"\\u00e9"}'


def test_a_prompt_is_cut_out_of_a_body_and_stays_in_it() -> None:
    body = b'{"prompt":[1, 2], "model": "a", "conversation_id": "c", "stop": ["\\"prompt\\":3"]}'
    assert NamedModel.read(body) == NamedModel("a", "c")
    assert renamed(body, "b") == b'{"prompt":[1, 2],"model":"b","conversation_id":"c","stop":["\\"prompt\\":3"]}'
