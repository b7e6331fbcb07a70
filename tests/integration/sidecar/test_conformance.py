"""A sidecar passes the conformance kit, beside either engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvrouter.devtools.conformance.options import CheckOptions
from kvrouter.devtools.conformance.suite import run_checks
from kvrouter.v1.names import ComponentName

from .rig import Beside, EngineServer, sglang, vllm


@pytest.mark.parametrize(
    ("make", "options"), [(vllm, {"enable_prompt_tokens_details": True}), (sglang, {})], ids=["vllm", "sglang"]
)
async def test_a_sidecar_passes_the_conformance_kit(
    make: Callable[..., EngineServer],
    options: dict[str, Any],
    run: Beside,
    namespace: str,
    etcd_endpoint: str,
    nats_url: str,
) -> None:
    engine = make(num_blocks=8192, clock_factor=10, **options)
    async with engine.started() as server, run(server.url) as sidecar:
        await sidecar.ready()
        await sidecar.worker.registered()
        checked = CheckOptions(
            sidecar.worker.endpoint, 0, ComponentName(namespace, "workers"), etcd_endpoint, nats_url, seconds=15
        )
        results = {result.name: result async for result in run_checks(checked)}
    assert not [result for result in results.values() if result.outcome == "failed"]
    assert {name for name, result in results.items() if result.outcome == "skipped"} == {"restart"}
