"""The guide for engines in C, executed."""

from __future__ import annotations

import json

import pytest

from ...guides.commands import REPOSITORY, Guide, blocks_of

GUIDE = "docs/guides/c-engine.md"


def test_its_code_is_that_of_the_example() -> None:
    example = (REPOSITORY / "examples" / "small_engine.c").read_text()
    code = [block.text for block in blocks_of((REPOSITORY / GUIDE).read_text()) if block.language == "c"]
    assert len(code) == 5
    assert [each for each in code if each not in example] == []


@pytest.mark.timeout(300)
async def test_from_nothing_to_a_routed_request() -> None:
    with Guide(GUIDE) as guide:
        guide.block("make c-library", "sh")  # takes minutes; `make test-full` executes it before this
        await guide.run("cc -O2")
        async with guide.running("kvrouter up") as system:
            http = await system.prints(r"^HTTP API +http://(\S+)")
            nats = await system.prints(r"^NATS +(\S+)")
            etcd = await system.prints(r"^etcd +(\S+)")
            await system.prints("Ctrl-C stops everything")
            guide.replace({"127.0.0.1:8000": http[1], "nats://127.0.0.1:4222": nats[1], "127.0.0.1:2379": etcd[1]})
            async with guide.running("build/small_engine kvrouter") as engine:
                printed = await engine.prints(r"serves 'small-c' at (\S+)")
                guide.replace({"127.0.0.1:45033": printed[1]})
                # The Frontend learns of the component from etcd, shortly after the worker registered.
                first = await guide.until("curl", lambda output: "choices" in json.loads(output))
                assert json.loads(first)["choices"][0]["token_ids"] == [1, 2, 3]
                # The Indexer learns of the blocks from NATS, shortly after the first request.
                second = json.loads(await guide.until("curl", lambda output: overlap_of(output) == 2))
                assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
                checks = await guide.run("devtools.conformance")
                assert checks.splitlines()[-1] == "16 passed, 0 failed, 4 skipped", checks
                await engine.interrupt()
            await system.interrupt()


def overlap_of(output: str) -> int:
    return int(json.loads(output)["kvrouter"]["predicted_overlap_blocks"])
