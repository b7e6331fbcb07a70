"""What an operator does with ``kvrouter index`` on a system that runs."""

from __future__ import annotations

import asyncio
import sys

from .rig import IndexerProcess, Rig


async def command(rig: Rig, process: IndexerProcess, *arguments: str) -> tuple[int, str]:
    """Exit status and output of ``kvrouter index …``."""
    endpoint = await rig.endpoint_of(process)
    verb, *rest = arguments
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "index", verb, "--indexer", endpoint, *rest),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await running.communicate()
    return running.returncode or 0, output.decode()


async def test_every_command_does_what_it_says(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    dumped = str(rig.directory / "index.jsonl")

    status, output = await command(rig, one, "status")
    assert (status, "faults/pool: ready, transport durable" in output, "verified" in output) == (0, True, True), output
    status, output = await command(rig, one, "verify")
    assert (status, output.count("same")) == (0, 2), output
    status, output = await command(rig, one, "dump", "--output", dumped)
    assert status == 0, output
    status, output = await command(rig, one, "load", dumped)
    assert (status, "2 ranks" in output) == (0, True), output
    status, output = await command(rig, one, "resync", "--rank", "1")
    assert (status, "1 ranks replaced, 0 out of reach" in output) == (0, True), output
    status, output = await command(rig, one, "snapshot", "faults/pool")
    assert (status, "up to message" in output) == (0, True), output
    status, output = await command(rig, one, "reset")
    assert (status, "1 snapshots dropped" in output) == (0, True), output
    await rig.agree(one)
    await rig.serve(3)
    await rig.agree(one)


async def test_what_cannot_be_done_says_why(rig: Rig) -> None:
    await rig.start_nodes(1)
    one = await rig.indexer("one")
    await rig.agree(one)
    for arguments, expected, words in (
        (("status", "faults/nothing"), 1, "nothing"),
        (("verify", "pool"), 2, "namespace/component"),
        (("resync", "--rank", "first"), 2, "not a rank"),
        (("resync", "--rank", "77"), 1, "1 out of reach"),
        (("verify", "--rank", "77"), 1, "no answer"),
    ):
        status, output = await command(rig, one, *arguments)
        assert (status, words in output) == (expected, True), output
