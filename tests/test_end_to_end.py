"""The answer that matters, through separate processes: predicted overlap is true, and routing by it pays.

Requests are those of the shipped trace that share a prefix with others, with short answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from kvrouter.devcommands.demo import DemoOptions, demo
from kvrouter.devtools.replay.frontend_target import ReplayOptions
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.sequential import sequential_replay
from kvrouter.devtools.replay.statistics import expected_cached_tokens
from kvrouter.devtools.system.stack import StackOptions, running_stack
from kvrouter.devtools.traces.reader import PIECE_TOKENS, TraceRequest, read_shipped_trace
from kvrouter.runtime.contracts import Frontend, Indexer
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2, indexer_pb2
from kvrouter.v1.common_pb2 import Component
from rich.console import Console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_SIZE = 16
_SHARED_PIECES = 2  # the trace's first piece is common to all; a request shares a prefix if it shares the second too


def sharing_requests(count: int, longest: int) -> list[TraceRequest]:
    """The first requests of the trace that share a prefix with another, and fit."""
    fitting = [
        request for request in read_shipped_trace() if _SHARED_PIECES * PIECE_TOKENS < request.input_length <= longest
    ]
    users = Counter(request.pieces[:_SHARED_PIECES] for request in fitting)
    chosen = [request for request in fitting if users[request.pieces[:_SHARED_PIECES]] > 1][:count]
    return [
        replace(request, index=index, output_length=min(request.output_length, 24))
        for index, request in enumerate(chosen)
    ]


def whole_block_prompts(first_index: int) -> list[TraceRequest]:
    """Prompts of whole blocks, each sent twice: the second time all of it is cached, and the last block recomputed."""
    return [
        TraceRequest(first_index + place, 0.0, tokens, 3, (1_000_000 + tokens, 1_000_001 + tokens))
        for place, tokens in enumerate(tokens for tokens in (16, 32, 512, 1024) for _ in range(2))
    ]


def scattered_prompts(first_index: int) -> list[TraceRequest]:
    """Short prompts that share nothing. Each goes to a random idle worker. One gets none once in 4 million runs."""
    return [TraceRequest(first_index + place, 0.0, 40, 2, (2_000_000 + place,)) for place in range(40)]


async def test_the_predicted_overlap_is_what_the_worker_finds_cached(tmp_path: Path) -> None:
    requests = sharing_requests(60, longest=12_000)
    requests += scattered_prompts(len(requests))
    requests += whole_block_prompts(len(requests))
    blocks = 2048  # 32,768 tokens: a few prompts, so that blocks are evicted all the time
    config = tmp_path / "scheduler.toml"
    config.write_text("indexer-timeout-ms = 20000\n")  # an Indexer that is there answers, however busy the machine
    options = StackOptions(
        tmp_path, tmp_path, workers=3, blocks=blocks, block_size=BLOCK_SIZE, clock=50.0, scheduler_config=config
    )
    async with (
        running_stack(options) as stack,
        open_channel(stack.frontend) as to_frontend,
        open_channel(stack.indexer) as to_indexer,
    ):
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], to_frontend))
        indexer = cast("Indexer", remote(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], to_indexer))
        component = Component(namespace=options.namespace, name=options.component)
        async with sequential_replay(frontend, indexer, component) as sequential:
            records = await sequential.play(requests, ReplayOptions(model=options.model, id_prefix="sequential"))

    predicted = [
        expected_cached_tokens(record.predicted_overlap_blocks or 0, record.prompt_tokens, BLOCK_SIZE)
        for record in records
    ]
    assert predicted == [record.cached_tokens for record in records]
    assert [record.output_tokens for record in records] == [request.output_length for request in requests]
    # The rest shows that the comparison had something to compare: hits, evictions, and every worker.
    assert sum(tokens > 0 for tokens in predicted) > len(records) // 4
    assert sum(record.prompt_tokens for record in records) > 2 * options.workers * blocks * BLOCK_SIZE
    assert len({record.worker for record in records}) == options.workers
    assert [record.cached_tokens for record in records[-8:]] == [0, 0, 0, 16, 0, 496, 0, 1008]


async def test_at_load_kv_routing_finds_more_cached_than_round_robin(tmp_path: Path) -> None:
    requests = spread(sharing_requests(160, longest=16_000), every_ms=150.0)
    console = Console(record=True, width=140)
    options = DemoOptions(
        requests=requests,
        trace_name="a part of the shipped trace",
        time_scale=TimeScale(load=1.0, clock=4.0),
        modes=("round-robin", "kv"),
        workers=4,
        blocks=8192,  # with half of them so much is evicted that chance can put round-robin first
        block_size=BLOCK_SIZE,
        results=tmp_path / "results",
    )
    round_robin, kv = await demo(options, console)
    for run in (round_robin, kv):
        assert run.completed == len(requests)
        assert run.errors == {}
        assert run.counts.events_applied
        assert run.counts.events_faulty == 0
        assert len(run.balance.tokens_by_rank) == options.workers
    assert kv.hit_rate > round_robin.hit_rate
    assert (options.results / "picture.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((options.results / "statistics.json").read_text())
    assert [run["mode"] for run in written["runs"]] == ["round-robin", "kv"]
    text = console.export_text()
    assert f"of {kv.possible_hit_rate:.1%}" in text
    assert kv.hit_rate <= kv.possible_hit_rate
    assert "picture.png" in text


def spread(requests: Sequence[TraceRequest], every_ms: float) -> list[TraceRequest]:
    """The same requests at even intervals."""
    return [replace(request, arrival_ms=place * every_ms) for place, request in enumerate(requests)]
