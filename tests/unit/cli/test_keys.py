"""``kvrouter keys``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvrouter.cli.main import main
from kvrouter.frontend.access.api_keys import ApiKeys
from kvrouter.frontend.access.caller import Role
from kvrouter.frontend.access.key_file import read_key_file
from kvrouter.frontend.access.refusals import CredentialRefused


class Command:
    """Runs the command with one file."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """Returns what it printed."""
        self._monkeypatch.setattr(sys, "argv", ["kvrouter", "keys", *arguments, "--file", str(self.path)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self._capsys.readouterr()
        assert ended.value.code == status, printed
        return (printed.out + printed.err).strip()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "keys.json", monkeypatch, capsys)


def test_a_created_key_is_valid_until_it_is_revoked(keys: Command) -> None:
    limits = ("--requests-per-second", "5", "--concurrency", "2", "--min-priority", "1")
    key = keys("create", "a", "--tenant", "t", "--role", "admin", "--model", "x", "--model", "y-*", *limits)
    caller = ApiKeys(read_key_file(keys.path)).authenticate(key)
    assert (caller.tenant, caller.role, caller.models, caller.min_priority) == ("t", Role.ADMIN, ("x", "y-*"), 1)
    assert (caller.limits.requests_per_second, caller.limits.concurrency) == (5.0, 2)
    keys("revoke", "a")
    with pytest.raises(CredentialRefused, match="revoked"):
        ApiKeys(read_key_file(keys.path)).authenticate(key)


def test_the_list_has_no_secrets_and_no_hashes(keys: Command) -> None:
    secret = keys("create", "a").partition(".")[2]
    keys("create", "b", "--days", "0.5")
    listed = keys("list")
    assert "valid until" in listed
    assert secret not in listed
    assert "sha256" not in listed


def test_an_expired_key_is_refused(keys: Command) -> None:
    key = keys("create", "a", "--days", "-1")
    with pytest.raises(CredentialRefused, match="expired"):
        ApiKeys(read_key_file(keys.path)).authenticate(key)
    assert "expired" in keys("list")


def test_wrong_usage_is_one_line(keys: Command) -> None:
    assert "expected client or admin" in keys("create", "a", "--role", "root", status=2)
    assert "letters, digits" in keys("create", "a b", status=1)
    assert "concurrency" in keys("create", "a", "--concurrency", "0", status=2)
    assert "cannot read" in keys("list", status=1)
    keys("create", "a")
    assert "already has a key 'a'" in keys("create", "a", status=1)
    assert "no key 'b'" in keys("revoke", "b", status=1)
    keys.path.chmod(0o644)
    assert "mode 644" in keys("create", "c", status=1)
