"""The file of API keys: what is accepted, and that only hashes are in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvrouter.frontend.access.api_keys import ApiKeys
from kvrouter.frontend.access.caller import Role
from kvrouter.frontend.access.key_file import (
    KeyEntry,
    KeyFile,
    KeyFileError,
    TenantEntry,
    new_key,
    read_key_file,
    write_key_file,
)
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason


def entry(key_id: str, **fields: Any) -> tuple[str, KeyEntry]:
    key, hashed = new_key(key_id)
    return key, KeyEntry(id=key_id, hash=hashed, **fields)


def test_a_written_file_is_read_back_and_has_no_secret(tmp_path: Path) -> None:
    key, made = entry("a", tenant="t", models=["m-*"], role=Role.ADMIN, concurrency=3)
    content = KeyFile([made], [TenantEntry(name="t", isolated=True, weight=2.0)])
    path = tmp_path / "keys.json"
    write_key_file(path, content)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == content
    assert key.partition(".")[2] not in path.read_text()


def test_rewriting_keeps_the_mode_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_key_file(path, KeyFile())
    path.chmod(0o640)
    write_key_file(path, KeyFile([entry("a")[1]]))
    assert path.stat().st_mode & 0o777 == 0o640
    assert [found.name for found in tmp_path.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666, 0o777])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    write_key_file(path, KeyFile())
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:03o}.*chmod 600"):
        read_key_file(path)


_HASH = f"sha256:{'0' * 32}:{'0' * 64}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"keyz": []}', "keyz"),
        ({"keys": [{"id": "a b", "hash": _HASH}]}, "id of key 0"),
        ({"keys": [{"id": "", "hash": _HASH}]}, "id of key 0"),
        ({"keys": [{"id": "a", "hash": "plain"}]}, "hash of key a"),
        ({"keys": [{"id": "a", "hash": f"sha256::{'0' * 64}"}]}, "hash of key a"),
        ({"keys": [{"id": "a", "hash": _HASH, "role": "root"}]}, "role"),
        ({"keys": [{"id": "a", "hash": _HASH, "rate": 1}]}, "rate"),
        ({"keys": [{"id": "a", "hash": _HASH, "concurrency": 0}]}, "concurrency"),
        ({"keys": [{"id": "a", "hash": _HASH, "requests_per_second": -1}]}, "requests_per_second"),
        ({"keys": [{"id": "a", "hash": _HASH, "tenant": "x:y"}]}, "tenant of key a"),
        ({"keys": [{"id": "a", "hash": _HASH}] * 2}, "'a' is there 2 times"),
        ({"tenants": [{"name": "t"}, {"name": "t"}]}, "'t' is there 2 times"),
        ({"tenants": [{"name": ""}]}, "name of tenant 0"),
        ({"tenants": [{"name": "t", "weight": 0}]}, "weight"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path: Path, content: object, words: str) -> None:
    path = tmp_path / "keys.json"
    path.touch(0o600)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(KeyFileError, match=words):
        read_key_file(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read"):
        read_key_file(tmp_path / "none.json")
    with pytest.raises(KeyFileError, match="not a regular file"):
        read_key_file(tmp_path)


def test_a_key_names_its_caller() -> None:
    key, made = entry("a", tenant="t", models=["m"], min_priority=2)
    keys = ApiKeys(KeyFile([made, entry("b")[1]], [TenantEntry(name="t", isolated=True, weight=2.0, concurrency=9)]))
    caller = keys.authenticate(key)
    assert (caller.name, caller.tenant, caller.models, caller.min_priority) == ("a", "t", ("m",), 2)
    assert (caller.isolated, caller.weight, caller.tenant_limits.concurrency) == (True, 2.0, 9)


def test_wrong_unknown_revoked_and_expired_keys_are_refused() -> None:
    valid, made = entry("a")
    other, _ = entry("a")
    revoked, revoked_entry = entry("revoked", revoked=1)
    expired, expired_entry = entry("expired", expires=1)
    keys = ApiKeys(KeyFile([made, revoked_entry, expired_entry]))
    refused = {
        "": RefusalReason.INVALID_KEY,
        "kvr-": RefusalReason.INVALID_KEY,
        "kvr-a": RefusalReason.INVALID_KEY,
        "kvr-a.": RefusalReason.INVALID_KEY,
        valid[:-1]: RefusalReason.INVALID_KEY,
        valid + "x": RefusalReason.INVALID_KEY,
        valid.replace("kvr-a", "kvr-b"): RefusalReason.INVALID_KEY,
        other: RefusalReason.INVALID_KEY,
        revoked: RefusalReason.REVOKED,
        expired: RefusalReason.EXPIRED,
    }
    for credential, why in refused.items():
        with pytest.raises(CredentialRefused) as error:
            keys.authenticate(credential)
        assert error.value.why is why
        assert not credential or credential not in str(error.value)
    assert keys.authenticate(valid).name == "a"


def test_an_unknown_id_is_not_taken_for_a_name_in_the_log() -> None:
    with pytest.raises(CredentialRefused) as error:
        ApiKeys(KeyFile()).authenticate("kvr-chosen-by-the-client.secret")
    assert error.value.caller == ""
