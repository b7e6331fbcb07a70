"""The index holds what vLLM's own block pool holds, copy by copy, while requests come and go at random.

It predicts the prefix that vLLM reuses, also of hybrid models.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.v1.common_pb2 import Tier

from ..engine_caches import OPERATIONS, compare, followed
from .routed import Where

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("block_pool.py")
ROUNDS = 100


@pytest.mark.parametrize("groups", ["f", "fs", "Sfs", "fm", "fsm"])
async def test_the_index_equals_the_block_pool(vllm_python: str, tmp_path: Path, groups: str, where: Where) -> None:
    async with followed(vllm_python, SCRIPT, tmp_path, "1", "0", groups, engine="vllm", **where.settings) as each:
        evicted, repeated = await compare(each, ROUNDS)
    assert evicted > ROUNDS
    assert repeated > ROUNDS / 4


@pytest.mark.parametrize("chunk", ["1", "2"])
@pytest.mark.parametrize("described", ["0", "1"])
async def test_the_index_equals_the_offloaded_blocks(
    vllm_python: str, tmp_path: Path, chunk: str, described: str, where: Where
) -> None:
    settings = {**where.settings, "offloaded_blocks": "1" if described == "1" else chunk}
    script = SCRIPT.with_name("offloaded_pool.py")
    async with followed(
        vllm_python, script, tmp_path, "1", chunk, described, engine="vllm", tier=Tier.TIER_HOST, **settings
    ) as each:
        evicted, _ = await compare(each, ROUNDS)
    assert evicted > ROUNDS


async def test_sessions_that_report_their_hits_make_no_block_appear(
    vllm_python: str, tmp_path: Path, where: Where
) -> None:
    missing, resident = 0, 0
    async with followed(vllm_python, SCRIPT, tmp_path, "3", "0.5", engine="vllm", **where.settings) as each:
        for _ in range(ROUNDS):
            held = await each.after(OPERATIONS)
            known = each.known()
            assert not known - held
            missing += len(held.keys() - known.keys())
            resident += len(held)
    assert missing < 0.01 * resident
