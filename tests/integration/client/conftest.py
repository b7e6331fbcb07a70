"""One system of separate processes for all tests of this folder, in each process that runs tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A system with two engines, whose model has a tokenizer.

    Processes that end are started again, while the session's event loop runs: tests use that one.
    """
    directory = tmp_path_factory.mktemp("system")
    config = directory / "scheduler.toml"
    # On a busy machine an Indexer may take longer to answer than a Scheduler waits for it by default.
    config.write_text('router-mode = "kv"\nindexer-timeout-ms = 20000\n')
    options = StackOptions(
        directory, directory, workers=2, scheduler_config=config, clock=20.0, has_text=True, restarts=True
    )
    async with running_stack(options) as running:
        yield running
