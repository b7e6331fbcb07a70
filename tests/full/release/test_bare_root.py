"""The wheels on a Debian that has Python and nothing else: no compiler, no network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ..containers.engine import run
from .conftest import download

SUITES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}
"""Releases of Debian, and their Python."""
TOOLS = ("mmdebstrap", "unshare", "ip")
PROGRAM = Path(__file__).with_name("first_request.py")
INSIDE = """
set -e
ip link set lo up
mount -t proc proc "$0/proc"
exec chroot "$0" /usr/bin/env -i PATH=/usr/bin:/bin sh -ec '
    ! command -v cc gcc cargo make
    python3 -m venv /installed
    /installed/bin/pip -q install --no-index --find-links /wheels "kvrouter[devstack]"
    /installed/bin/python --version
    exec /installed/bin/python /first_request.py /installed/bin
'
"""

lacking = [tool for tool in TOOLS if shutil.which(tool) is None] + ([] if os.geteuid() == 0 else ["root"])
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(lacking), reason=f"a Debian root needs {', '.join(lacking)}"),
]


@pytest.mark.parametrize(("suite", "python"), SUITES.items())
def test_the_first_request_is_routed_without_compiler_and_network(
    suite: str, python: str, release: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    # A copy of the archive may be older than the time for which a release in the making vouches.
    any_age = '--aptopt=Acquire::Check-Valid-Until "false"'
    run("mmdebstrap", "--quiet", "--variant=minbase", any_age, "--include=python3,python3-venv", suite, str(root))
    download(release, root / "wheels", "kvrouter[devstack]", python)
    shutil.copy(PROGRAM, root)
    said = run("unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", INSIDE, str(root))
    assert f"Python {python}." in said
    assert "routed to" in said
