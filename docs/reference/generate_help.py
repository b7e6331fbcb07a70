"""Writes the help of the commands whose options are settings, which take a second to import."""

from __future__ import annotations

import os
from pathlib import Path

from kvrouter.cli.main import HELP_PAGES
from kvrouter.cli.serve import ROLES
from kvrouter.relay.__main__ import PROGRAM as RELAY
from kvrouter.relay.settings import RelaySettings
from kvrouter.runtime.config.sources import help_of
from kvrouter.sidecar.__main__ import PROGRAM as SIDECAR
from kvrouter.sidecar.settings import SidecarSettings

_COLUMNS = "80"


def pages() -> dict[Path, str]:
    """Returns the help of each command, by its file."""
    os.environ["COLUMNS"] = _COLUMNS
    return {
        HELP_PAGES / "serve.txt": help_of(list(ROLES.values()), f"kvrouter serve --roles {','.join(ROLES)}"),
        HELP_PAGES / "relay.txt": help_of([RelaySettings], RELAY),
        HELP_PAGES / "sidecar.txt": help_of([SidecarSettings], SIDECAR),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
