"""The guide to one process without a broker, executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_ports

from .commands import Guide

GUIDE = "docs/guides/no-broker.md"


@pytest.mark.timeout(300)
async def test_a_request_hits_the_cache_that_an_engine_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one, two, http, other, first_peer, second_peer, *sockets = (str(port) for port in free_ports(10))
    ports = {":8100": f":{one}", ":8101": f":{two}", ":8000": f":{http}", "--port 8000": f"--port {http}"}
    ports |= {"--port 8001": f"--port {other}", ":50051": f":{first_peer}", ":50052": f":{second_peer}"}
    shown = ("*:5557", "*:6557", "*:5558", "*:6558")
    ports |= {name: f"*:{port}" for name, port in zip(shown, sockets, strict=True)}
    ports["kvrouter-state"] = str(tmp_path / "state")
    with Guide(GUIDE, directory=tmp_path, replaced=ports) as guide:
        async with (
            guide.running("--bind 127.0.0.1:8100") as first,
            guide.running("--bind 127.0.0.1:8101") as second,
        ):
            await first.prints(f"127.0.0.1:{one}")
            await second.prints(f"127.0.0.1:{two}")
            async with guide.running("--state kvrouter-state") as router:
                for _ in range(2):
                    await router.prints("sidecar.engine_registered")
                hit = "x-kvrouter-overlap-blocks: 2"
                answer = await guide.until("/v1/completions", lambda output: hit in output)
                body = json.loads(answer[answer.index("{") :])
                assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
                await guide.until("kvrouter top", lambda output: "2 ranks" in output)
                await router.interrupt()
            async with (
                guide.running("--bind 127.0.0.1:50051") as router,
                guide.running("--bind 127.0.0.1:50052") as beside,
            ):
                await router.prints("peer.connected")
                await beside.prints("peer.connected")
                await router.interrupt()
                await beside.interrupt()
            await first.interrupt()
            await second.interrupt()
