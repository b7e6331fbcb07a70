"""Keys of engines are read from a file, again when it changes, and never quoted."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.engines.keys import EngineKeys
from kvrouter.net.secret_files import UnreadableSecret

SECRET = "engine-secret"  # noqa: S105


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_each_component_has_its_own_key(tmp_path: Path) -> None:
    keys = EngineKeys(write(tmp_path / "keys", f'vllm = "{SECRET}"\n"a.b" = "other"\n'))
    assert keys.headers("vllm") == {"authorization": f"Bearer {SECRET}"}
    assert keys.headers("a.b") == {"authorization": "Bearer other"}
    assert keys.headers("sglang") == {}
    assert EngineKeys().headers("vllm") == {}


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (f'vllm = "{SECRET}"', 0o644),
        (f"vllm = {SECRET}", 0o600),
        (f'[vllm]\nkey = "{SECRET}"', 0o600),
        (f'vllm = "{SECRET} x"', 0o600),
        (f'vllm = "{SECRET}\\r\\nx: y"', 0o600),
        ('vllm = ""', 0o600),
        ("", 0o600),
    ],
)
def test_an_unusable_file_is_refused_without_a_word_of_its_keys(tmp_path: Path, text: str, mode: int) -> None:
    with pytest.raises(UnreadableSecret) as caught:
        EngineKeys(write(tmp_path / "keys", text, mode))
    assert SECRET not in str(caught.value)


def test_a_changed_file_is_used_and_an_unusable_one_is_not(tmp_path: Path) -> None:
    keys = EngineKeys(write(tmp_path / "keys", 'vllm = "first"'))
    write(tmp_path / "keys", 'vllm = "second"')
    assert keys.headers("vllm") == {"authorization": "Bearer second"}
    write(tmp_path / "keys", "vllm = ")
    assert keys.headers("vllm") == {"authorization": "Bearer second"}
    (tmp_path / "keys").unlink()
    assert keys.headers("vllm") == {"authorization": "Bearer second"}
