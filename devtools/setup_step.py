"""Runs one step of ``make setup`` and shows its progress: what pip does at the moment, and for how long.

    python devtools/setup_step.py TITLE DURATION -- COMMAND...

A terminal shows one line that changes; elsewhere there is a line every ten seconds. The command's own output is shown
if it fails. Uses the standard library only, because nothing is installed yet.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time

LINE_SECONDS = 10
"""Interval of lines where there is no terminal."""
SHOWN_OUTPUT = 60
"""Lines of output of a failed command."""
_DOING = re.compile(
    r"\s*(?:(Collecting) ([\w.-]+)|(Downloading) ([\w.-]+?)-\d|(Building) (?:editable|wheel) for ([\w.-]+)"
    r"|(Installing) (collected packages))"
)


class Progress:
    """What a pip command does, from its output."""

    def __init__(self) -> None:
        """Begins without output."""
        self.output: list[str] = []
        self.collected = 0
        self.doing = "starting"

    def take(self, line: str) -> None:
        """Takes a line of output."""
        self.output.append(line)
        match = _DOING.match(line)
        if match:
            verb, what = (each for each in match.groups() if each)
            self.collected += verb == "Collecting"
            self.doing = f"{verb.lower()} {what}"

    def words(self, seconds: float) -> str:
        """Returns the progress in a line."""
        packages = f", package {self.collected}" if self.collected else ""
        return f"  {seconds:4.0f} s{packages}: {self.doing}"


def main() -> int:
    """Runs the command and returns its exit status."""
    separator = sys.argv.index("--")
    title, duration = sys.argv[1:separator]
    print(f"{title} ({duration})", flush=True)
    progress, started = Progress(), time.monotonic()
    is_terminal = sys.stdout.isatty()
    shown_at, rest = started, b""
    with subprocess.Popen(sys.argv[separator + 1 :], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        descriptor = process.stdout.fileno()  # type: ignore[union-attr]
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=1):
                    read = os.read(descriptor, 1 << 16)
                    if not read:
                        break
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        progress.take(line.decode(errors="replace"))
                now = time.monotonic()
                if is_terminal:
                    print(f"\r{progress.words(now - started)[:78]:<78}", end="", flush=True)
                elif now - shown_at >= LINE_SECONDS:
                    shown_at = now
                    print(progress.words(now - started), flush=True)
        status = process.wait()
    if is_terminal:
        print(f"\r{'':<78}\r", end="")
    if status:
        progress.take(rest.decode(errors="replace"))
        print("\n".join(progress.output[-SHOWN_OUTPUT:]).rstrip(), file=sys.stderr)
        return status
    print(f"  done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
