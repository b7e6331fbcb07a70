"""The guides to vLLM and SGLang, executed with simulated servers in place of the engines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kvrouter.devtools.system.ports import free_ports

from .commands import Guide
from .engine_commands import write_engine_commands


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("engine", "command", "port"), [("vllm", "vllm serve", 8100), ("sglang", "sglang serve", 30000)]
)
async def test_from_nothing_to_a_routed_request(
    engine: str, command: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = write_engine_commands(tmp_path / "engines")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    free = free_ports(3)
    ports = {f":{port}": f":{free[0]}", f"--port {port}": f"--port {free[0]}"}
    events = {"*:5557": f"*:{free[1]}", "*:6557": f"*:{free[2]}"}
    with Guide(f"docs/guides/{engine}.md", directory=tmp_path, replaced=ports | events) as guide:
        async with guide.running("kvrouter up") as system:
            http = await system.prints(r"^HTTP API +http://(\S+)")
            nats = await system.prints(r"^NATS +(\S+)")
            etcd = await system.prints(r"^etcd +(\S+)")
            await system.prints("Ctrl-C stops everything")
            guide.replace({"127.0.0.1:8000": http[1], "nats://127.0.0.1:4222": nats[1], "127.0.0.1:2379": etcd[1]})
            async with guide.running(command), guide.running("kvrouter sidecar"):
                # The Frontend learns of the component from etcd, shortly after the sidecar registered the engine.
                await guide.until("curl", lambda output: "choices" in answer(output)[1])

                # The Indexer learns of the blocks shortly after the engine stored them.
                second = await guide.until(
                    "curl", lambda output: answer(output)[0].get("x-kvrouter-overlap-blocks") == "2"
                )
                if engine == "vllm":
                    assert answer(second)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
                await guide.until("kvrouter top", lambda output: f"kvrouter/{engine}" in output)
            await system.interrupt()


def answer(output: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the headers, by lower-case name, and the body of a response as curl -i prints it."""
    head, _, body = output.replace("\r\n", "\n").partition("\n\n")
    headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:])
    return headers, json.loads(body)
