"""The index holds what SGLang's own radix cache holds, while sequences are computed and evicted at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..engine_caches import compare, followed
from ..vllm.routed import Where

SCRIPT = Path(__file__).with_name("radix_cache.py")
ROUNDS = 100


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", ["1", "2"])
async def test_the_index_equals_the_radix_cache(sglang_python: str, tmp_path: Path, seed: str, where: Where) -> None:
    async with followed(sglang_python, SCRIPT, tmp_path, seed, engine="sglang", **where.settings) as each:
        evicted, repeated = await compare(each, ROUNDS)
    assert evicted > ROUNDS
    assert repeated == 0
