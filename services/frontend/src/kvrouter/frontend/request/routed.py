"""How an attempt was routed, within this process."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.v1.common_pb2 import Component, KvSource, LowerTiers, Rank
from kvrouter.v1.frontend_pb2 import RoutedOn, RoutingInfo
from msgspec import Struct
from msgspec.structs import asdict


class Routed(Struct, kw_only=True, eq=False):
    """The fields of the contract's ``RoutingInfo``, which takes many times as long to make and to read."""

    request_id: str
    rank: Rank
    attempt: int = 0
    predicted_overlap_blocks: int = 0
    prompt_blocks: int = 0
    decision_id: int = 0
    load_only: bool = False
    router_us: int = 0
    mode: str = ""
    prefill_rank: Rank | None = None
    queued_us: int = 0
    ignored_overrides: Sequence[str] = ()
    prefill_reason: str = ""
    migrations: int = 0
    earlier_ranks: Sequence[Rank] = ()
    inexact_continuation: bool = False
    prefill_us: int = 0
    component: Component | None = None
    routed_on: RoutedOn = RoutedOn.ROUTED_ON_UNSPECIFIED
    model_choice: str = ""
    predicted_lower_blocks: LowerTiers | None = None
    kv_source: KvSource | None = None

    def to_message(self) -> RoutingInfo:
        """Returns the message."""
        return RoutingInfo(**asdict(self))
