"""Runs all checks of a worker, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import grpc.aio
from kvrouter.devtools.conformance import cache, requests
from kvrouter.devtools.conformance.cache import CacheProbe
from kvrouter.devtools.conformance.call_stream import check_call_stream
from kvrouter.devtools.conformance.load import check_load
from kvrouter.devtools.conformance.messages import (
    PublishedMessages,
    check_published_events,
    check_published_loads,
    collecting,
)
from kvrouter.devtools.conformance.options import CheckOptions
from kvrouter.devtools.conformance.registration import check_reachable, check_registration
from kvrouter.devtools.conformance.restart import check_restart
from kvrouter.devtools.conformance.results import CheckFailed, CheckResult, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import WorkerUnderTest

_Check = Callable[[], Awaitable[str]]
"""Returns the observed behaviour; raises CheckFailed or CheckSkipped."""


async def run_checks(options: CheckOptions) -> AsyncIterator[CheckResult]:
    """Yields the result of each check as soon as there is one. Check a worker without other traffic."""
    worker = WorkerUnderTest(options)
    await worker.connect(options.worker)
    try:
        reached = await _result("reachable", partial(check_reachable, worker), options)
        yield reached
        if reached.outcome == "failed":
            return
        async with collecting(options) as messages:
            for name, check in _checks(worker, CacheProbe(), messages):
                yield await _result(name, check, options)
    finally:
        await worker.close()


def _checks(worker: WorkerUnderTest, probe: CacheProbe, messages: PublishedMessages | str) -> list[tuple[str, _Check]]:
    return [
        ("registration", partial(check_registration, worker)),
        ("completion", partial(cache.check_completion, worker, probe)),
        ("published blocks", partial(cache.check_published_blocks, worker, probe)),
        ("cached tokens", partial(cache.check_cached_tokens, worker, probe)),
        ("shared prefix", partial(cache.check_shared_prefix, worker, probe)),
        ("cache salt", partial(cache.check_salt, worker, probe)),
        ("event log", partial(cache.check_event_log, worker, probe)),
        ("events over NATS", partial(check_published_events, worker, probe, messages)),
        ("load", partial(check_load, worker, probe)),
        ("loads over NATS", partial(check_published_loads, worker, messages)),
        ("call stream", partial(check_call_stream, worker, probe)),
        ("abort", partial(requests.check_abort, worker, probe)),
        ("disconnect", partial(requests.check_disconnect, worker, probe)),
        ("empty prompt", partial(requests.check_empty_prompt, worker, probe)),
        ("no output", partial(requests.check_no_output, worker, probe)),
        ("unknown rank", partial(requests.check_unknown_rank, worker, probe)),
        ("long prompt", partial(requests.check_long_prompt, worker, probe)),
        ("unknown adapter", partial(requests.check_unknown_adapter, worker, probe)),
        ("restart", partial(check_restart, worker, probe)),
    ]


async def _result(name: str, check: _Check, options: CheckOptions) -> CheckResult:
    try:
        return CheckResult(name, "passed", await check())
    except CheckSkipped as skipped:
        return CheckResult(name, "skipped", str(skipped))
    except CheckFailed as failed:
        return CheckResult(name, "failed", failed.received, failed.expected, failed.advice)
    except grpc.aio.AioRpcError as error:
        return CheckResult(
            name,
            "failed",
            received=f"{error.code().name}: {error.details()}",
            expected=f"an answer within {options.seconds:g} s",
            advice="see the worker's log; if it is loading or busy, raise --seconds.",
        )
