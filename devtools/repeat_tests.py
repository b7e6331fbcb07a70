"""Runs tests again and again while every core is busy, which shows races that an idle machine hides.

    python devtools/repeat_tests.py TIMES PYTEST_ARGUMENTS...

The output of a run is shown if it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_LAST_LINES = 60
"""Lines of output of a failed run."""
_BUSY = "import os; os.nice(5)\nwhile True: pass"
"""Takes a quarter of a core from a test that needs all of it, and all of a core that waits."""


def main() -> int:
    """Runs the tests and returns 1 if a run failed."""
    times, arguments = int(sys.argv[1]), sys.argv[2:]
    failed = 0
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        for number in range(1, times + 1):
            began = time.monotonic()
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            lines = done.stdout.splitlines()
            if done.returncode:
                failed += 1
                print(*lines[-_LAST_LINES:], sep="\n")
            said = lines[-1] if lines else f"exit status {done.returncode}"
            print(f"run {number} of {times}, {time.monotonic() - began:.0f} s: {said}", flush=True)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    print(f"{failed} of {times} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
