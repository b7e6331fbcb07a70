"""Child processes that are watched, logged to files, and killed when their owner dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_EXEC_WITH_PARENT = Path(__file__).with_name("exec_with_parent.py")
_TAIL_BYTES = 16_384


def with_parent(*command: str) -> tuple[str, ...]:
    """Returns a command that runs another, which the kernel kills when this process dies (on Linux).

    Not a ``preexec_fn``: it would run after a fork with the threads of gRPC, which aborts or hangs at times. The signal
    comes when the *thread* that forked ends, so children must be started from the main thread.
    """
    return (sys.executable, "-ISs", str(_EXEC_WITH_PARENT), str(os.getpid()), *command)


class ProcessDied(Exception):
    """A process ended by itself; the message has its last log lines."""

    def __init__(self, what: str, log_file: Path, last_lines: str) -> None:
        super().__init__(f"{what}; the end of {log_file}:\n{last_lines}")
        self.what = what
        """Which process ended, and how."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run."""

    name: str
    """Name in messages and of the log file."""
    arguments: Sequence[str]
    """Program and its arguments."""
    environment: Mapping[str, str]
    """Complete environment of the process."""


class ManagedProcess:
    """A child process in a session of its own, so that Ctrl-C in the terminal reaches only its owner."""

    def __init__(self, command: Command, log_file: Path, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self.log_file = log_file
        self._process = process
        self._stopping = False

    @classmethod
    async def start(cls, command: Command, log_directory: Path) -> ManagedProcess:
        """Starts a process that writes its output to `log_directory`/`name`.log.

        Raises:
            OSError: the program or the log file cannot be opened.
        """
        log_file = log_directory / f"{command.name}.log"
        with log_file.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *with_parent(*command.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(command.environment),
                start_new_session=True,
            )
        return cls(command, log_file, process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def watch(self) -> None:
        """Returns when the process has ended because it was stopped.

        Raises:
            ProcessDied: it ended by itself.
        """
        code = await self._process.wait()
        if not self._stopping:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise ProcessDied(f"{self.command.name} {how}", self.log_file, self.last_lines())

    async def stop(self, grace_seconds: float) -> int:
        """Sends SIGTERM, kills the process group after the grace period, and returns the exit status."""
        self._stopping = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
        return await self._process.wait()

    def kill(self) -> None:
        """Kills the process and its children."""
        self._stopping = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self, lines: int = 15) -> str:
        """Returns the last lines of its log."""
        with self.log_file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            tail = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in tail[-lines:])
