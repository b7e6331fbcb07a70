"""Build hook of kvrouter-protos: the generated files are made on the machine that builds, never committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateHook(BuildHookInterface[Any]):
    """Called by hatchling before wheels, editable ones included, are built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Generates the files that the wheel then takes in."""
        subprocess.run([sys.executable, str(Path(self.root) / "generate.py")], check=True)  # noqa: S603 - own script
