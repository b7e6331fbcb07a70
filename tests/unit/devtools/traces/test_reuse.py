from __future__ import annotations

import math

from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.devtools.traces.reuse import possible_hit_rate


def request(length: int, *pieces: int) -> TraceRequest:
    return TraceRequest(0, 0.0, length, 1, pieces, piece_tokens=64)


def test_a_prompt_finds_the_prefix_that_it_shares_with_any_earlier_one() -> None:
    assert possible_hit_rate([request(128, 1, 2), request(128, 1, 3), request(128, 1, 2)], 16) == (64 + 112) / 384


def test_equal_pieces_after_different_ones_are_not_shared() -> None:
    assert possible_hit_rate([request(128, 1, 2), request(128, 3, 2)], 16) == 0


def test_only_whole_blocks_that_were_stored_are_found() -> None:
    assert possible_hit_rate([request(40, 1), request(64, 1)], 16) == 32 / 104
    assert possible_hit_rate([request(40, 1), request(128, 1, 2), request(128, 1, 2)], 16) == (32 + 112) / 296
    assert math.isnan(possible_hit_rate([], 16))
