"""The native wheels on every Python that they are for. Interpreters are those of pyenv, uv and PATH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ..containers.engine import run
from .conftest import download

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROGRAM = Path(__file__).parents[2] / "packages/programs/core.py"
SIMULATED = "from kvrouter.mocker.engine.implementation import IMPLEMENTATION as i; assert i == 'native', i"

pytestmark = pytest.mark.timeout(3600)


def interpreter(version: str) -> Path | None:
    """Returns a Python of this minor version that can make environments."""
    places = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    places += Path.home().glob(f".local/share/uv/python/cpython-{version}.*/bin/python{version}")
    if installed := shutil.which(f"python{version}"):
        places.append(Path(installed))
    for each in places:
        said = subprocess.run([each, "-c", "import ensurepip, venv, sys; print(sys.version)"], capture_output=True)
        if said.returncode == 0 and said.stdout.decode().startswith(version):
            return each
    return None


@pytest.mark.parametrize("version", PYTHONS)
def test_the_native_wheels_run(version: str, release: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} is installed")
    run(str(python), "-m", "venv", str(tmp_path / "installed"))
    own = tmp_path / "installed/bin/python"
    download(release, tmp_path / "wheels", "kvrouter[devstack]", version)
    wheels = ("--no-index", "--find-links", str(tmp_path / "wheels"))
    run(str(own), "-m", "pip", "-q", "install", *wheels, "kvrouter[devstack]", env={"PATH": ""})
    run(str(own), str(PROGRAM))
    run(str(own), "-c", SIMULATED)
