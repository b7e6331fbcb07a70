"""`kvrouter engine add` and `remove` change the file of engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.cli.engine.file import add, remove
from kvrouter.cli.errors import WrongUsage


def test_an_engine_is_added_once_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("# rack 1\nhttp://a:1/  # old")
    path.chmod(0o640)
    assert add(path, "http://b:2/")
    assert not add(path, "http://b:2")
    assert not add(path, "http://a:1")
    assert path.read_text() == "# rack 1\nhttp://a:1/  # old\nhttp://b:2\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"


def test_an_engine_is_removed_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("# rack 1\nhttp://a:1/  # old\nhttp://b:2\n")
    assert remove(path, "http://a:1")
    assert not remove(path, "http://a:1")
    assert path.read_text() == "# rack 1\nhttp://b:2\n"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "engines", tmp_path / "link"
    path.write_text("")
    link.symlink_to(path)
    assert add(link, "http://a:1")
    assert link.is_symlink()
    assert path.read_text() == "http://a:1\n"


@pytest.mark.parametrize(("content", "url"), [("", "gpu-1:8000"), ("nonsense", "http://a:1"), (None, "http://a:1")])
def test_what_cannot_be_used_changes_nothing(tmp_path: Path, content: str | None, url: str) -> None:
    path = tmp_path / "engines"
    if content is not None:
        path.write_text(content)
    with pytest.raises(WrongUsage):
        add(path, url)
    with pytest.raises(WrongUsage):
        remove(path, url)
    assert content == (path.read_text() if path.exists() else None)
