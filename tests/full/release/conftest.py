"""A release of the commit that is checked out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..containers import bases
from ..containers.engine import missing, run

ROOT = Path(__file__).parents[3]
WITHOUT_WHEELS = ("nkeys",)
"""Dependencies in plain Python that are published as source only: pip builds them, which takes no compiler."""


@pytest.fixture(scope="session")
def base_images(tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether images can be built here."""
    if missing():
        return False
    bases.make_all(tmp_path_factory.mktemp("bases"))
    return True


def make_release(folder: Path, images: bool) -> None:
    options = [] if images else ["IMAGES=no"]
    run("make", "-s", "release", f"RELEASE={folder}", *options, cwd=ROOT)


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory, base_images: bool) -> Path:
    """The folder of a release; ``KVROUTER_RELEASE`` names one that is there already."""
    if made := os.environ.get("KVROUTER_RELEASE"):
        return Path(made)
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout:
        pytest.skip("make release needs a clean tree: commit first")
    folder = tmp_path_factory.mktemp("release") / "first"
    make_release(folder, base_images)
    return folder


def download(release: Path, folder: Path, name: str, python: str) -> None:
    """Puts the wheels of a distribution and of all that it requires into a folder, for a minor version of Python."""
    pip = (sys.executable, "-m", "pip", "-q")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    run(*pip, "wheel", "--no-deps", *constraints, "-w", str(folder), *WITHOUT_WHEELS)
    run(
        *(*pip, "download", "--only-binary", ":all:", "--python-version", python),
        *(*constraints, "--find-links", str(release), "--find-links", str(folder), "-d", str(folder), name),
    )
