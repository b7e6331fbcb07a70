from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvrouter.devtools.system.processes import Command, ManagedProcess, ProcessDied

from ....waiting import until


def python(code: str, name: str = "child") -> Command:
    return Command(name, [sys.executable, "-c", code], dict(os.environ))


async def until_logged(process: ManagedProcess, words: str) -> None:
    await until(lambda: words in process.last_lines())


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or " Z " in stat.read_text()


async def test_a_process_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = await ManagedProcess.start(python("import sys; print('so long'); sys.exit(3)"), tmp_path)
    with pytest.raises(ProcessDied, match=r"child ended with status 3(.|\n)*child\.log(.|\n)*so long"):
        await process.watch()


async def test_a_killed_process_is_reported_by_signal(tmp_path: Path) -> None:
    process = await ManagedProcess.start(python("import time; print('up', flush=True); time.sleep(60)"), tmp_path)
    await until_logged(process, "up")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match="was ended by SIGKILL"):
        await process.watch()


async def test_a_stop_is_graceful_first(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('up', flush=True); time.sleep(60)"
    )
    process = await ManagedProcess.start(python(code), tmp_path)
    await until_logged(process, "up")
    assert await process.stop(20) == 0
    await process.watch()


async def test_what_ignores_the_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True); time.sleep(60)"
    )
    process = await ManagedProcess.start(python(code), tmp_path)
    await until_logged(process, "child")
    grandchild = int(process.last_lines().split()[-1])
    assert await process.stop(0.1) == -signal.SIGKILL
    await until(lambda: gone(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="ending with the parent is a Linux feature")
async def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
from pathlib import Path
from kvrouter.devtools.system.processes import Command, ManagedProcess
async def main():
    sleeper = Command("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    process = await ManagedProcess.start(sleeper, Path({str(tmp_path)!r}))
    print(process.pid, flush=True)
    await process.watch()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: gone(child))
