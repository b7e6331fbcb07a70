"""C and C++ programs that check the header from inside, plainly, under sanitizers and under valgrind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from kvrouter.core import multimodal_hash

from ...faults.rig import COMPONENT, Rig
from .driven import start_driven
from .programs import HERE, compiled

RANKS = "rank {} blocks 400 events 800 unsent 0"
"""Four threads store two blocks a hundred times in each rank, and remove one of them."""
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # The library is not instrumented: the compiler's runtime sees its locks as little as its writes.
    "thread": ("-fsanitize=thread",),
}
SUPPRESSED = "called_from_lib:libkvrouter_publisher.so\n"


async def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Returns what a program printed; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
    )
    try:
        printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"exit code {process.returncode}\n{printed.decode()}\n{errors.decode()}"
    return printed.decode()


def arguments(rig: Rig) -> tuple[str, str, str]:
    return str(COMPONENT), rig.etcd.endpoint, rig.nats.url


@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
async def test_a_cpp_program_gets_the_documented_statuses_and_words(rig: Rig, tmp_path: Path, static: bool) -> None:
    program = compiled(HERE / "interface.cpp", tmp_path, static=static)
    printed = await run(program, *arguments(rig))
    assert printed == f"content {multimodal_hash('image-1')}\n"


async def test_threads_report_and_serve_at_once(rig: Rig, tmp_path: Path) -> None:
    printed = await run(compiled(HERE / "threads.c", tmp_path), *arguments(rig))
    assert printed.splitlines() == [RANKS.format(0), RANKS.format(1)]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("source", ["threads.c", "interface.cpp"])
async def test_sanitizers_find_nothing(rig: Rig, tmp_path: Path, source: str, sanitizer: str) -> None:
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    try:
        await run(compiled(empty, tmp_path, *SANITIZERS[sanitizer]))
    except AssertionError as error:
        pytest.skip(f"no {sanitizer} sanitizer: {str(error)[:200]}")
    suppressed = tmp_path / "suppressed"
    suppressed.write_text(SUPPRESSED)
    program = compiled(HERE / source, tmp_path, *SANITIZERS[sanitizer])
    await run(program, *arguments(rig), environment={"TSAN_OPTIONS": f"suppressions={suppressed} halt_on_error=1"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", ["threads.c", "interface.cpp"])
async def test_valgrind_finds_no_error_and_no_leak(rig: Rig, tmp_path: Path, source: str) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("no valgrind")
    await run(
        *(valgrind, "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite", "--quiet"),
        compiled(HERE / source, tmp_path),
        *arguments(rig),
    )


async def test_the_library_lets_no_signal_into_its_threads(rig: Rig, driven_worker: Path) -> None:
    """A connection that breaks raises SIGPIPE, which would end an engine that leaves that signal as it is."""
    node = await start_driven(rig, driven_worker, 1)
    masks = blocked_signals(node.worker.pid)
    blocked = [1 << (number - 1) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)]
    assert len(masks) >= 2
    assert all(mask & each for mask in masks for each in blocked), masks


def blocked_signals(process_id: int) -> list[int]:
    """Returns the mask of each thread of the library in a process."""
    masks = []
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines() if ":\t" in line)
        if fields["Name"].startswith("kvrouter"):
            masks.append(int(fields["SigBlk"], 16))
    return masks
