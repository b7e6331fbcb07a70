"""Prometheus and promtool: installed, or from Debian's package without installing it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prometheus_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of prometheus and promtool."""
    installed = shutil.which("promtool")
    if installed and shutil.which("prometheus"):
        return Path(installed).parent
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("neither prometheus nor apt-get is installed")
    directory = tmp_path_factory.mktemp("prometheus")
    # The list of packages may be empty or old.
    for command in (["apt-get", "download", "prometheus"], ["apt-get", "update", "-q"]) * 2:
        subprocess.run(command, cwd=directory, capture_output=True, timeout=200, check=False)
        package = next(directory.glob("*.deb"), None)
        if package is not None:
            subprocess.run(["dpkg", "-x", str(package), str(directory)], check=True)
            return directory / "usr/bin"
    pytest.skip("the package prometheus cannot be downloaded")
