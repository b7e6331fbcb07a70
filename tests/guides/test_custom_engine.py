"""The guide for engines in Python, executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .commands import REPOSITORY, Guide, blocks_of

GUIDE = "docs/guides/custom-engine.md"


def test_its_code_is_that_of_the_example() -> None:
    example = (REPOSITORY / "examples" / "small_engine.py").read_text()
    code = [block.text for block in blocks_of((REPOSITORY / GUIDE).read_text()) if block.language == "python"]
    assert len(code) == 4
    assert [each for each in code if each not in example] == []


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_from_nothing_to_a_routed_request(tmp_path: Path) -> None:
    with Guide(GUIDE, directory=tmp_path) as guide:
        async with guide.running("kvrouter up") as system:
            http = await system.prints(r"^HTTP API +http://(\S+)")
            nats = await system.prints(r"^NATS +(\S+)")
            etcd = await system.prints(r"^etcd +(\S+)")
            await system.prints("Ctrl-C stops everything")
            guide.replace({"127.0.0.1:8000": http[1], "nats://127.0.0.1:4222": nats[1], "127.0.0.1:2379": etcd[1]})
            async with guide.running("small_engine.py") as engine:
                said = await engine.prints(r"serves 'small' at (\S+)")
                guide.replace({"127.0.0.1:45033": said[1]})
                # The Frontend learns of the component from etcd, shortly after the worker registered.
                first = await guide.until("curl", lambda output: "choices" in json.loads(output))
                assert json.loads(first)["choices"][0]["token_ids"] == [1, 2, 3]
                second = json.loads(await guide.run("curl"))
                assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
                checks = await guide.run("devtools.conformance")
                assert checks.splitlines()[-1] == "17 passed, 0 failed, 3 skipped"
                await guide.until("kvrouter top", lambda output: "kvrouter/small" in output)
            await system.interrupt()
