"""What the mock workers cost without clients: the same engines and publishers, with an ``emit`` that sends nothing.

Each engine runs its share of the requests, and starts another one when one ends. Prints JSON: CPU per token in µs.
``engines.py`` runs it, with its own options and those of the mocker.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack

import uvloop
from kvrouter.mocker.adapter import MockEngine, publish_to
from kvrouter.mocker.app import make_drivers, worker_config
from kvrouter.mocker.driver import EngineDriver
from kvrouter.mocker.engine.types import EngineRequest
from kvrouter.mocker.settings import MockerSettings
from kvrouter.publisher import worker as sdk
from kvrouter.runtime.config.settings import load
from kvrouter.runtime.process.lifecycle import YOUNG_OBJECTS
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.v1.worker_pb2 import FinishReason

_TOKEN_BYTES = 4
_SETTLE_SECONDS = 1.0


class Requests:
    """Keeps a number of requests running on one engine, and counts the tokens."""

    def __init__(self, prefixes: list[bytes], suffix_tokens: int, output: int) -> None:
        self.tokens = 0
        self.driver: EngineDriver
        self._prefixes = prefixes
        self._suffix_bytes = suffix_tokens * _TOKEN_BYTES
        self._output = output
        self._numbers = itertools.count()

    def start(self) -> None:
        prompt = random.choice(self._prefixes) + random.randbytes(self._suffix_bytes)
        self.driver.submit(EngineRequest(f"request-{next(self._numbers)}", prompt, self._output))

    def emit(self, outputs: Iterable[sdk.RequestOutput]) -> None:
        for output in outputs:
            self.tokens += len(output.token_ids)
            if output.finish_reason != FinishReason.FINISH_REASON_UNSPECIFIED:
                self.start()


async def measure(own: argparse.Namespace, settings: MockerSettings) -> dict[str, float]:
    prefixes = [random.randbytes(own.prefix * _TOKEN_BYTES) for _ in range(32)]
    every: list[Requests] = []
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        stepping = []
        for number in range(1, own.workers + 1):
            requests = Requests(prefixes, own.suffix, own.output)
            publishers: dict[int, sdk.RankPublisher] = {}
            drivers = make_drivers(
                settings,
                number,
                new_registry(),
                lambda rank, publishers=publishers: publish_to(lambda: publishers[rank]),
                requests.emit,
            )
            worker = await stack.enter_async_context(sdk.running(worker_config(settings, number), MockEngine(drivers)))
            for rank, driver in drivers.items():
                publishers[rank], requests.driver = worker.rank(rank), driver
                stepping.append(tasks.create_task(driver.run()))
            every.append(requests)
        for requests in every:
            for _ in range(own.concurrency // own.workers):
                requests.start()
        await asyncio.sleep(_SETTLE_SECONDS)
        tokens, spent = sum(requests.tokens for requests in every), time.process_time()
        await asyncio.sleep(own.seconds)
        tokens, spent = sum(requests.tokens for requests in every) - tokens, time.process_time() - spent
        for task in stepping:
            task.cancel()
    return {"cpu_us": 1e6 * spent / tokens, "per_second": tokens / own.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("workers", "concurrency", "prefix", "suffix", "output"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=5)
    own, rest = parser.parse_known_args()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    print(json.dumps(uvloop.run(measure(own, load(MockerSettings, rest, prog="engine_alone")))))


if __name__ == "__main__":
    main()
