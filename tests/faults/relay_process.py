"""A relay: the SDK in a process of its own, beside an engine that may outlive it. ``relays.py`` is the engine's side.

Lines of JSON go both ways: the engine tells the oldest message that it can repeat, the relay where it goes on from,
then messages come, and the relay says of each that it is recorded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrouter.mocker.adapter import MockEngine
from kvrouter.publisher.errors import UnknownParent
from kvrouter.publisher.snapshots.rank_file import NO_POSITION
from kvrouter.publisher.snapshots.resume import discard, positions
from kvrouter.publisher.worker import RankPublisher, Worker, running

from .rig import worker_config


async def relay(port: int, settings: dict[str, Any]) -> None:
    config = worker_config(**(settings | {"state": Path(settings["state"])}))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    oldest = json.loads(await reader.readline())["oldest"]
    known = positions(config).get(0, NO_POSITION)
    if known + 1 < oldest:
        discard(config)
    async with running(config, MockEngine({})) as worker:
        say(writer, {"from": known + 1 if worker.resumed else oldest, **cursor(worker)})
        while line := await reader.readline():
            message = json.loads(line)
            report(worker.rank(0), message["number"], message["events"])
            say(writer, {"recorded": message["number"], **cursor(worker)})


def report(rank: RankPublisher, number: int, events: list[list[Any]]) -> None:
    with rank.reporting(number):
        for kind, *details in events:
            if kind == "stored":
                parent, names, tokens = details
                # Below a block that was stored in a message that is gone.
                with suppress(UnknownParent):
                    rank.stored(
                        token_ids=memoryview(bytes.fromhex(tokens)).cast("I"), engine_hashes=names, parent=parent
                    )
            elif kind == "removed":
                rank.removed(details[0])
            else:
                rank.cleared()


def cursor(worker: Worker) -> dict[str, int]:
    return {"incarnation": worker.incarnation, "next_event_id": worker.rank(0).stats().next_event_id}


def say(writer: asyncio.StreamWriter, message: dict[str, int]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(relay(int(sys.argv[1]), json.loads(sys.argv[2])))
