"""The guide to simulated engine servers, executed."""

from __future__ import annotations

import json
from pathlib import Path

from kvrouter.devtools.system.ports import free_ports

from .commands import Guide


async def test_servers_answer_requests(tmp_path: Path) -> None:
    vllm, sglang, events, replays = (str(port) for port in free_ports(4))
    ports = {":8000": f":{vllm}", ":30000": f":{sglang}", "*:5557": f"*:{events}", "*:6557": f"*:{replays}"}
    with Guide("docs/guides/mock-engines.md", directory=tmp_path, replaced=ports) as guide:
        async with guide.running("kvrouter-mocker --openai") as server:
            await server.prints(f"127.0.0.1:{vllm}")
            answer = json.loads(await guide.run("/v1/completions"))
            assert len(answer["choices"][0]["token_ids"]) == 4
            await server.interrupt()
        async with guide.running("kvrouter-mocker --sglang") as server:
            await server.prints(f"127.0.0.1:{sglang}")
            assert len(json.loads(await guide.run("/generate"))["output_ids"]) == 4
            await server.interrupt()
