"""The systemd unit, judged by systemd-analyze. No service manager is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[3] / "deploy/kvrouter@.service"
DROP_IN = UNIT.parent / "security/kvrouter@.service.d"
SERVICES = ("frontend", "scheduler", "indexer")
HIGHEST_EXPOSURE = 3.0

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.mark.parametrize("service", SERVICES)
def test_the_exposure_is_low(service: str, tmp_path: Path) -> None:
    unit = tmp_path / f"kvrouter@{service}.service"
    shutil.copy(UNIT, unit)
    threshold = f"--threshold={int(HIGHEST_EXPOSURE * 10)}"
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, str(unit)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1:] or done.stderr


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("service", SERVICES)
def test_the_unit_has_no_mistakes(service: str, secure: bool, tmp_path: Path) -> None:
    unit = tmp_path / f"kvrouter@{service}.service"
    if secure:
        shutil.copytree(DROP_IN, tmp_path / f"{unit.name}.d")
    unit.write_text(UNIT.read_text().replace("/opt/kvrouter/bin/kvrouter-%i", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], check=False, capture_output=True, text=True
    )
    assert str(unit.name) not in done.stderr
    assert done.returncode == 0, done.stderr
