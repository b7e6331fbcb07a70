"""An engine model in the test's process whose worker is a program in C."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvrouter.mocker.engine.types import CacheEvent, Removed, Stored
from kvrouter.v1.common_pb2 import Transport

from ...faults.rig import BLOCK_SIZE, COMPONENT, EngineNode, Rig

INVALID_ARGUMENT, UNKNOWN_PARENT, DESCRIPTOR_MISMATCH, KEY_TAKEN, STOPPED = 1, 3, 4, 5, 7


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program says after a command."""

    status: int
    incarnation: int
    next_event_id: int
    registered: bool
    events_dropped: int
    retries: int
    error: str


class DrivenWorker:
    """The program ``driven_worker.c``. Its commands are quick, except for those that are awaited."""

    def __init__(
        self,
        program: Path,
        worker_id: int,
        *,
        etcd: str,
        nats: str,
        transport: Transport = Transport.TRANSPORT_UNSPECIFIED,
        buffer_events: int = 0,
        lease_ttl_seconds: int = 2,
        model: str = "m",
        component: str = str(COMPONENT),
        options: Mapping[str, object] = MappingProxyType({}),
        log: Path | None = None,
    ) -> None:
        arguments = (component, worker_id, etcd, nats, transport, buffer_events, lease_ttl_seconds, model)
        named = [f"{name}={value}" for name, value in options.items()]
        with open(log or os.devnull, "wb") as errors:
            self._process = subprocess.Popen(
                [program, *map(str, arguments), *named],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors if log else None,
                text=True,
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    async def opened(self) -> Answer:
        """Waits for what opening the worker led to."""
        return await asyncio.to_thread(self._answer)

    def obey(self, *command: object) -> Answer:
        """Passes a command on that does not wait."""
        assert self._process.stdin is not None
        assert self._process.poll() is None, f"the program ended with {self._process.returncode}"
        self._process.stdin.write(" ".join(map(str, command)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    async def awaited(self, *command: object) -> Answer:
        """Passes a command on that may wait."""
        return await asyncio.to_thread(self.obey, *command)

    async def close(self) -> int:
        """Closes the worker; returns the exit code of the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await asyncio.to_thread(self._process.wait)

    async def kill(self) -> None:
        """Kills the program."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what was not written yet is lost with the program

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()}"
        status, incarnation, next_event_id, registered, dropped, retries, *error = line.split()
        numbers = (int(status), int(incarnation), int(next_event_id), registered == "1", int(dropped), int(retries))
        return Answer(*numbers, " ".join(error))


class DrivenNode(EngineNode):
    """An engine model whose cache a program in C reports."""

    def __init__(self, worker: DrivenWorker, seed: int) -> None:
        super().__init__(seed, self._report)
        self.worker = worker

    @property
    def cursor(self) -> tuple[int, int]:
        """(incarnation, next event id)"""
        answer = self.worker.obey("check")
        return answer.incarnation, answer.next_event_id

    def _report(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            answer = self.worker.obey(*_command(event))
            assert answer.status == 0, answer


def _command(event: CacheEvent) -> list[object]:
    if isinstance(event, Stored):
        numbers = struct.unpack(f"<{len(event.engine_hashes) * BLOCK_SIZE}I", event.tokens)
        parent = "-" if event.parent_hash is None else event.parent_hash
        return ["stored", parent, len(event.engine_hashes), *event.engine_hashes, *numbers]
    if isinstance(event, Removed):
        return ["removed", len(event.engine_hashes), *event.engine_hashes]
    return ["cleared"]


async def start_driven(rig: Rig, program: Path, worker_id: int, **settings: object) -> DrivenNode:
    """Starts a worker in C that stays until the end of the test."""
    servers: dict[str, object] = {"etcd": rig.etcd.endpoint, "nats": rig.nats.url}
    worker = DrivenWorker(program, worker_id, **(servers | settings))  # type: ignore[arg-type]
    rig.exits.push_async_callback(worker.kill)
    answer = await worker.opened()
    assert answer.status == 0, answer
    node = rig.nodes[worker_id] = DrivenNode(worker, rig.rng.randrange(1 << 32))
    return node
