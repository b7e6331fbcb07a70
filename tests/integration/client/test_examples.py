"""The programs of examples/client do what they show, against a running system."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from kvrouter.client import Client
from kvrouter.devtools.system.stack import Stack

from ...guides.commands import blocks_of
from ..frontend.gateway import running_system
from .test_client import until_idle

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "python-client.md"
EXAMPLES = Path(__file__).parents[3] / "examples" / "client"
MODEL = "mock-model"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def output_of(example: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / example), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (0, "")
    return output.decode()


async def until_cached(stack: Stack) -> set[int]:
    """Runs the prompt of the examples. Returns the workers that have it, once the index knows and no booking is left.

    Another test may have run it on the other worker too.
    """
    async with Client(stack.frontend, model=MODEL) as client:
        generation = await client.generate(range(1, 257))
        await generation.tokens()
        async with asyncio.timeout(30):
            while generation.routing.worker_id not in (found := await client.find_matches_for_request(range(1, 257))):
                await asyncio.sleep(0.02)
        await until_idle(client)
        return set(found)


async def test_the_programs_of_the_guide_run(stack: Stack, tmp_path: Path) -> None:
    programs = [block.text for block in blocks_of(GUIDE.read_text()) if block.language == "python"]
    assert len(programs) == 3
    addresses = {"127.0.0.1:8001": stack.frontend, "127.0.0.1:2379": stack.etcd.endpoint}
    for number, program in enumerate(programs):
        for written, actual in (addresses | {"nats://127.0.0.1:4222": stack.nats.url}).items():
            program = program.replace(written, actual)
        saved = tmp_path / f"{number}.py"
        saved.write_text(program)
        output = await output_of(str(saved))
        assert len(re.findall(r"\d+", output)) >= 8


async def test_automatic_routing(stack: Stack) -> None:
    assert re.fullmatch(r"worker [12]: 20 tokens\n", await output_of("automatic.py", stack.frontend, MODEL))


async def test_manual_state_management(stack: Stack) -> None:
    lines = r"first token: known True\nworker [12]: 20 tokens, freed True\n"
    assert re.fullmatch(lines, await output_of("manual_state.py", stack.frontend, MODEL))
    async with Client(stack.frontend, model=MODEL) as client:
        assert len(await client.get_potential_loads([1])) == 2
        await until_idle(client)


async def test_hierarchical_probing(stack: Stack, nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    holders = await until_cached(stack)
    async with running_system(nats_url, etcd_endpoint, namespace) as other:
        await other.start_worker(1)
        output = await output_of("hierarchical.py", MODEL, other.target, stack.frontend)
    assert output in {f"overlaps: [0, 15]\ngroup 1: worker {each}, 16 tokens\n" for each in holders}


async def test_a_rule_of_ones_own_on_potential_loads(stack: Stack) -> None:
    holders = await until_cached(stack)
    async with asyncio.timeout(60):
        while True:
            output = await output_of("minimize_ttft.py", stack.frontend, MODEL)
            prefill = {int(worker): int(tokens) for worker, tokens in re.findall(r"worker (\d): (\d+) prefill", output)}
            if 16 in prefill.values():
                break  # Without an answer of the Indexer, a Scheduler decides by load alone.
    assert prefill.keys() == {1, 2}
    assert {prefill[each] for each in holders} == {16}
    chosen = min(prefill, key=prefill.__getitem__)
    assert output.endswith(f"chosen {chosen}: 16 tokens\n")


async def test_routing_without_a_frontend(stack: Stack) -> None:
    output = await output_of("in_process.py", stack.nats.url, stack.etcd.endpoint, MODEL)
    assert re.fullmatch(r"probed worker [12]; worker [12]: 20 tokens\n", output)
