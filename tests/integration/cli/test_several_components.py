"""`kvrouter serve --engine COMPONENT=URL`: engines of several models, and of several roles, behind one process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ...waiting import until
from ..sidecar.rig import BLOCK, EngineServer, sglang, vllm
from .no_broker import command, serving

pytestmark = pytest.mark.timeout(120)


def prompt(number: int, blocks: int = 2) -> list[int]:
    return [1000 * number + each for each in range(blocks * BLOCK + 1)]


@pytest.mark.full
async def test_each_model_has_engines_of_its_own(tmp_path: Path) -> None:
    first, second = vllm(enable_prompt_tokens_details=True), vllm(model="n", enable_prompt_tokens_details=True)
    third = vllm(model="n", block_size=2 * BLOCK)
    (tmp_path / "engines").write_text(f"small={second.url}\n")
    options = ("--engines-file", str(tmp_path / "engines"), "--state", str(tmp_path / "state"))
    async with AsyncExitStack() as stack:
        for each in (first, second, third):
            await stack.enter_async_context(each.started())
        urls = (first.url, f"small={third.url}")
        system = await stack.enter_async_context(serving(tmp_path, *urls[:1], options=options))
        await system.serving(2)
        assert sorted(await system.models()) == ["m", "n"]
        workers = {}
        for model in ("m", "n"):
            for _ in range(2):
                answer = await system.ask(prompt(1), model=model)
                assert answer.status == 200

            async def hits(model: str = model) -> bool:
                return (await system.ask(prompt(1), model=model)).overlap_blocks == 2

            await until(hits, 60)
            workers[model] = (await system.ask(prompt(1), model=model)).worker
        assert workers["m"] != workers["n"]
        assert (await system.ask(prompt(1), model="other")).status == 404

        await command(tmp_path, "engine", "add", urls[1])
        await system.until_logged("sidecar.worker_refused")
        await command(tmp_path, "engine", "drain", f"small={second.url}")
        assert (await system.ask(prompt(1), model="n")).status == 503
        assert (await system.ask(prompt(1), model="m")).status == 200


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (vllm(role="prefill"), vllm(role="decode"), ("--engine-role", "prefill,decode")),
        (sglang(role="prefill", disaggregation_bootstrap_port=0), sglang(role="decode"), ()),
    ],
    ids=["vllm", "sglang"],
)
async def test_prefill_and_decode_engines_share_a_request(
    first: EngineServer, second: EngineServer, options: tuple[str, ...], tmp_path: Path
) -> None:
    urls = (f"prefill={first.url}", f"decode={second.url}")
    early = ("--remote-prefill-min-tokens", "32", "--kv-transfer-latency-ms", "0")
    async with (
        first.started() as prefill,
        second.started() as decode,
        serving(tmp_path, *urls, options=(*options, *early)) as system,
    ):
        await system.serving(2)

        async def is_shared() -> bool:
            answer = await system.ask(prompt(1, 25))
            return answer.status == 200 and all(
                sum(driver.prompt_tokens_total for driver in server.service.drivers.values()) >= 100
                for server in (prefill, decode)
            )

        await until(is_shared, 60)
