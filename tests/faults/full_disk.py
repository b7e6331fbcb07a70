"""A NATS whose disk the test can fill: its store is a small tmpfs that only the server sees.

The tmpfs is mounted in a user and mount namespace of the server's own, which an ordinary user may make on most systems.
The test reaches it through ``/proc``. It is gone when the server ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

from kvrouter.devtools.system.servers import NatsServer

_MOUNT = 'mount -t tmpfs -o "size=$1" none "$2" && shift 2 && exec "$@"'
_PIECE_BYTES = 4096


def unavailable() -> str:
    """Returns why this machine cannot run such a server; empty where it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare (util-linux)"
    command = ["unshare", "-rm", "sh", "-c", _MOUNT, "sh", "64k", "/mnt", "test", "-w", "/mnt"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no tmpfs of the test's own: {tried.stderr.strip()}"


class NatsOnSmallDisk(NatsServer):
    """A NATS with a disk of ``size_bytes``."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        super().__init__(directory)
        self._size_bytes = size_bytes
        self._store = directory / "data"
        self._nats_server, self.binary = self.binary, shutil.which("unshare") or "unshare"

    def _command(self) -> list[str]:
        self._store.mkdir(parents=True, exist_ok=True)
        mounting = ["-rm", "sh", "-c", _MOUNT, "sh", str(self._size_bytes), str(self._store)]
        return [*mounting, self._nats_server, *super()._command()]

    @property
    def _ballast(self) -> Path:
        return Path(f"/proc/{self.pid}/root") / self._store.relative_to("/") / "ballast"

    def fill(self) -> None:
        """Leaves no byte free."""
        with self._ballast.open("wb", buffering=0) as ballast:
            piece = os.urandom(_PIECE_BYTES)
            try:
                while True:
                    ballast.write(piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Gives the space back."""
        self._ballast.unlink()
