"""How `kvrouter index` reads the names of ranks."""

from __future__ import annotations

import pytest
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.index.calls import rank_of_text
from kvrouter.cli.terminal import rank_name
from kvrouter.v1.common_pb2 import Rank

LONG = Rank(worker_id=1_234_567_890_123, dp_rank=1)
KNOWN = [LONG, Rank(worker_id=1_234_567_890_123), Rank(worker_id=7)]


def test_a_rank_is_read_as_top_shows_it() -> None:
    assert rank_of_text("7", []) == Rank(worker_id=7)
    assert rank_of_text("7:2", []) == Rank(worker_id=7, dp_rank=2)
    for wide in (True, False):
        assert rank_of_text(rank_name(LONG, wide=wide), KNOWN) == LONG


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("first", "expected WORKER_ID or WORKER_ID:DP_RANK"),
        ("9999…0123", "stands for no worker of the index"),
        ("1234…0123", "stands for 1234000000123, 1234567890123"),
    ],
)
def test_a_name_of_no_rank_or_of_several_is_refused(text: str, words: str) -> None:
    with pytest.raises(WrongUsage, match=words):
        rank_of_text(text, [*KNOWN, Rank(worker_id=1_234_000_000_123)])
