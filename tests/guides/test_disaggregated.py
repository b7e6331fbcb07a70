"""The guide to disaggregated serving, executed with simulated workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .commands import Guide


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_a_long_prompt_makes_the_detour_and_a_short_one_does_not(tmp_path: Path) -> None:
    with Guide("docs/guides/disaggregated.md", directory=tmp_path) as guide:
        async with guide.running("kvrouter up") as system:
            http = await system.prints(r"^HTTP API +http://(\S+)")
            await system.prints("Ctrl-C stops everything")
            guide.replace({"127.0.0.1:8000": http[1]})
            long = json.loads(await guide.run("seq -s, 1 2000"))["kvrouter"]
            assert long["prefill_rank"] == "3:0"
            assert long["prefill_reason"] == "to transfer 2000 tokens takes 15.5 ms, to compute them 48.6 ms"
            short = json.loads(await guide.run("seq -s, 5001 5100)"))["kvrouter"]
            assert "prefill_rank" not in short
            assert short["prefill_reason"] == "the decode worker lacks only 100 tokens, fewer than 512"
            await system.interrupt()
