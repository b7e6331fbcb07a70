"""The answers of Indexers."""

from __future__ import annotations

Matches = tuple[bytes, bytes, bytes | None, int, bytes]
"""(ranks, blocks, lower, pooled, event ids) of an encoded FindMatchesResponse.

``ranks`` is the same message with nothing but the ranks and their incarnations. ``blocks`` is a row of int64: the
leading blocks of each rank in device memory. ``lower`` has three such rows, for each lower tier or a faster one; None
if no rank has more than ``blocks``. ``pooled`` is the number of leading blocks in shared storage, and ``event ids`` a
row of uint64: the id of each rank's next event. A message is refused if protobuf cannot parse it, whichever of its
fields is malformed.
"""
