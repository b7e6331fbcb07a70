"""The option that names the file with the keys of engines, of every service that calls engines."""

from __future__ import annotations

from typing import Annotated, Final

from kvrouter.net.auth.engine_keys import EngineKeys
from pydantic import AfterValidator

ENGINE_KEYS_FILE: Final = (
    'File with the keys that engines demand at their HTTP APIs, lines COMPONENT = "KEY" of TOML, of mode 0600 or 0640; '
    "a change is used at once."
)


def _checked(path: str) -> str:
    EngineKeys(path)
    return path


EngineKeysFile = Annotated[str, AfterValidator(_checked)]
"""Path of a file that ``EngineKeys`` can read; empty for none."""
