"""Tests with the newest version of each dependency: ``newest.py WHEELS ENVIRONMENT [PYTEST ARGUMENTS]``.

WHEELS has wheels of our own distributions. ENVIRONMENT is made anew. A dependency keeps its pin only if an exact
version is a decision: the reason is in pyproject.toml.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MANIFESTS = ("", "protos", "core", "net", "services/publisher_sdk", "services/engines", "client", "devtools")
PINNED = ("grpcio",)
"""Distributions whose pin stays, with all whose names begin with theirs."""
TESTS = (
    *("-n", "auto", "-m", "not full", "tests/unit"),
    *(f"tests/integration/{each}" for each in ("client", "net", "publisher", "runtime", "scheduler", "frontend/api")),
)
"""What runs unless pytest is given other arguments: all that needs no server, and what uses most dependencies."""


def main() -> int:
    """Installs, lists what is newer than ``constraints.txt`` says, tests, and returns the status of pytest."""
    wheels, place, *arguments = sys.argv[1:]
    environment = Path(place).resolve()
    venv.create(environment, clear=True, with_pip=True)
    python = str(environment / "bin/python")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    subprocess.run([*pip, "--no-deps", *map(str, Path(wheels).glob("*.whl"))], check=True)
    subprocess.run([*pip, *sorted(dependencies())], check=True)
    print("\n".join(newer(python)), flush=True)
    return subprocess.run([python, "-m", "pytest", *(arguments or TESTS)], cwd=ROOT, check=False).returncode


def dependencies() -> set[str]:
    """Returns every direct dependency as pip takes it, without the version that manifests name."""
    found = set()
    for folder in MANIFESTS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for group in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            found |= {_unpinned(Requirement(line)) for line in group}
    return {each for each in found if not each.startswith("kvrouter")}


def _unpinned(requirement: Requirement) -> str:
    exact = any(each.operator == "==" for each in requirement.specifier)
    if requirement.name.startswith(PINNED):
        return str(requirement) if exact else requirement.name
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}"


def newer(python: str) -> list[str]:
    """Returns a line for each distribution whose version is not that of ``constraints.txt``."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    known = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    output = subprocess.run([python, "-m", "pip", "list", "--format", "json"], check=True, stdout=subprocess.PIPE)
    found = {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(output.stdout)}
    return [
        f"{name}: {known[name]} -> {version}"
        for name, version in found.items()
        if name in known and known[name] != version
    ]


if __name__ == "__main__":
    sys.exit(main())
