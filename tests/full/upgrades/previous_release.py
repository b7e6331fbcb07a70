"""An environment with the previous release, built from this repository's history and installed from wheels.

It is built once for each commit, in the user's cache; that takes about five minutes on two cores.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMMIT = "c4ef2da452b5da034188563f5997b7ef0d144a5b"
"""Nothing is released yet: this commit, which has an older form of the contract, stands for a release."""
_DISTRIBUTIONS = ("protos", "core", "net", "services/publisher_sdk", "services/engines", "client", ".", "devtools")


class NoHistory(Exception):
    """This copy of the repository does not contain the commit, as a shallow clone or an archive does not."""


def python() -> Path:
    """Returns the interpreter of an environment into which the previous release is installed, and builds it if absent.

    Raises:
        NoHistory: the repository's history does not reach back to the release.
        subprocess.CalledProcessError: it cannot be built; the output is on standard error.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(cache) / "kvrouter" / "releases"
    interpreter = place / COMMIT / "bin" / "python"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / COMMIT / "complete").exists():
            with tempfile.TemporaryDirectory() as work:
                _install(_wheels(_sources(Path(work))), Path(work) / "constraints.txt", place / COMMIT)
            (place / COMMIT / "complete").touch()
    return interpreter


def _sources(directory: Path) -> Path:
    known = subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if known.returncode:
        raise NoHistory(f"commit {COMMIT[:12]} is not in this repository's history: use a full clone")
    packed = directory.with_suffix(".tar")
    subprocess.run(["git", "archive", "-o", packed, COMMIT], cwd=ROOT, check=True)
    with tarfile.open(packed) as archive:
        archive.extractall(directory, filter="data")
    packed.unlink()
    return directory


def _wheels(sources: Path) -> Path:
    """Builds the wheels with the tools of this environment, as `make wheels` of that release does."""
    generator = ROOT / ".venv" / "protoc" / "bin" / "python"
    subprocess.run([generator, "protos/generate.py"], cwd=sources, check=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-build-isolation")
    places = [str(sources / each) for each in _DISTRIBUTIONS]
    subprocess.run([*pip, "--no-deps", "-w", "dist", *places], cwd=sources, check=True)
    return sources / "dist"


def _install(wheels: Path, constraints: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    pip = (directory / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install")
    subprocess.run(
        [*pip, "-c", constraints, "--find-links", wheels, "kvrouter[devstack]", "kvrouter-publisher"], check=True
    )


if __name__ == "__main__":
    print(python())  # noqa: T201
