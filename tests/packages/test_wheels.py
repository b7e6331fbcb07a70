"""The wheels, each installed alone into an empty environment and run there.

A library is installed twice: with the newest dependencies that its metadata allows and with the lowest, since engines
bring pins of their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import venv
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
LIBRARIES = (
    *(pytest.param(f"kvrouter-{each}", marks=pytest.mark.full) for each in ("protos", "core", "net")),
    *("kvrouter-publisher", "kvrouter-engines", "kvrouter-client"),
)
"""The last three require the first three."""
DEVELOPMENT = frozenset({"kvrouter.devcommands", "kvrouter.devtools", "kvrouter.mocker", "kvrouter.simulator"})
"""Packages of kvrouter-devstack."""
NEEDS_EXTRA = "needs an extra that is not installed: pip install 'kvrouter[devstack]'"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of every distribution, by its name.

    Processes of pytest-xdist build them once: two builds in one tree remove each other's files.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory, unfinished = shared / "wheels", shared / "unfinished-wheels"
    with (shared / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            subprocess.run(["make", "-s", "wheels", f"WHEELS={unfinished}"], cwd=ROOT, check=True)
            unfinished.rename(directory)
    return {canonicalize_name(wheel.name.split("-")[0]): wheel for wheel in directory.glob("*.whl")}


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel requires without extras."""
    (directory,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    # zipfile.Path has the part of pathlib's interface that PathDistribution uses.
    lines = PathDistribution(directory).requires or ()  # type: ignore[arg-type]
    return [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate({"extra": ""})]


def lowest(wheels: dict[str, Path], name: str) -> Iterator[str]:
    """The lowest version of each dependency of a distribution and of its siblings, as pip constraints."""
    for requirement in requirements(wheels[name]):
        sibling = canonicalize_name(requirement.name)
        if sibling in wheels:
            yield from lowest(wheels, sibling)
            continue
        (bound,) = (each.version for each in requirement.specifier if each.operator in {">=", "=="})
        yield f"{requirement.name}=={bound}"


class Environment:
    """An empty virtual environment with one distribution installed into it, and the extras that are named."""

    def __init__(
        self, directory: Path, wheels: dict[str, Path], name: str, constraints: list[str], extras: str = ""
    ) -> None:
        venv.create(directory, with_pip=True)
        self.python = directory / "bin" / "python"
        listed = directory / "constraints.txt"
        listed.write_text("\n".join(constraints))
        self.run(
            *("-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install"),
            *("-c", str(listed), "--find-links", str(wheels[name].parent), f"{wheels[name]}{extras}"),
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        """Runs Python outside of the source tree, expects the exit status, and returns the output."""
        clean = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.python.parent,
            env=clean,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def versions(self) -> dict[str, str]:
        listed = json.loads(self.run("-m", "pip", "--disable-pip-version-check", "list", "--format", "json"))
        return {canonicalize_name(each["name"]): each["version"] for each in listed}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("versions", [pytest.param("newest", marks=pytest.mark.full), "lowest"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_runs_in_an_empty_environment(
    name: str, versions: str, wheels: dict[str, Path], tmp_path: Path, nats_url: str, etcd_endpoint: str
) -> None:
    constraints = sorted(set(lowest(wheels, name))) if versions == "lowest" else []
    environment = Environment(tmp_path, wheels, name, constraints)
    installed = environment.versions()
    for constraint in map(Requirement, constraints):
        assert constraint.specifier.contains(installed[canonicalize_name(constraint.name)])
    for module in modules(wheels[name]):
        environment.run("-W", "error::ImportWarning", "-c", f"import {module}")
    program = PROGRAMS / f"{name.removeprefix('kvrouter-')}.py"
    environment.run(str(program), nats_url, etcd_endpoint)


@pytest.mark.timeout(600)
def test_the_services_run_in_an_empty_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment(tmp_path, wheels, "kvrouter", [])
    commands = environment.python.parent
    for command in ("kvrouter", "kvrouter-indexer", "kvrouter-scheduler", "kvrouter-frontend"):
        environment.run(str(commands / command), "--help")
    assert not (commands / "kvrouter-mocker").exists()
    for command in ("demo", "up", "replay", "simulate", "tune"):
        said = environment.run(str(commands / "kvrouter"), command, status=2)
        assert said == f"kvrouter: `kvrouter {command}` {NEEDS_EXTRA}\n"


@pytest.mark.timeout(600)
def test_the_development_stack_is_an_extra(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment(tmp_path, wheels, "kvrouter", [], extras="[devstack]")
    commands = environment.python.parent
    environment.run(str(commands / "kvrouter-mocker"), "--help")
    simulated = environment.run(str(commands / "kvrouter"), "simulate", "--requests", "50", "--workers", "2")
    assert "time to first token" in simulated
    environment.run("-c", "from kvrouter.mocker.engine.implementation import IMPLEMENTATION as i; assert i == 'native'")


def test_the_wheels_have_the_version_of_the_repository(wheels: dict[str, Path]) -> None:
    release = (ROOT / "VERSION").read_text().strip()
    assert {wheel.name.split("-")[1] for wheel in wheels.values()} == {release}


def test_only_the_development_stack_contains_simulated_engines(wheels: dict[str, Path]) -> None:
    packages = {name: set(modules(wheel)) for name, wheel in wheels.items()}
    assert packages.pop("kvrouter-devstack") == DEVELOPMENT
    assert not DEVELOPMENT & set().union(*packages.values())
    assert packages["kvrouter-core"] == {"kvrouter.core"}


def modules(wheel: Path) -> list[str]:
    """The packages of a wheel that can be imported."""
    (record,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    files = [line.split(",")[0] for line in (record / "RECORD").read_text(encoding="utf-8").splitlines()]
    return sorted({".".join(file.split("/")[:2]) for file in files if file.startswith("kvrouter/")})
