"""The guide for TensorRT-LLM, executed with a module in its place."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.common_pb2 import BlockScope
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

from .commands import REPOSITORY, Guide, blocks_of

GUIDE = "docs/guides/tensorrt-llm.md"


def test_its_code_is_that_of_the_example() -> None:
    example = (REPOSITORY / "examples" / "tensorrt_llm_engine.py").read_text()
    code = [block.text for block in blocks_of((REPOSITORY / GUIDE).read_text()) if block.language == "python"]
    assert len(code) == 2
    assert [each for each in code if each not in example] == []


@pytest.mark.parametrize("field", ["lora_name", "cache_salt", "tenant"])
async def test_a_scope_that_the_engine_would_not_keep_apart_is_refused(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "simulated")
    path = REPOSITORY / "examples" / "tensorrt_llm_engine.py"
    spec = importlib.util.spec_from_file_location("tensorrt_llm_engine", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    llm = example.LLM("m", example.KvCacheConfig(event_buffer_max_size=1))
    request = WorkerServiceGenerateRequest(request_id="r", token_ids=[1], scope=BlockScope(**{field: "x"}))
    request.stop_conditions.max_tokens = 1
    with pytest.raises(RequestRefused):
        async for _ in example.TensorRtLlmEngine(llm).generate(request):
            pass


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_from_nothing_to_a_routed_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = str(Path(__file__).parent / "simulated")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (simulated, os.environ.get("PYTHONPATH")))))
    with Guide(GUIDE, directory=tmp_path) as guide:
        async with guide.running("kvrouter up") as system:
            http = await system.prints(r"^HTTP API +http://(\S+)")
            nats = await system.prints(r"^NATS +(\S+)")
            etcd = await system.prints(r"^etcd +(\S+)")
            await system.prints("Ctrl-C stops everything")
            guide.replace({"127.0.0.1:8000": http[1], "nats://127.0.0.1:4222": nats[1], "127.0.0.1:2379": etcd[1]})
            async with guide.running("tensorrt_llm_engine.py") as engine:
                await engine.prints(r"serves 'my-model' at (\S+)")
                first = json.loads(await guide.until("curl", lambda output: "choices" in json.loads(output)))
                assert first["choices"][0]["token_ids"] == [1, 2, 3]
                second = json.loads(
                    await guide.until("curl", lambda output: json.loads(output)["kvrouter"]["predicted_overlap_blocks"])
                )
                assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
                assert second["kvrouter"]["predicted_overlap_blocks"] == 1
            await system.interrupt()
