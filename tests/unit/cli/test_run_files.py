"""Run files name the systems that run on this machine, and no others."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.running import RunningSystem, announced, running_system, running_systems

OTHER = """
import sys
from kvrouter.cli.running import RunningSystem, announced
with announced(RunningSystem("up", scheduler=sys.argv[1])):
    print("announced", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "kvrouter"


def files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@asynccontextmanager
async def another(scheduler: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", OTHER, scheduler, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"announced\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_system_is_found_until_its_process_is_killed(directory: Path) -> None:
    async with another("127.0.0.1:7") as process:
        assert running_system(None) == RunningSystem("up", scheduler="127.0.0.1:7")
        (path,) = files(directory)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        process.send_signal(signal.SIGKILL)
        await process.wait()
        assert running_systems() == {}
        assert files(directory) == []


async def test_of_several_systems_one_is_named(directory: Path) -> None:
    async with another("127.0.0.1:7") as process:
        with announced(RunningSystem("up", scheduler="127.0.0.1:8")):
            own = f"up-{os.getpid()}"
            with pytest.raises(WrongUsage, match=f"choose one with --run: up, {own}"):
                running_system(None)
            with pytest.raises(WrongUsage, match=f"no such system runs here; there are: up, {own}"):
                running_system("wat")
            assert running_system(own) == RunningSystem(own, scheduler="127.0.0.1:8")
            assert running_system("up") == RunningSystem("up", scheduler="127.0.0.1:7")
        assert list(running_systems()) == ["up"]
        assert process.returncode is None
    assert running_system(None) is None


def test_a_directory_that_others_can_write_to_is_not_used(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with announced(RunningSystem("up")):
        assert files(directory) == []
        assert running_systems() == {}
