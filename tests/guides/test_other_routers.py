"""The guide to the index for other routers, executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_ports

from ..integration.sidecar.rig import vllm
from .commands import Guide

GUIDE = "docs/guides/other-routers.md"


@pytest.mark.timeout(180)
async def test_both_protocols_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    queries, http = (str(port) for port in free_ports(2))
    engine = vllm(model="my-model", block_size=16, enable_prompt_tokens_details=True)
    replaced = {
        "http://127.0.0.1:8100": engine.url,
        ":13333": f":{queries}",
        "--query-bind": f"--port {http} --query-bind",
    }
    with Guide(GUIDE, directory=tmp_path, replaced=replaced) as guide:
        async with engine.started(clock_factor=1), guide.running("--query-bind") as router:
            await router.prints("sidecar.engine_registered")
            answer = json.loads(await guide.until('"block_size": 16', lambda output: "longest_matched" in output))
            assert [each["longest_matched"] for each in answer["default"].values()] == [0]
            answer = json.loads(await guide.until("model_name", lambda output: "scores" in output))
            assert answer == {"scores": {}, "frequencies": [], "instances": {}}
            await router.interrupt()
