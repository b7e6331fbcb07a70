"""How much of a trace's prompts a cache could hold at most."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvrouter.devtools.traces.reader import TraceRequest


def possible_hit_rate(requests: Iterable[TraceRequest], block_size: int) -> float:
    """Returns the share of prompt tokens that one unlimited cache would hold if each request came after the last one.

    No router can find more: its workers have a part of such a cache each. An engine reuses whole blocks of
    ``block_size`` tokens, and always computes the last token. NaN without requests.
    """
    stored: dict[int, int] = {}  # tokens of the piece at the end of a prefix, by the prefix
    found = total = 0
    for request in requests:
        cached = prefix = 0
        is_shared = True
        for place, piece in enumerate(request.pieces):
            prefix = hash((prefix, piece))
            length = min(request.piece_tokens, request.input_length - place * request.piece_tokens)
            if length <= 0:
                break
            known = stored.get(prefix, 0)
            if is_shared:
                cached += min(known, length)
                is_shared = known >= request.piece_tokens
            stored[prefix] = max(known, length)
        found += min(cached, request.input_length - 1) // block_size * block_size
        total += request.input_length
    return found / total if total else math.nan
