"""Build hook of kvrouter-protos. Code is generated on the machine that builds and never committed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement


class GenerateHook(BuildHookInterface[Any]):
    """Generates the code before hatchling builds a wheel, editable or not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Generates the code. Without a generator in this environment, uses what ``make protos`` has generated.

        Raises:
            FileNotFoundError: there is neither a generator nor generated code.
        """
        root = Path(self.root)
        if has_generator(root):
            subprocess.run([sys.executable, str(root / "generate.py")], check=True)  # noqa: S603 - own script
        elif not any(root.glob("src/kvrouter/v1/*_pb2.py")):
            raise FileNotFoundError("no generated code below protos/src: run `make protos`, or build with isolation")


def has_generator(root: Path) -> bool:
    """Returns whether the generator is installed in the version that pyproject.toml requires for builds.

    Code of another version may refuse the oldest runtimes that the package allows.
    """
    manifest = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = map(Requirement, manifest["build-system"]["requires"])
    (generator,) = (each for each in requirements if each.name == "grpcio-tools")
    try:
        return version(generator.name) in generator.specifier
    except PackageNotFoundError:
        return False
