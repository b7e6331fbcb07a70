"""The file with the URLs of engines."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest
from kvrouter.sidecar.engines_file import engines_in, read_engines, split_component
from kvrouter.sidecar.kubernetes.pods import FoundEngine


def test_each_line_is_a_url_and_the_rest_of_it_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("# all of them\n\nhttp://a:1/  # the first\n  https://b:2\nhttp://a:1\n")
    assert read_engines(path) == ("http://a:1", "https://b:2")
    path.write_text("")
    assert read_engines(path) == ()


def test_a_component_may_precede_a_url(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("small=http://a:1/\nhttp://a:1/x?y=z\n")
    assert read_engines(path) == ("small=http://a:1", "http://a:1/x?y=z")
    assert [split_component(each) for each in read_engines(path)] == [("small", "http://a:1"), ("", "http://a:1/x?y=z")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a b=http://a:1", "line 1 of .*: expected a name"),
        (b"small=gpu-2:8000", "line 1 of .*: expected http://host:port, received 'gpu-2:8000'"),
        (b"http://a:1\ngpu-2:8000\n", "line 2 of .*: expected http://host:port, received 'gpu-2:8000'"),
        (b"http://me:secret@a:1", "line 1 of .*: expected no user and password"),
        (b"\xff\xfe", "is no UTF-8"),
        (b"#" * ((1 << 20) + 1), "longer than 1048576 bytes"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "engines"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_engines(path)
    with pytest.raises(ValueError, match=r"cannot read .*missing: No such file"):
        read_engines(tmp_path / "missing")


async def test_changes_are_seen_and_unusable_content_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("http://a:1")
    async with aclosing(engines_in(path)) as changes:
        assert await anext(changes) == (FoundEngine("http://a:1"),)
        path.write_text("nonsense")
        replacement = tmp_path / "new"
        replacement.write_text("http://a:1\nhttp://b:2\n")
        replacement.replace(path)
        assert [each.url for each in await anext(changes)] == ["http://a:1", "http://b:2"]
