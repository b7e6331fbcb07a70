"""Real servers for tests: a NATS and an etcd for each test process, and ones of its own for a test that breaks them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.frontend.service import FrontendService
from kvrouter.indexer.api.service import IndexerService
from kvrouter.scheduler.api.service import SchedulerService

from .listed_errors import check_errors_of

# How long an example takes is the machine's affair. The gate tries the same examples each time, so that it judges the
# change and not the draw; elsewhere they are new.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("any"), derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "any")


# Simulated engines end outputs at their maximum, so that tests know their lengths.
os.environ["KVROUTER_MEAN_OUTPUT_TOKENS"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-least", type=int, default=0, help="Fails a run of fewer tests, skipped ones included.")


def pytest_collection_finish() -> None:
    """Leaves modules and tests out of garbage collections, as processes of services do.

    A collection stops all event loops of the process: on a busy machine for up to 3 s, longer than many timeouts.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a whole run that lost tests: a renamed folder, a marker or a broken parameter list takes them silently."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return  # Of several processes, the one that reports knows all tests.
    expected = session.config.getoption("--at-least")
    reports = itertools.chain.from_iterable(reporter.stats.values())
    ran = len({each.nodeid for each in reports if isinstance(each, pytest.TestReport)})
    if ran < expected:
        reporter.ensure_newline()
        reporter.write_line(
            f"expected {expected} tests or more, {ran} ran: if that is meant, lower the count in the Makefile", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def log_as_by_default() -> None:
    """Drops what an earlier test in this process configured: a filter by level would hide lines from this one."""
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def every_error_of_a_service_is_listed() -> Iterator[None]:
    """Fails a call that raises an error which docs/reference/errors.md does not list for it."""
    with pytest.MonkeyPatch.context() as patched:
        for service in (FrontendService, IndexerService, SchedulerService):
            check_errors_of(service, patched)
        yield


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS with JetStream that tests share; they keep apart by namespace."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.kill())


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An etcd that tests share; they keep apart by namespace."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    asyncio.run(server.start())
    yield server.endpoint
    asyncio.run(server.kill())


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def own_nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """A NATS for one test, which may stop, kill, pause and start it; port and data stay the same."""
    server = NatsServer(tmp_path_factory.mktemp("own-nats"))
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
async def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdServer]:
    """An etcd for one test, which may stop, kill, pause and start it; port and data stay the same."""
    server = EtcdServer(tmp_path_factory.mktemp("own-etcd"))
    await server.start()
    yield server
    await server.kill()
