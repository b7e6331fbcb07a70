"""The systems that ``kvrouter up`` and ``kvrouter serve`` run on this machine.

Each has a run file with its addresses. A process holds a lock on its file while it runs, so a file without a lock is of
a process that is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.errors import WrongUsage

_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """Where a system listens, host:port, and how its operator authenticates; empty for none."""

    name: str
    frontend: str = ""
    scheduler: str = ""
    indexer: str = ""
    etcd: str = ""
    namespace: str = "kvrouter"
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_peer_domain: str = ""
    etcd_user: str = ""
    etcd_password_file: str = ""
    engines_file: str = ""
    """File of the engines that it follows."""


@contextmanager
def announced(system: RunningSystem) -> Iterator[str]:
    """Leaves a run file while the context lasts, and yields its name: NAME-PID if another running system has NAME.

    Without a directory of one's own nothing is left, and commands need addresses.
    """
    directory = _directory(create=True)
    if directory is None:
        yield system.name
        return
    running_systems()  # removes what dead processes left
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=directory)  # of mode 0600
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(system)).encode())
        path = directory / f"{system.name}.json"
        try:
            os.link(temporary, path)
        except FileExistsError:
            path = directory / f"{system.name}-{os.getpid()}.json"
            os.replace(temporary, path)
        else:
            os.unlink(temporary)
        try:
            yield path.stem
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def running_systems() -> dict[str, RunningSystem]:
    """Returns the systems that run on this machine, by name, and removes the files of those that do not."""
    directory = _directory(create=False)
    systems: dict[str, RunningSystem] = {}
    for path in sorted(directory.glob("*.json"), key=lambda each: each.stem) if directory is not None else ():
        with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                known = json.loads(file.read(_MAX_BYTES))
                fields = {name: str(known[name]) for name in RunningSystem.__slots__ if name in known}
                systems[path.stem] = RunningSystem(**fields | {"name": path.stem})
            else:
                path.unlink(missing_ok=True)
    return systems


def running_system(name: str | None) -> RunningSystem | None:
    """Returns the named system, or the only one; None if none runs and none is named.

    Raises:
        WrongUsage: no system has the name, or there are several and none is named.
    """
    systems = running_systems()
    names = ", ".join(systems) or "none"
    if name is not None:
        if name not in systems:
            raise WrongUsage(f"--run {name}: no such system runs here; there are: {names}")
        return systems[name]
    if len(systems) > 1:
        raise WrongUsage(f"several systems run here: choose one with --run: {names}")
    return next(iter(systems.values()), None)


def _directory(*, create: bool) -> Path | None:
    """Returns the directory of run files; None if there is none that only this user can write to."""
    above = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(above) / "kvrouter" if above else Path(tempfile.gettempdir()) / f"kvrouter-{os.getuid()}"
    try:
        if create:
            directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return directory if is_own else None


Run = Annotated[
    str | None,
    typer.Option("--run", help="Name of a system that up or serve runs on this machine; needed if there are several."),
]


def chosen_system(run: str | None, *, addresses: Mapping[str, object]) -> RunningSystem | None:
    """Returns the running system to talk to; None if an address is given, or no system runs.

    Its certificates and its user in etcd become those of this command, unless the command has its own.

    Args:
        run: Name of the system; None for the only one.
        addresses: Options that name addresses, with their values.

    Raises:
        WrongUsage: no system has the name, there are several, or an address is given too.
    """
    given = next((option for option, value in addresses.items() if value), None)
    if given is not None:
        if run is not None:
            raise WrongUsage(f"--run excludes {given}: give one of them")
        return None
    from kvrouter.cli.connections import use_etcd_user, use_tls, uses_etcd_user, uses_tls

    system = running_system(run)
    if system is not None and system.tls_ca_file and not uses_tls():
        use_tls(system.tls_cert_file, system.tls_key_file, system.tls_ca_file, system.tls_peer_domain)
    if system is not None and system.etcd_user and not uses_etcd_user():
        use_etcd_user(system.etcd_user, system.etcd_password_file)
    return system
