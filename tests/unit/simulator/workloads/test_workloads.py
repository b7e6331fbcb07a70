"""What is sent: files that come back as they were, generators that keep their word."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest
from kvrouter.devtools.traces.reader import TraceError
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import GENERATORS, generate
from kvrouter.simulator.workloads.workload import Prompts, Request, Workload, expand


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_repeat_and_come_in_order(name: str) -> None:
    workload = generate(name, 300, seed=4)
    assert workload == generate(name, 300, seed=4)
    assert workload != generate(name, 300, seed=5)
    assert len(workload.requests) == 300
    assert all(a.arrives_s <= b.arrives_s for a, b in pairwise(workload.requests))
    assert all(r.prompt_tokens <= len(r.pieces) * workload.piece_tokens for r in workload.requests)


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_prompts_share_beginnings(name: str) -> None:
    requests = generate(name, 400).requests
    firsts = [request.pieces[0] for request in requests]
    assert len(set(firsts)) < len(firsts)


def test_a_chat_turn_begins_with_the_whole_of_the_turn_before() -> None:
    requests = generate("chat", 800).requests
    grown = sum(
        any(b.pieces[: len(a.pieces)] == a.pieces for a in requests[:number]) for number, b in enumerate(requests)
    )
    assert grown > 100


@pytest.mark.parametrize("name", ["chat", "prompts"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str, packed: bool) -> None:
    workload = generate(name, 50)
    path = tmp_path / ("w.jsonl.gz" if packed else "w.jsonl")
    text = "".join(traces.lines(workload)).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    found = traces.read(path)
    assert found.piece_tokens == workload.piece_tokens
    assert [(r.prompt_tokens, r.output_tokens, r.pieces) for r in found.requests] == [
        (r.prompt_tokens, r.output_tokens, r.pieces) for r in workload.requests
    ]
    start = workload.requests[0].arrives_s
    assert [r.arrives_s for r in found.requests] == pytest.approx(
        [r.arrives_s - start for r in workload.requests], abs=2e-6
    )


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"timestamp": -1}\n')
    with pytest.raises(TraceError, match=r"w\.jsonl:1: timestamp is -1"):
        traces.read(path)


def test_equal_pieces_are_equal_tokens_and_others_differ_in_every_group() -> None:
    one, other, high = expand(7, 64), expand(8, 64), expand(7 + (1 << 40), 64)
    assert one == expand(7, 64)
    assert len(one) == 4 * 64
    for another in (other, high):
        assert all(one[at : at + 16] != another[at : at + 16] for at in range(0, len(one), 16))


def test_prompts_share_the_blocks_that_their_pieces_share() -> None:
    requests = [Request(0.0, 40, 1, (1, 2)), Request(0.0, 60, 1, (1, 3)), Request(0.0, 60, 1, (4, 2))]
    prompts = Prompts(Workload("w", requests, 32), 16)
    hashed = [prompts.hashed(number) for number in range(3)]
    assert [prompt.blocks for prompt in hashed] == [2, 3, 3]
    assert hashed[0].sequence_hashes == hashed[1].sequence_hashes[:16]
    assert hashed[1].sequence_hashes[16:] != hashed[2].sequence_hashes[16:]
    assert hashed[0].sequence_hashes[:8] != hashed[2].sequence_hashes[:8]
