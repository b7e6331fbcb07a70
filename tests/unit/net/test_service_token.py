"""The file with the service token: what it may contain, and that it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvrouter.net.auth import ServiceToken, service_token as module
from kvrouter.net.auth.service_token import digest_line
from kvrouter.net.secret_files import UnreadableSecret

OLD, NEW = "o" * 32, "n" * 32


def write(path: Path, *lines: str, mode: int = 0o600) -> ServiceToken:
    replace(path, *lines, mode=mode)
    return ServiceToken(str(path))


def replace(path: Path, *lines: str, mode: int = 0o600) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join([*lines, ""]))
    fresh.chmod(mode)
    os.replace(fresh, path)


def test_the_first_token_is_shown_and_each_is_accepted(tmp_path: Path) -> None:
    token = write(tmp_path / "token", NEW, "", OLD)
    assert token.shown_to("scheduler") == NEW
    assert token.accepts(NEW)
    assert token.accepts(OLD.encode())
    for other in ("", "x" * 32, NEW[:-1], NEW + "n", "\u00fc"):
        assert not token.accepts(other)
    assert NEW not in repr(token)


def test_a_digest_accepts_its_token_and_shows_nothing(tmp_path: Path) -> None:
    token = write(tmp_path / "token", digest_line(NEW))
    assert token.shown_to("scheduler") == ""
    assert token.accepts(NEW)
    assert not token.accepts(digest_line(NEW))
    assert not token.accepts(digest_line(NEW).removeprefix("sha256:"))


@pytest.mark.parametrize(
    ("lines", "mode", "words"),
    [
        (["short"], 0o600, "at least 32 characters"),
        (["with a space in it, though long enough"], 0o600, "without spaces"),
        (["sha256:abcd"], 0o600, "64 hexadecimal digits"),
        (["sha256:" + "g" * 64], 0o600, "64 hexadecimal digits"),
        (["\u00fc" * 32], 0o600, "ASCII"),
        ([""], 0o600, "empty file"),
        ([NEW], 0o644, "mode 0600 or 0640"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_content(
    tmp_path: Path, lines: list[str], mode: int, words: str
) -> None:
    with pytest.raises(UnreadableSecret, match=words) as refused:
        write(tmp_path / "token", *lines, mode=mode)
    assert not [line for line in lines if line and line in str(refused.value)]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSecret, match="No such file"):
        ServiceToken(str(tmp_path / "absent"))
    assert ServiceToken.of("") is None


def test_a_replaced_file_is_used_and_an_unusable_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.0)
    path = tmp_path / "token"
    token = write(path, OLD)
    replace(path, NEW, OLD)
    assert token.shown_to("scheduler") == NEW
    assert token.accepts(OLD)
    replace(path, "broken")
    assert token.shown_to("scheduler") == NEW
    path.unlink()
    assert token.accepts(NEW)
    replace(path, NEW)
    assert not token.accepts(OLD)
