from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvrouter.frontend.access import following
from kvrouter.frontend.access.cache_salts import CacheSalts, create_salt_key
from kvrouter.frontend.access.key_file import KeyFileError
from structlog.testing import capture_logs

SALTS = CacheSalts(b"k" * 32)


def test_tenant_salt_and_key_decide() -> None:
    made = [
        SALTS.of("t", ""),
        SALTS.of("", "t"),
        SALTS.of("t", "s"),
        SALTS.of("ts", ""),
        SALTS.of("", "ts"),
        CacheSalts(b"j" * 32).of("t", "s"),
    ]
    assert len(set(made)) == len(made)
    assert SALTS.of("t", "s") == SALTS.of("t", "s")
    assert SALTS.of("", "") == ""


def test_a_salt_that_was_keyed_is_keyed_again() -> None:
    victims = SALTS.of("t", "")
    assert SALTS.of("", victims) != victims


def test_engines_take_it() -> None:
    salt = SALTS.of("t" * 64, "s" * 10_000)
    assert salt.isalnum()
    assert len(salt) <= 128


def test_a_key_is_created_once_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "cache-salt.key"
    create_salt_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert CacheSalts.of_file(path).of("t", "") == CacheSalts.of_file(path).of("t", "")
    with pytest.raises(FileExistsError):
        create_salt_key(path)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        CacheSalts.of_file(path)


@pytest.mark.parametrize("content", ["", "a password", "00" * 31])
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="kvrouter keys create-salt-key"):
        CacheSalts.of_file(path)


async def test_a_changed_key_is_followed_and_an_unusable_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_INTERVAL_SECONDS", 0.01)
    path = tmp_path / "cache-salt.key"
    create_salt_key(path)
    salts = CacheSalts.of_file(path)
    first = salts.of("t", "")
    task = asyncio.create_task(following.follow_salt_key(salts, path))
    await asyncio.sleep(0)

    async def until_read(key: str) -> None:
        with capture_logs() as logs:
            path.write_text(key)
            async with asyncio.timeout(30):
                while not logs:
                    await asyncio.sleep(0.01)

    await until_read("no key")
    assert salts.of("t", "") == first
    await until_read("ab" * 32)
    assert salts.of("t", "") == CacheSalts(bytes.fromhex("ab" * 32)).of("t", "") != first
    task.cancel()
    await asyncio.wait({task})
