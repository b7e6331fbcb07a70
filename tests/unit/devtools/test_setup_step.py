"""Steps of ``make setup`` show what they do."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

STEP = [sys.executable, str(Path(__file__).parents[3] / "devtools" / "setup_step.py"), "Installing", "a minute", "--"]
PIP = """
print("Collecting grpcio==1.80 (from -r requirements.txt)")
print("  Downloading grpcio-1.80.0-cp311-cp311-linux_x86_64.whl (6.0 MB)")
print("Building wheels for collected packages: kvrouter-core")
print("  Building editable for kvrouter-core (pyproject.toml): started", flush=True)
"""


def command(code: str) -> list[str]:
    return [*STEP, sys.executable, "-c", code]


def test_a_terminal_shows_what_is_done_at_the_moment() -> None:
    ours, theirs = pty.openpty()
    # It goes on when the line is seen.
    with subprocess.Popen(command(PIP + "input()"), stdin=subprocess.PIPE, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"package 1: building kvrouter-core" not in shown:
            shown += os.read(ours, 4096)
        process.communicate(b"\n")
        while b"done in" not in shown:
            shown += os.read(ours, 4096)
    os.close(ours)
    assert process.returncode == 0
    assert shown.startswith(b"Installing (a minute)")


def test_output_is_shown_only_of_a_step_that_fails() -> None:
    done = subprocess.run(command(PIP), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "grpcio" not in done.stdout
    failed = subprocess.run(
        command(PIP + "raise SystemExit('no compiler')"), capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert "Collecting grpcio" in failed.stderr
    assert failed.stderr.endswith("no compiler\n")
