"""The router predicts the cached tokens that a real vLLM reports, while its cache fills, evicts and is reset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .engine import BLOCK, Published, VllmServer
from .routed import WAYS, Answer, Routed, Way, Where, routing
from .traffic import bodies

pytestmark = pytest.mark.timeout(900)

REQUESTS = 300


async def asked(routed: Routed, body: dict[str, Any]) -> Answer:
    answer = await routed.post(body)
    assert answer.status == 200, (body, answer.body)
    assert answer.routed_on == "tokens", body
    return answer


def note(directory: Path, **results: Any) -> None:
    """Keeps results that the guide quotes."""
    (directory / "result.json").write_text(json.dumps(results))


@pytest.mark.parametrize("way", WAYS)
async def test_predicted_cached_tokens_are_those_that_vllm_reports(
    way: Way, where: Where, tmp_path: Path, roomy: VllmServer
) -> None:
    await roomy.ready()
    differences: Counter[int] = Counter()
    cached, kinds = 0, Counter[str]()
    async with routing(way, where, tmp_path, roomy) as routed:
        for body in bodies(WAYS.index(way), REQUESTS):
            answer = await asked(routed, body)
            differences[answer.predicted - answer.reported] += 1
            cached += answer.reported
            kinds[("chat" if "messages" in body else "completion") + (" streamed" if "stream" in body else "")] += 1
            await routed.until_indexed(answer.sequence)
    note(tmp_path, differences=differences, cached=cached, kinds=kinds)
    log = (tmp_path / "router.log").read_text()
    assert way == "sidecar-tokens" or '"prompts.compared"' in log
    assert '"prompts.differ"' not in log
    assert cached > 0
    assert min(kinds.values()) > REQUESTS / 10
    assert differences == {0: REQUESTS}


@pytest.mark.parametrize("way", WAYS)
async def test_eviction_and_reset(way: Way, where: Where, tmp_path: Path, small: VllmServer) -> None:
    await small.ready()
    published = Published(small)
    await published.blocks()
    before = published.evicted
    async with routing(way, where, tmp_path, small) as routed:
        sent = bodies(WAYS.index(way), REQUESTS // 2)
        filled = await _differences(routed, published, sent)
        evicted = published.evicted - before
        cleared = published.cleared
        assert await small.post("/reset_prefix_cache", {}) == {"success": True}
        # vLLM publishes that it cleared its cache with the events of its next step.
        await asked(routed, {"prompt": [1, 2, 3], "max_tokens": 1})
        await routed.until_applied(published)
        assert published.cleared == cleared + 1
        assert not any((await routed.blocks()).values())
        first = await asked(routed, sent[0])
        assert (first.predicted, first.reported) == (0, 0)
        await routed.until_applied(published)
        after = await _differences(routed, published, sent[:20])
    note(tmp_path, filled=filled, evicted=evicted, after_reset=after)
    assert evicted > REQUESTS
    assert max(filled) <= BLOCK
    assert max(after) <= BLOCK


async def _differences(routed: Routed, published: Published, sent: Sequence[dict[str, Any]]) -> Counter[int]:
    """Returns how often the prediction was by how many tokens above the report, once all events were applied."""
    differences: Counter[int] = Counter()
    for body in sent:
        answer = await asked(routed, body)
        differences[answer.predicted - answer.reported] += 1
        await routed.until_applied(published)
    return differences
