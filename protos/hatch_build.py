"""Build hook of kvrouter-protos: code is generated on the machine that builds and never committed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateHook(BuildHookInterface[Any]):
    """Called by hatchling before it builds a wheel, editable or not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Generates the code, or takes what ``make protos`` has generated where this environment has no generator.

        Raises:
            FileNotFoundError: there is neither a generator nor generated code.
        """
        root = Path(self.root)
        if importlib.util.find_spec("grpc_tools") is not None:
            subprocess.run([sys.executable, str(root / "generate.py")], check=True)  # noqa: S603 - own script
        elif not any(root.glob("src/kvrouter/v1/*_pb2.py")):
            raise FileNotFoundError("no generated code below protos/src: run `make protos`, or build with isolation")
