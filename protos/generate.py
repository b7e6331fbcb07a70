"""Generates the Python side of the contract; runs as the build hook of kvrouter-protos, or by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent


def generate(root: Path = HERE) -> None:
    """Writes messages, stubs and their types for every file of the contract below ``root / "src"``.

    Raises:
        subprocess.CalledProcessError: protoc refused a file; its message is on standard error.
    """
    out = root / "src"
    files = sorted(str(path.relative_to(root)) for path in root.glob("kvrouter/v1/*.proto"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={root}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *files,
        ],
        check=True,
        cwd=root,
    )


class GenerateHook(BuildHookInterface[Any]):
    """Called by hatchling before wheels, editable ones included, are built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates the files that the wheel then takes in."""
        generate(Path(self.root))


if __name__ == "__main__":
    generate()
