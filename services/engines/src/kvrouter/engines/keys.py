"""Keys of engines' HTTP APIs, by component, from a file of TOML.

vllm = "the key of all engines of the component vllm"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping

from kvrouter.net.secret_files import FollowedSecret, UnreadableSecret, read_secret

_KEY = re.compile(r"[!-~]+")
_EXPECTED = 'expected lines COMPONENT = "KEY" in TOML, with keys of ASCII characters without spaces'


class EngineKeys:
    """The keys in force. A changed file is read at the next use; an unusable one changes nothing."""

    def __init__(self, path: str = "") -> None:
        """Reads the file; an empty path stands for no keys.

        Raises:
            UnreadableSecret: it cannot be used.
        """
        self._keys: Callable[[], Mapping[str, str]] = FollowedSecret(path, _read) if path else dict

    def headers(self, component: str) -> dict[str, str]:
        """Returns the header with the key of a component's engines; none if it has no key."""
        key = self._keys().get(component)
        return {} if key is None else {"authorization": f"Bearer {key}"}


def _read(path: str) -> Mapping[str, str]:
    try:
        keys = tomllib.loads(read_secret(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise UnreadableSecret(f"{path}: {_EXPECTED}") from None  # The parser's message quotes the file.
    for component, key in keys.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise UnreadableSecret(f"{path}: {component}: {_EXPECTED}")
    return keys
