"""Runs a service process: logging, event loop, signals, exit status."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog
import uvloop
from kvrouter import core
from kvrouter.net.etcd import InvalidEndpoint, KeyTaken
from kvrouter.net.nats.access import InvalidNats
from kvrouter.net.rpc.loop_server import BindFailed
from kvrouter.net.secret_files import UnreadableSecret
from kvrouter.net.tls import InvalidCertificate
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.telemetry import logs
from kvrouter.runtime.tracing.configuration import TracingNotInstalled

log = structlog.get_logger()


class StartRefused(Exception):
    """A process cannot run with its configuration. The message has cause and advice."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's ``mallopt``."""
_KEPT_BYTES = 16 << 20
"""Room for the copies of a few prompts of 128k tokens, each 0.5 MB packed and 0.8 MB as JSON."""
_YOUNG_OBJECTS = 20_000
"""New objects after which young garbage is collected."""

_EXPLAINED = (
    BindFailed,
    InvalidCertificate,
    InvalidEndpoint,
    InvalidNats,
    StartRefused,
    KeyTaken,
    TracingNotInstalled,
    UnreadableSecret,
)
"""Failures with a sufficient message, which are logged without a traceback."""
_OTHER_ADDRESS = "choose another with --port (HTTP API), --bind (gRPC) or --http-bind (metrics)"


def run(main: Callable[[asyncio.Event], Awaitable[None]], settings: ServiceSettings, component: str) -> NoReturn:
    """Runs a service and exits: with status 0 after SIGTERM or SIGINT, with 1 after a failure, which is logged.

    Without the Rust core it warns, unless the Python core is requested.

    Args:
        main: The service. Its argument is an event set when it must drain and return. A second signal
            cancels it.
        settings: Log level and format.
        component: Name of the service in its logs.
    """
    _allow_descriptors()
    _collect_rarely()
    _keep_freed_memory()
    logs.configure(settings.log_level, settings.log_format, component)
    if core.IMPLEMENTATION != "native" and core.REQUESTED != "reference":
        log.warning("core.not_native", consequence=core.MISSING_NATIVE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_until_stopped(main))
    sys.exit(status)


def _allow_descriptors() -> None:
    """Raises the limit of open files to the maximum: shells set 1,024, which is too low for many connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _collect_rarely() -> None:
    """Leaves the objects of the imports out of garbage collection, and collects young objects less often.

    A request creates about a thousand objects, none of them garbage in cycles, so at Python's own threshold of 700
    each request paid for a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def _keep_freed_memory() -> None:
    """Makes glibc keep up to ``_KEPT_BYTES`` of freed memory, unless the environment configures its allocator.

    Otherwise each copy of a long prompt gets new pages from the kernel, which must clear them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(option, _KEPT_BYTES)


async def _until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    stopping = asyncio.Event()
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        if stopping.is_set() and task is not None:
            log.warning("service.stopping_at_once", signal=number.name)
            task.cancel()
        else:
            log.info("service.stopping", signal=number.name)
            stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, _note_hangup)
    try:
        await main(stopping)
    except asyncio.CancelledError:
        if not stopping.is_set():
            # What it awaited was cancelled, not the service.
            log.exception("service.failed")
        return 1
    except Exception as failure:
        known = _leaves(failure)
        if all(isinstance(error, _EXPLAINED) for error in known):
            advice = [_OTHER_ADDRESS] if any(isinstance(error, BindFailed) for error in known) else []
            log.error("service.failed", cause="; ".join([*map(str, known), *advice]))
        else:
            log.exception("service.failed")
        return 1
    log.info("service.stopped")
    return 0


def _note_hangup() -> None:
    """Says that nothing has to be done: whoever sends SIGHUP expects files to be read again, and they are followed."""
    log.info(
        "service.hangup",
        consequence="changed files of certificates, keys and tokens are in use within a second anyway;"
        " other options need a restart",
    )


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
